"""What the machine has, with its source; a container's limit is the truth; rates are plausible. No clock is judged."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from offspec.backends.cpu import CpuBackend
from offspec.backends.on_gpu import FUSED_ROWS
from offspec.errors import HardwareError, OffspecError, UsageError
from offspec.loaders.files.readers import FileReader
from offspec.loaders.formats import StoredWeight, four_bit
from offspec.loaders.machine import hardware, measure
from offspec.loaders.machine.cgroups import cpu_quota, memory_limits
from offspec.loaders.machine.gpus import KNOWN_GPUS, find_gpu
from offspec.loaders.machine.hardware import (
    Memory,
    Rates,
    read_cores,
    read_cpu_name,
    read_disk,
    read_gpu,
    read_hardware,
    read_memory,
)
from offspec.loaders.machine.product_rates import of_no_file
from offspec.loaders.units import format_count, format_quantity, format_seconds, format_size, parse_size

from ...machines import NO_VECTORS, by_processor, num_cpus, ram_bytes
from ...refusals import refused, tells

GIB, MIB = 2**30, 2**20
CPU = torch.device("cpu")
NO_LIMIT = 9223372036854771712

# ------------------------------------------------------------------------------------------------ control groups

V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "35 31 0:32 {root} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"
)
V2 = "35 31 0:32 {root} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"

Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A root folder in which the process is in group `own` of the hierarchy that `mountinfo` shows; {path: text}."""

    def build(own: str, mountinfo: str, files: dict[str, object]) -> Path:
        told = {"proc/self/cgroup": own, "proc/self/mountinfo": mountinfo}
        told |= {f"sys/fs/cgroup/{path}": f"{text}\n" for path, text in files.items()}
        for path, text in told.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return build


def v1_group(path: str, limit: int, usage: int = 0, **stat: int) -> dict[str, object]:
    lines = "\n".join(f"{key} {value}" for key, value in stat.items())
    return {
        f"memory{path}/memory.limit_in_bytes": limit,
        f"memory{path}/memory.usage_in_bytes": usage,
        f"memory{path}/memory.stat": lines,
    }


def test_v1_the_tightest_group_on_the_way_up_binds(tree: Tree) -> None:
    files = v1_group("/a/b", 8 * GIB, 1 * GIB) | v1_group("/a", 4 * GIB, 3 * GIB) | v1_group("", NO_LIMIT, 9 * GIB)
    root = tree("4:memory:/a/b\n1:cpu:/\n", V1.format(root="/", name="memory"), files)
    limits = memory_limits(root)
    assert [(limit.limit_bytes, limit.available_bytes) for limit in limits] == [(8 * GIB, 7 * GIB), (4 * GIB, GIB)]
    assert limits[1].source == "cgroup v1 memory.limit_in_bytes of /a"


