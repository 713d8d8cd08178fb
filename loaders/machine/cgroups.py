"""Limits that a container sets for this process, by its control groups, version 1 and 2.

A group's limit applies to everything below it, so this module reads each group from the process's own up to the topmost
visible one. Functions take the root folder, so that tests can replace the kernel's files.
Formats: https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_UNLIMITED_BYTES = 2**60  # version 1 writes "no limit" as the largest multiple of a page in 63 bits


@dataclass(frozen=True)
class MemoryLimit:
    """One group's limit, the memory still available below it, and the file that sets it."""

    limit_bytes: int
    available_bytes: int
    source: str


@dataclass(frozen=True)
class CpuQuota:
    """A quota of processor time: 1.5 means one and a half processors."""

    num_cpus: float
    source: str


@dataclass(frozen=True)
class _ControlGroup:
    """A control group: its folder, and its path as the kernel names it."""

    version: int
    folder: Path
    path: str

    def number(self, name: str) -> int | None:
        """The number in a file of this group; None if it contains "max" or does not exist."""
        try:
            return int(self.text(name))
        except ValueError:
            return None

    def text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):  # missing in the root group, or not readable
            return ""

    def source(self, name: str) -> str:
        return f"cgroup v{self.version} {name} of {self.path}"


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """Every memory limit of this process, without swap."""
    limits = (_memory_limit(group) for group in _groups(root, "memory"))
    return [limit for limit in limits if limit is not None]


def _memory_limit(group: _ControlGroup) -> MemoryLimit | None:
    # memory.high does not kill, but throttles a process beyond it: it is a limit as well.
    names = ("memory.limit_in_bytes",) if group.version == 1 else ("memory.max", "memory.high")
    limits = [(limit, name) for name in names if (limit := group.number(name)) is not None and limit < _UNLIMITED_BYTES]
    if not limits:
        return None
    limit, name = min(limits)
    usage = group.number("memory.usage_in_bytes" if group.version == 1 else "memory.current") or 0
    used = max(0, usage - _reclaimable_bytes(group))
    return MemoryLimit(limit, max(0, limit - used), group.source(name))


def _reclaimable_bytes(group: _ControlGroup) -> int:
    """Page cache that the kernel can drop before allocations fail.

    Active and inactive files count, as in the kernel's MemAvailable. Mapped files do not count: they are programs and
    libraries, which would be read again at once.
    """
    stat = dict(line.split()[:2] for line in group.text("memory.stat").splitlines() if len(line.split()) >= 2)
    names = ("total_inactive_file", "total_active_file", "total_mapped_file")  # total_: includes the groups below
    if group.version == 2:
        names = ("inactive_file", "active_file", "file_mapped")
    inactive, active, mapped = (int(stat.get(name, "0")) for name in names)
    return max(0, inactive + active - mapped)


def cpu_quota(root: Path = ROOT) -> CpuQuota | None:
    """The lowest limit of processor time of this process; None if there is none."""
    quotas = [quota for group in _groups(root, "cpu") if (quota := _cpu_quota(group)) is not None]
    return min(quotas, key=lambda quota: quota.num_cpus, default=None)


def _cpu_quota(group: _ControlGroup) -> CpuQuota | None:
    if group.version == 1:
        name = "cpu.cfs_quota_us"
        quota, period = group.number(name), group.number("cpu.cfs_period_us")  # a quota of -1 means no limit
    else:
        name = "cpu.max"
        match = re.fullmatch(r"(\d+) (\d+)", group.text(name))
        quota, period = (int(match[1]), int(match[2])) if match else (None, None)
    return CpuQuota(quota / period, group.source(name)) if quota and period and quota > 0 else None


# ------------------------------------------------------------------------------------------------ the groups


def _groups(root: Path, controller: str) -> Iterator[_ControlGroup]:
    """The process's group and its ancestors, in each hierarchy that may limit `controller`."""
    own_paths = _own_paths(root, controller)
    for version, mounted, mount_point in _mounts(root, controller):
        if version in own_paths:
            top = root / mount_point.lstrip("/")
            below = _below(own_paths[version], mounted)
            for part in (below, *below.parents):
                yield _ControlGroup(version, top / part, str(PurePosixPath(mounted) / part))


def _own_paths(root: Path, controller: str) -> dict[int, str]:
    """Version → this process's group. Version 2 has one hierarchy for all controllers, with number 0."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "", "")
        if controller in controllers.split(","):
            paths[1] = path
        elif number == "0" and not controllers:
            paths[2] = path
    return paths


def _mounts(root: Path, controller: str) -> Iterator[tuple[int, str, str]]:
    """Version, mounted group and mount point of each hierarchy, as in /proc/self/mountinfo (proc_pid_mountinfo(5))."""
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        mount, system = left.split(), right.split()
        if len(mount) < 5 or len(system) < 3:
            continue
        if system[0] == "cgroup2":
            yield 2, _unescape(mount[3]), _unescape(mount[4])
        elif system[0] == "cgroup" and controller in system[2].split(","):
            yield 1, _unescape(mount[3]), _unescape(mount[4])


def _below(group: str, mounted: str) -> PurePosixPath:
    """The group's path below the mount. A container may see its own group mounted as the root, under another name."""
    path = PurePosixPath(group)
    # A path with ".." leads out of this cgroup namespace, which is not visible.
    if ".." in path.parts or not path.is_relative_to(mounted):
        return PurePosixPath()
    return path.relative_to(mounted)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux, or /proc is not mounted
        return []