def test_v1_page_cache_is_not_used_but_what_is_mapped_is(tree: Tree) -> None:
    stat = {"inactive_file": 1, "total_inactive_file": 2 * GIB, "total_active_file": GIB, "total_mapped_file": GIB // 2}
    root = tree("4:memory:/", V1.format(root="/", name="memory"), v1_group("", 8 * GIB, 6 * GIB, **stat))
    (limit,) = memory_limits(root)
    assert limit.available_bytes == 8 * GIB - (6 * GIB - (3 * GIB - GIB // 2))


@pytest.mark.parametrize("own", ["/docker/abc", "/docker/abc/job", "/../elsewhere", "/other"])
def test_v1_a_container_sees_its_own_group_as_the_top(tree: Tree, own: str) -> None:
    """Without a namespace of its own the group's path is the host's, and only what lies below it is mounted."""
    files = v1_group("", 2 * GIB, GIB) | v1_group("/job", NO_LIMIT, GIB)
    root = tree(f"4:memory:{own}", V1.format(root="/docker/abc", name="memory"), files)
    assert [limit.source for limit in memory_limits(root)] == ["cgroup v1 memory.limit_in_bytes of /docker/abc"]


@pytest.mark.parametrize(
    ("maximum", "high", "bound", "source"),
    [
        (4 * GIB, "max", 4 * GIB, "memory.max"),
        (4 * GIB, 3 * GIB, 3 * GIB, "memory.high"),
        ("max", GIB, GIB, "memory.high"),
    ],
)
def test_v2(tree: Tree, maximum: object, high: object, bound: int, source: str) -> None:
    files: dict[str, object] = {
        "app.slice/memory.max": maximum,
        "app.slice/memory.high": high,
        "app.slice/memory.current": GIB,
        "app.slice/memory.stat": f"anon 5\ninactive_file {GIB // 4}\nactive_file {GIB // 4}\nfile_mapped 0\n",
    }
    (limit,) = memory_limits(tree("0::/app.slice", V2.format(root="/"), files))
    assert (limit.limit_bytes, limit.available_bytes) == (bound, bound - GIB // 2)
    assert limit.source == f"cgroup v2 {source} of /app.slice"


def test_no_limit_is_no_limit(tree: Tree) -> None:
    files = {"app.slice/memory.max": "max", "app.slice/memory.high": "max", "app.slice/cpu.max": "max 100000"}
    root = tree("0::/app.slice", V2.format(root="/"), files)
    assert (memory_limits(root), cpu_quota(root)) == ([], None)


@pytest.mark.parametrize(
    ("files", "available"),
    [
        *(({"memory.max": text}, []) for text in ("a lot", "\x00")),
        ({}, []),
        ({"memory.max": GIB, "memory.current": 2 * GIB}, [0]),
    ],
)
def test_odd_limits(tree: Tree, files: dict[str, object], available: list[int]) -> None:
    """What is no number limits nothing; where more is used than allowed, nothing is left."""
    root = tree("0::/\nnonsense\n", "short line\n" + V2.format(root="/"), files)
    assert [limit.available_bytes for limit in memory_limits(root)] == available


def test_the_quota_of_processors(tree: Tree) -> None:
    files: dict[str, object] = {"app/job/cpu.max": "150000 100000", "app/cpu.max": "400000 100000"}
    quota = cpu_quota(tree("0::/app/job", V2.format(root="/"), files))
    assert quota is not None
    assert (quota.num_cpus, quota.source) == (1.5, "cgroup v2 cpu.max of /app/job")


@pytest.mark.parametrize(("quota", "num_cpus"), [(50000, 0.5), (-1, None), (0, None)])
def test_the_quota_of_processors_v1(tree: Tree, quota: int, num_cpus: float | None) -> None:
    files: dict[str, object] = {"cpu/cpu.cfs_quota_us": quota, "cpu/cpu.cfs_period_us": 100000}
    found = cpu_quota(tree("1:cpu,cpuacct:/", V1.format(root="/", name="cpu"), files))
    assert (found and found.num_cpus) == num_cpus


# ------------------------------------------------------------------------------------------------ a real group

V1_ROOT = Path("/sys/fs/cgroup/memory")
ASK = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from offspec.loaders.machine.hardware import read_memory
Path(sys.argv[1]).write_bytes(bytes(int(sys.argv[2])))
print(json.dumps(asdict(read_memory())))
"""


@pytest.fixture
def groups() -> Iterator[tuple[Path, Path]]:
    """A real version-1 group and one within it, both empty."""
    outer = V1_ROOT / f"offspec-test-{os.getpid()}"
    inner = outer / "inner"
    try:
        inner.mkdir(parents=True)
    except OSError:
        pytest.skip("no version-1 memory controller that may be written to")
    try:
        yield outer, inner
    finally:
        for folder in (inner, outer):
            for _ in range(50):  # a group that has just become empty may be busy for a moment
                with suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.1)


def ask_within(group: Path, cache: Path, cache_bytes: int) -> Memory:
    """What a process in that group says of its memory."""
    join = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.executable, sys.argv[2:])"
    command = [sys.executable, "-c", join, group / "cgroup.procs", sys.executable, "-c", ASK, cache, cache_bytes]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, check=True)
    return Memory(**json.loads(done.stdout))


def test_in_a_real_group_its_limit_is_told_and_page_cache_is_available(
    groups: tuple[Path, Path], tmp_path: Path
) -> None:
    outer, inner = groups
    (outer / "memory.limit_in_bytes").write_text(str(256 * MIB))
    told = ask_within(inner, tmp_path / "cache", 128 * MIB)
    assert (told.total_bytes, told.machine_bytes) == (256 * MIB, ram_bytes())
    assert told.limit.endswith(f"memory.limit_in_bytes of /{outer.name}")
    assert int((inner / "memory.max_usage_in_bytes").read_text()) > 128 * MIB
    assert 160 * MIB < told.available_bytes < 256 * MIB


# ------------------------------------------------------------------------------------------------ machine

VirtualMemory = namedtuple("VirtualMemory", ["total", "available"])


def test_ram_is_the_machines_where_nothing_binds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: VirtualMemory(16 * GIB, 9 * GIB))
    assert read_memory(tmp_path) == Memory(16 * GIB, 9 * GIB, 16 * GIB, "MemAvailable")


def test_a_machine_that_does_not_tell_its_ram(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> VirtualMemory:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", fail)
    with refused(HardwareError, "RAM", "/proc/meminfo", "mount"):
        read_memory(tmp_path)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [(GIB, Memory(4 * GIB, 3 * GIB, 16 * GIB, "cgroup v2 memory.max of /")),
 (0, Memory(4 * GIB, 3.5 * GIB, 16 * GIB, "MemAvailable"))],
)  # fmt: skip
def test_ram_is_the_least_of_what_machine_and_group_have(
    monkeypatch: pytest.MonkeyPatch, tree: Tree, usage: int, expected: Memory
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: VirtualMemory(16 * GIB, 7 * GIB // 2))
    root = tree("0::/", V2.format(root="/"), {"memory.max": 4 * GIB, "memory.current": usage})
    assert read_memory(root) == expected


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_limit_on_addresses_bounds_the_ram(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import resource

    used = psutil.Process().memory_info().vms
    monkeypatch.setattr(psutil, "virtual_memory", lambda: VirtualMemory(2**60, 2**60))
    assert read_memory(tmp_path).limit == "MemAvailable"
    monkeypatch.setattr(resource, "getrlimit", lambda kind: {resource.RLIMIT_AS: (used + 2 * GIB, 2**60)}[kind])
    memory = read_memory(tmp_path)
    assert memory.limit == "ulimit -v"
    assert GIB < memory.available_bytes <= 3 * GIB
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (MIB, MIB))
    assert read_memory(tmp_path).available_bytes == 0


def processors(
    monkeypatch: pytest.MonkeyPatch, usable: set[int], there: int, siblings: dict[int, str], root: Path
) -> None:
    monkeypatch.setattr(hardware, "_usable_cpus", lambda: usable)
    monkeypatch.setattr(os, "cpu_count", lambda: there)
    for cpu, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text)


def test_threads_of_one_core_count_once_and_affinity_binds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processors(monkeypatch, {0, 1, 2}, 8, {}, tmp_path)
    assert read_cores(tmp_path) == (3, "affinity to 3 of 8 processors")
    processors(monkeypatch, {0, 1, 2, 3}, 4, {0: "0,2\n", 1: "1,3\n", 2: "0,2\n", 3: "1,3\n"}, tmp_path)
    assert read_cores(tmp_path) == (2, "hardware: 4 processors share them")


@pytest.mark.parametrize(("quota", "num_cores"), [(50000, 1), (250000, 2)])
def test_a_quota_binds(monkeypatch: pytest.MonkeyPatch, tree: Tree, quota: int, num_cores: int) -> None:
    root = tree("0::/", V2.format(root="/"), {"cpu.max": f"{quota} 100000"})
    processors(monkeypatch, set(range(8)), 8, {}, root)
    assert read_cores(root) == (num_cores, "cgroup v2 cpu.max of /")


def test_the_processors_name(tmp_path: Path) -> None:
    assert read_cpu_name(tmp_path)  # no /proc: some name all the same
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text("processor : 0\nmodel name\t: Fast  CPU @ 3 GHz\nmodel name : no\n")
    assert read_cpu_name(tmp_path) == "Fast CPU @ 3 GHz"


def test_this_machine() -> None:
    found = read_hardware(CPU)
    assert 0 < found.ram.available_bytes <= found.ram.total_bytes <= found.ram.machine_bytes
    assert 1 <= found.num_cores <= num_cpus()
    assert found.gpu is None
    assert found.rates.disk_bytes_per_s is None
    assert found.rates.matmul_flops == {}


def test_the_file_system_of_a_folder(tmp_path: Path) -> None:
    disk = read_disk(tmp_path)
    assert disk.file_system != ""
    assert disk.free_bytes > 0
    with refused(HardwareError, tmp_path / "gone", "No such file"):
        read_disk(tmp_path / "gone")


# ------------------------------------------------------------------------------------------------ GPU


def fake_gpu(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """A card as torch shows it; a change that is an exception is raised instead."""
    answers = {
        "current_device": 1,
        "get_device_properties": SimpleNamespace(name="Fake RTX"),
        "get_device_capability": (8, 9),
        "mem_get_info": (20 * GIB, 24 * GIB),
        **changes,
    }
    for name, answer in answers.items():

        def call(*args: object, answer: Any = answer) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(torch.cuda, name, call)


@pytest.mark.parametrize(("device", "index"), [("cuda", 1), ("cuda:0", 0)])
def test_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch, device: str, index: int) -> None:
    fake_gpu(monkeypatch)
    found = read_hardware(torch.device(device)).gpu
    assert found == hardware.Gpu("Fake RTX", index, 24 * GIB, 20 * GIB, (8, 9))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(RuntimeError("CUDA error: out of memory\nMore lines."), "CUDA error: out of memory"),
 (AssertionError(), "AssertionError")],
)  # fmt: skip
def test_a_gpu_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, fault: Exception, reason: str) -> None:
    fake_gpu(monkeypatch, mem_get_info=fault)
    with refused(HardwareError, "cuda:0", reason):
        read_gpu(torch.device("cuda:0"))


def system(folder: Path, release: str) -> Path:
    """A root folder of a Linux with this release."""
    (folder / "proc/sys/kernel").mkdir(parents=True)
    (folder / "proc/sys/kernel/osrelease").write_text(release)
    return folder


def test_where_a_driver_may_spill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert hardware.may_spill(system(tmp_path / "wsl", "5.15.167.4-microsoft-standard-WSL2"))
    assert not hardware.may_spill(tmp_path)
    monkeypatch.setattr(sys, "platform", "win32")
    assert hardware.may_spill(tmp_path)


def test_what_to_do_where_memory_cannot_be_page_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -l` is not among it: it does not limit CUDA."""
    free = Memory(64 * GIB, 50 * GIB, 64 * GIB, "MemAvailable")
    limited = replace(free, limit="cgroup v2 memory.max of /docker/1")
    wsl = system(tmp_path / "wsl", "5.15.167.4-microsoft-standard-WSL2")
    cases = [("linux", wsl, free, (".wslconfig", "half")), ("win32", tmp_path, free, ("half", "RAM")),
             ("linux", tmp_path, limited, ("container", "cgroup v2 memory.max of /docker/1")),
             ("linux", tmp_path, free, ("RAM",))]  # fmt: skip
    for platform, root, memory, words in cases:
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(hardware, "read_memory", lambda root, memory=memory: memory)
        remedy = hardware.pinning_remedy(root)
        assert tells(remedy, *words, "`ram`")
        assert "ulimit" not in remedy


@pytest.mark.gpu
def test_a_real_gpu() -> None:
    device = torch.device("cuda:0")
    found = read_hardware(device).gpu
    assert found is not None
    assert 0 < found.free_bytes <= found.total_bytes
    link = measure.measure_host_to_device(device, seconds=0.2)
    assert link is not None
    assert link > 1e9
    assert measure.measure_memory(device, seconds=0.2) > link
    flops = measure.measure_matmul(device, torch.bfloat16, seconds=0.4)
    assert flops[256] > flops[1] > 0


def test_data_sheets_hang_together() -> None:
    for key, known in KNOWN_GPUS.items():
        gpu, rates = known.gpu(), known.rates()
        assert 0.85 * gpu.total_bytes < gpu.free_bytes < gpu.total_bytes, key
        assert 7 * GIB <= known.total_bytes <= 192 * GIB, key
        assert 20e12 < known.bf16_flops < 1000e12, f"{key}: a figure with sparsity would be above"
        assert known.host_to_device_bytes_per_s < known.memory_bytes_per_s / 10, key
        flops = [rates.matmul_flops[width] for width in sorted(rates.matmul_flops)]
        assert flops == sorted(flops), key
        assert flops[-1] <= known.bf16_flops, key
        assert rates.disk_bytes_per_s is None, key


@pytest.mark.parametrize(
    ("key", "nominal_gib"),
    [("rtx2080ti", 11), ("rtx3060", 12), ("rtx4060", 8), ("rtx4060ti-16", 16), ("rtx4070ti-super", 16),
     ("rtx4070", 12), ("rtx4070super", 12), ("rtx4090", 24), ("rtx5060ti-8", 8), ("rtx5060ti-16", 16), ("rtx5070", 12),
     ("rtx5070ti", 16), ("rtx5080", 16), ("l40s", 48)],
)  # fmt: skip
def test_a_card_has_the_memory_that_cuda_reports(key: str, nominal_gib: int) -> None:
    """Less than the data sheet's: the driver keeps some, and ECC takes a sixteenth of an L40S."""
    assert 0.92 * nominal_gib * GIB < KNOWN_GPUS[key].gpu().total_bytes < 0.99 * nominal_gib * GIB


@pytest.mark.parametrize(
    ("name", "key"),
    [("3090 Ti", "rtx3090ti"), ("RTX 4070 Super", "rtx4070super"), ("4060 Ti", "rtx4060ti-16"), ("A100", "a100-80"),
     ("RTX 3060 12GB", "rtx3060"), ("5060 Ti 16GB", "rtx5060ti-16"), ("rtx4090", "rtx4090"),
     ("NVIDIA GeForce RTX 4090", "rtx4090"), ("rtx-4090", "rtx4090")],
)  # fmt: skip
def test_a_card_by_a_name_that_people_use(name: str, key: str) -> None:
    assert find_gpu(name) is KNOWN_GPUS[key]


def test_a_card_that_nobody_knows() -> None:
    with refused(UsageError, "'voodoo2'", "rtx3060", "12GiB,504GB/s"):
        find_gpu("voodoo2")
    with refused(UsageError, "'5060 Ti'", "rtx5060ti-8 and rtx5060ti-16"):
        find_gpu("5060 Ti")


def test_a_card_by_its_description() -> None:
    card = find_gpu("12GiB, 504GB/s")
    known = KNOWN_GPUS["rtx4070"]
    assert card.reported_gib == pytest.approx(known.reported_gib, rel=0.02)
    assert card.memory_bytes_per_s == known.memory_bytes_per_s
    assert card.host_to_device_bytes_per_s == known.host_to_device_bytes_per_s
    assert 0.3 * known.bf16_flops < card.bf16_flops <= known.bf16_flops
    assert find_gpu("16GiB,448GB,12GB/s").host_to_device_bytes_per_s == 12e9
    for text in ("12GiB,", "12GiB,504GB,25GB,1GB", "0,504GB", "12GiB,0"):
        with refused(UsageError):
            find_gpu(text)


def test_packed_products_are_limited_by_memory_or_by_clocks() -> None:
    """On an H200 unpacking is faster (docs/developing/cuda.md), on a 4090 it is not."""
    for key, is_faster in (("h200", False), ("rtx4090", True), ("rtx3060", True)):
        rates = KNOWN_GPUS[key].rates(0.5625)
        assert rates.packed_bytes_per_s is not None
        assert rates.dequantise_elements_per_s is not None
        unpacked_s = 1 / rates.dequantise_elements_per_s + 2 / rates.matmul_flops[1]
        assert (0.5625 / rates.packed_bytes_per_s < 0.9 * unpacked_s) is is_faster


# ------------------------------------------------------------------------------------------------ measuring


@pytest.mark.parametrize("num_bytes", [3 * MIB + 5, 5000, 4096])
def test_a_file_is_read_as_it_is(tmp_path: Path, num_bytes: int) -> None:
    """Each number of readers has a part, or all of a small file."""
    file = tmp_path / "shard"
    file.write_bytes(os.urandom(num_bytes))
    rate = measure.measure_disk(file, threads=(1, 2, 4), seconds=0.1)
    assert rate.bytes_per_s > 0
    assert (rate.file, file.stat().st_size) == ("shard", num_bytes)


def test_every_byte_of_a_part_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "shard"
    file.write_bytes(bytes(5 * MIB))
    monkeypatch.setattr(measure, "READ_BYTES", MIB)
    reads: list[tuple[int, int]] = []
    read = FileReader.read

    def spy(self: FileReader, path: Path, offset: int, out: memoryview, least: int) -> None:
        reads.append((offset, len(out)))
        read(self, path, offset, out, least)

    monkeypatch.setattr(FileReader, "read", spy)
    measure.measure_disk(file, threads=(1, 2), seconds=600)
    first, second = range(5 * MIB // 2), range(5 * MIB // 2, 5 * MIB)
    expected = [(start, min(MIB, part.stop - start)) for part in (first, second) for start in part[::MIB]]
    assert sorted(reads[2:]) == expected  # the first two touch the buffers


def test_a_folder_with_a_checkpoint_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LEAST_BYTES", MIB)
    for name, size in (("small.safetensors", MIB), ("large.safetensors", 2 * MIB)):
        (tmp_path / name).write_bytes(bytes(size))
    monkeypatch.setattr(measure, "_temporary_file", None)
    assert measure.measure_disk(tmp_path, threads=(1,), seconds=0.1).file == "large.safetensors"


def test_a_temporary_file_is_gone_afterwards(tmp_path: Path) -> None:
    rate = measure.measure_disk(tmp_path, threads=(1, 2), seconds=0.1, temporary_bytes=4 * MIB)
    assert rate.bytes_per_s > 0
    assert rate.file == f"a temporary file in {tmp_path}"
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_of_direct_reads_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "FileReader", lambda: Refusing(direct=True))
    file = tmp_path / "shard"
    file.write_bytes(bytes(MIB))
    rate = measure.measure_disk(file, threads=(1,), seconds=0.1)
    assert rate.reason == "the file system refuses direct reads"
    assert str(rate) == "1 reader of 8 MiB, through the page cache, the file system refuses direct reads; shard"


class Refusing(FileReader):
    def _read_some(self, path: Path, offset: int, out: memoryview) -> int:
        self.fallbacks[path] = "the file system refuses direct reads"
        return super()._read_some(path, offset, out)


def test_an_empty_file_and_a_full_disk_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").touch()
    with refused(HardwareError, tmp_path / "empty", "too small"):
        measure.measure_disk(tmp_path / "empty")
    monkeypatch.setattr(measure.shutil, "disk_usage", lambda folder: SimpleNamespace(free=GIB))
    with refused(HardwareError, tmp_path, "free"):
        measure.measure_disk(tmp_path)


def test_too_slow_a_machine_multiplies_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of 512 outputs take a second here, so no more than these are affordable."""
    asked: list[int] = []
    monkeypatch.setattr(measure, "device_seconds", lambda device, work: work() or 1.0)
    monkeypatch.setattr(CpuBackend, "linear", lambda backend, rows, weight: asked.append(len(weight)))
    flops = measure.measure_matmul(CPU, torch.float32, (2,), shape=(4096, 8), num_weights=3, seconds=0.1)
    assert set(asked) == {512}
    assert flops == {2: 2 * 2 * 8 * 512 * 3}


class FakeEvent:
    """Events of a device on which each stretch of work takes 2 ms."""

    recorded: list[object] = []  # noqa: RUF012

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.recorded.append(stream)

    def synchronize(self) -> None:
        assert len(self.recorded) % 2 == 0, "the end is recorded before it is waited for"

    def elapsed_time(self, end: FakeEvent) -> float:
        return 2.0


def test_a_gpus_time_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: ("stream of", of))
    FakeEvent.recorded.clear()
    worked: list[int] = []
    assert measure.typical_seconds(device, lambda: worked.append(1), seconds=0.01) == pytest.approx(2e-3)
    assert set(FakeEvent.recorded) == {("stream of", device)}
    assert len(FakeEvent.recorded) == 2 * len(worked)


def test_reads_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole file is read over and over, and no more of it afterwards."""
    file, reads, read, enough = tmp_path / "shard", list[int](), FileReader.read, threading.Event()
    file.write_bytes(bytes(5 * MIB + 5))
    monkeypatch.setattr(measure, "READ_BYTES", MIB)

    def spy(self: FileReader, path: Path, offset: int, out: memoryview, least: int) -> None:
        read(self, path, offset, out, least)
        reads.append(offset)
        if len(reads) >= 20:
            enough.set()

    monkeypatch.setattr(FileReader, "read", spy)
    with measure.reads_in_flight(file):
        assert enough.wait(300)
    so_far = len(reads)
    assert set(reads) == set(range(0, 6 * MIB, MIB))
    file.unlink()
    with pytest.raises(FileNotFoundError), measure.reads_in_flight(file):
        pass
    assert len(reads) == so_far


@pytest.fixture
def _no_limits_left() -> Iterator[None]:
    """What was measured is kept for as long as the process lives."""
    yield
    FUSED_ROWS.clear()


def nf4(shape: tuple[int, int]) -> StoredWeight:
    return four_bit.FourBitFormat().sized("nf4", "weight", shape, of_no_file)


@pytest.mark.usefixtures("_no_limits_left")
@pytest.mark.parametrize(
    ("slow", "rows"),
    [(range(1, 1), 256), (range(1, 999), 0), (range(5, 999), 4), (range(6, 8), 5), (range(24, 999), 23),
     (range(200, 999), 199)],
    ids=["none", "all", "from 5", "6 and 7", "from 24", "from 200"],
)  # fmt: skip
def test_packed_products_are_used_for_as_many_rows_as_they_are_faster(
    monkeypatch: pytest.MonkeyPatch, slow: range, rows: int
) -> None:
    """The plain product takes 2 s. bitsandbytes dequantises for 6 and 7 rows on an A100, and not for 8."""
    stored, dtype, seconds = nf4((64, 128)), torch.float32, [0.0]
    assert measure.measure_fused_rows(stored, CPU, dtype, seconds=0.01) == 0  # a CPU has none
    monkeypatch.setattr(four_bit, "can_be_fused", lambda matrix: True)
    monkeypatch.setattr(measure, "_fused", lambda x, *_: seconds.append(1.9 if x.shape[0] in slow else 1.0))
    monkeypatch.setattr(measure, "linear", lambda x, *_: seconds.append(2.0))
    monkeypatch.setattr(measure, "typical_seconds", lambda device, work, within: work() or seconds[-1])
    assert measure.measure_fused_rows(stored, CPU, dtype) == rows
    assert FUSED_ROWS.get("nf4", stored.shape, dtype, CPU) == rows


@pytest.mark.parametrize(("cache_mib", "num"), [(0, 4), (4, 4), (72, 36), (96, 48)])
def test_what_is_measured_with_fits_no_cache(monkeypatch: pytest.MonkeyPatch, cache_mib: int, num: int) -> None:
    """An RTX 4090's cache has 72 MiB, a 5090's 96."""
    fake_gpu(monkeypatch, get_device_properties=SimpleNamespace(L2_cache_size=cache_mib * MIB))
    assert measure.beyond_cache(torch.device("cuda:0"), 8 * MIB, 4) == num
    assert measure.beyond_cache(CPU, 8 * MIB, 4) == 4
    fake_gpu(monkeypatch, get_device_properties=SimpleNamespace())  # an older torch
    assert measure.beyond_cache(torch.device("cuda:0"), 8 * MIB, 4) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("_no_limits_left")
def test_packed_products_are_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    device = torch.device("cuda:0")
    rows = measure.measure_fused_rows(nf4((2048, 1024)), device, dtype, seconds=0.05)
    assert 0 <= rows <= measure.FUSED_WIDTHS[-1]
    assert FUSED_ROWS.get("nf4", (2048, 1024), dtype, device) == rows


@by_processor("processor", NO_VECTORS)
def test_one_measurement_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(exc: Exception) -> Any:
        raise exc

    monkeypatch.setattr(measure, "measure_matmul", lambda *_, **__: fail(RuntimeError("out of memory\nand more")))
    monkeypatch.setattr(measure, "measure_memory", lambda device, seconds: 5.0)
    monkeypatch.setattr(four_bit.FourBitFormat, "prepare", lambda known: fail(OffspecError("bitsandbytes is missing")))
    told: list[str] = []
    rates = measure.measure_rates(CPU, torch.float32, tmp_path / "gone", seconds=0.01, progress=told.append)
    assert (rates.disk_bytes_per_s, rates.matmul_flops, rates.memory_bytes_per_s) == (None, {}, 5.0)
    assert rates.sources["matmul_flops"] == "not measured: out of memory"
    assert "cannot be written" in rates.sources["disk_bytes_per_s"]
    assert rates.sources["dequantise_elements_per_s"] == "not measured: bitsandbytes is missing"
    assert rates.sources["host_to_device_bytes_per_s"].startswith("none: ")
    assert told == ["disk", "link", "memory", "matrix products", "NF4"]


def test_with_hardly_any_memory_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "read_memory", lambda: Memory(GIB, 300 * MIB, GIB, "cgroup"))
    rates = measure.measure_rates(CPU, torch.float32, tmp_path)
    why = "not measured: only 300 MiB of RAM are free, and this needs 768 MiB"
    names = {"disk_bytes_per_s", "host_to_device_bytes_per_s", "memory_bytes_per_s", "matmul_flops"}
    names |= {"dequantise_elements_per_s", "packed_bytes_per_s", "host_matmul_flops", "ram_bytes_per_s"}
    assert rates == Rates(sources=dict.fromkeys(names, why))


# ------------------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("20GiB", 20 * GIB),
        ("6.5 GB", 6_500_000_000),
        ("512M", 512 * MIB),
        ("512MiB", 512 * MIB),
        ("1.5g", 3 * GIB // 2),
        ("4096B", 4096),
        (" 2 tb ", 2 * 10**12),
        (".5GiB", GIB // 2),
        ("0", 0),
        ("0GiB", 0),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


NO_SIZES = ("", "GiB", "-1GiB", "6,5GB", "1e3GB", "nan GB", "20 GiB free", "20GiBs", "٣GiB", "1.2.3G")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, (repr(text), "size", "20GiB")) for text in NO_SIZES),
        *((text, (repr(text), "unit", "20GiB")) for text in ("20", "7ib")),
        *((text, ("too large",)) for text in ("9999999TiB", "9" * 400 + "GiB")),
    ],
)
def test_what_is_no_size(text: str, words: tuple[str, ...]) -> None:
    with refused(UsageError, *words) as caught:
        parse_size(text)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_size(0), "0 B"),
        (format_size(1536), "1.5 KiB"),
        (format_size(25276502016), "23.5 GiB"),
        (format_size(1024 * MIB - 1), "1 GiB"),
        (format_size(140 * GIB), "140 GiB"),
        (format_quantity(3.44e9, "B/s"), "3.4 GB/s"),
        (format_quantity(820e9, "FLOP/s"), "820 GFLOP/s"),
        (format_quantity(999.96e9, "FLOP/s"), "1 TFLOP/s"),
        (format_quantity(0.5, "B/s"), "0.5 B/s"),
        (format_count(70.6e9), "70.6 B"),
        (format_count(135e6), "135 M"),
        (format_count(4096), "4096"),
        (format_seconds(1.62), "1.6 s"),
        (format_seconds(28.2), "28.2 s"),
        (format_seconds(0.013), "13 ms"),
        (format_seconds(3600), "60 min"),
    ],
)
def test_what_people_read(shown: str, expected: str) -> None:
    assert shown == expected
