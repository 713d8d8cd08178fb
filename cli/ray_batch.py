"""`offspec run --batch ray`: one engine on each node or GPU of a Ray cluster answers the prompts of a file.

Ray starts and restarts the engines' processes, moves prompts and answers, and notices processes and nodes that die.
This module decides which nodes get an engine, and gives the next prompts to the engine that is free. Only functions
import Ray, which is an optional dependency.
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import click

from offspec.errors import OffspecError, UsageError

from .batch import Answer, Asked
from .flag_declarations import with_flags
from .node_engine import EngineJob, NodeEngine, Report, reason_of
from .terminal import is_watched, show_line

LOOK_S = 5.0  # between looks for new nodes
MOST_DEATHS = 3  # of engines' processes while they answered the same prompt; then the prompt has failed
RESTARTS = 2  # of an engine's process, by Ray
CONNECT_S = 5.0
MOST_HEADLESS_S = 20.0  # until then a head may come back; after 60 s Ray would end this process
NOT_INSTALLED = "--batch ray needs Ray, which is not installed: pip install 'offspec[ray]'"
START_RAY = "start one with `ray start --head`, and `ray start --address HEAD:6379` on the other machines"


@dataclass(frozen=True)
class Share:
    """What one engine gets of its node. ram: its limit in bytes if it shares the node with others, otherwise None."""

    num_cpus: float
    num_gpus: int = 0
    ram: int | None = None


def shares_of(resources: Mapping[str, float], device: str) -> list[Share]:
    """The engines for a node: one for each GPU, or one for all CPUs; none for a node without either.

    resources: of the node as Ray counts them. device: as in `--device`; with `cpu` no GPU is used.
    """
    cpus, gpus = resources.get("CPU", 0.0), int(resources.get("GPU", 0))
    if gpus == 0 or device == "cpu":
        return [Share(cpus)] if cpus else []
    ram = int(resources["memory"]) // gpus if gpus > 1 and "memory" in resources else None
    return [Share(cpus // gpus, 1, ram)] * gpus


@dataclass
class RemoteEngine:
    """An engine of the cluster, and what it has done. name: of its node. handle: of its actor."""

    name: str
    node_id: str
    handle: Any
    is_loaded: bool = False
    num_prompts: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    places: list[int] = field(default_factory=list)  # of the prompts that it is answering

    def count(self, answer: Answer | str) -> None:
        if not isinstance(answer, str):
            stats = answer["stats"]
            self.num_prompts += 1
            self.num_tokens += stats["num_tokens"]
            self.seconds += stats["ttft_s"] + stats["decode_s"]


class RayEngines:
    """The engines of a Ray cluster."""

    def __init__(self, address: str, job: EngineJob, *, quiet: bool, verbose: bool) -> None:
        """address: HOST:PORT of the cluster's head, or `auto`: the cluster that this machine belongs to."""
        self._address, self._job, self._quiet, self._verbose = address, job, quiet, verbose
        self._engines = list[RemoteEngine]()  # all of them, also those that stopped
        self._calls = dict[Any, RemoteEngine]()  # ObjectRef of a call → the engine that works on it
        self._idle = list[RemoteEngine]()
        self._known = set[str]()  # ids of nodes that were given their engines
        self._deaths = Counter[int]()  # by the places of prompts
        self._dtypes = list[str]()
        self._head = ""  # HOST:PORT
        self._next_look, self._began, self._ended = 0.0, 0.0, 0.0  # `time.monotonic()`

    def answers(self, prompts: Sequence[Asked]) -> Generator[tuple[int, Answer | OffspecError], None, None]:
        """Yields the place of each prompt in the list, and its answer or error, in any order.

        A prompt whose engine dies is answered by another. Raises UsageError if there is no cluster, and OffspecError
        if no engine is left.
        """
        connect(self._address)
        import ray

        self._head = ray.get_runtime_context().gcs_address
        try:
            waiting = deque(range(len(prompts)))
            while waiting or any(engine.places for engine in self._calls.values()):
                self._start_engines()
                self._hand_out(waiting, prompts)
                if not self._calls:
                    predicate = f"can run {self._job.options.model}" if self._engines else "offers CPUs or GPUs"
                    raise OffspecError(f"no node of the Ray cluster {predicate}; {len(waiting)} prompts are unanswered")
                for call in ray.wait(list(self._calls), timeout=LOOK_S)[0]:
                    yield from self._take(call, waiting)
        finally:
            self._disconnect()

    def progress(self) -> str:
        """How many engines are at work, for a progress line."""
        at_work = [engine for engine in (*self._calls.values(), *self._idle) if engine.is_loaded]
        return f", {len(at_work)} of {len(self._engines)} engines"

    def _start_engines(self) -> None:
        """Start the engines of nodes that are new in the cluster."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_S
        for node in self._nodes():
            node_id = node["NodeID"]
            if node_id in self._known or not node["Alive"]:
                continue
            self._known.add(node_id)
            for share in shares_of(node["Resources"], self._job.options.device):
                actor = ray.remote(NodeEngine).options(
                    num_cpus=share.num_cpus,
                    num_gpus=share.num_gpus,
                    max_restarts=RESTARTS,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                )
                handle = actor.remote(self._job, share.ram)
                engine = RemoteEngine(f"{node['NodeManagerAddress']} ({node_id[:8]})", node_id, handle)
                self._engines.append(engine)
                self._load(engine)

    def _nodes(self) -> list[dict[str, Any]]:
        """The cluster's nodes, as Ray describes them. Raises OffspecError if the head node is gone."""
        import ray

        end_s = time.monotonic() + MOST_HEADLESS_S
        while not self._is_head_there():
            if time.monotonic() > end_s:
                text = f"the head of the Ray cluster at {self._head} is gone, and the other prompts are unanswered"
                raise OffspecError(f"{text}; start the cluster again, and repeat the command")
            time.sleep(1)
        return list(ray.nodes())

    def _is_head_there(self) -> bool:
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except OSError:
            return False
        return True

    def _load(self, engine: RemoteEngine) -> None:
        """Wait for an engine that loads; Ray repeats this call when it has restarted the process."""
        engine.places, engine.is_loaded = [], False
        self._calls[engine.handle.answer.options(max_task_retries=-1).remote([])] = engine

    def _hand_out(self, waiting: deque[int], prompts: Sequence[Asked]) -> None:
        """Give the next prompts to engines without work."""
        while waiting and self._idle:
            engine = self._idle.pop()
            engine.places = [waiting.popleft() for _ in range(min(self._job.prompts_per_call, len(waiting)))]
            self._calls[engine.handle.answer.remote([prompts[place] for place in engine.places])] = engine
            self._began = self._began or time.monotonic()

    def _take(self, call: Any, waiting: deque[int]) -> Generator[tuple[int, Answer | OffspecError], None, None]:
        """Yields the results of a call that has ended; unanswered prompts go back to `waiting`."""
        import ray

        engine = self._calls.pop(call)
        places, engine.places = engine.places, []
        try:
            report: Report = ray.get(call)
        except ray.exceptions.RayError as exc:
            report = self._after_death(engine, exc, has_prompts=bool(places))
        else:
            self._after_report(engine, report)
        self._ended = time.monotonic()
        for position, result in report.results.items():
            engine.count(result)
            yield places[position], OffspecError(result) if isinstance(result, str) else result
        unanswered = [place for position, place in enumerate(places) if position not in report.results]
        self._deaths.update(unanswered)
        for place in reversed(unanswered):
            if self._deaths[place] < MOST_DEATHS:
                waiting.appendleft(place)
            else:
                yield place, OffspecError(f"{MOST_DEATHS} engines stopped while they answered it ({report.fault})")

    def _after_report(self, engine: RemoteEngine, report: Report) -> None:
        """Keep the engine, unless it reports a fault."""
        if report.fault is not None:
            state = "stopped" if engine.is_loaded else f"cannot run {self._job.options.model}"
            self._tell(engine, f"{state}: {report.fault}")
            return
        self._idle.append(engine)
        if engine.is_loaded:
            return
        engine.is_loaded = True
        for text, is_advice in report.notes:
            if self._verbose or (is_advice and not self._quiet):
                self._tell(engine, text)
        if report.dtype not in self._dtypes:
            self._dtypes.append(report.dtype)
            if len(self._dtypes) == 2 and not self._quiet:
                kinds = " and ".join(self._dtypes)
                text = f"the nodes compute in {kinds}, so texts may differ; --dtype sets one for all"
                click.echo(f"offspec: {text}", err=True)

    def _after_death(self, engine: RemoteEngine, exc: Exception, *, has_prompts: bool) -> Report:
        """After the engine's process died: wait for it if Ray restarts it; says what happened."""
        import ray

        is_there = any(node["NodeID"] == engine.node_id and node["Alive"] for node in self._nodes())
        if is_there and has_prompts and isinstance(exc, ray.exceptions.ActorUnavailableError):
            fault = "its process died; Ray starts it again if the node is still there"
            self._load(engine)
        else:
            lines = [line.strip() for line in str(exc).splitlines() if line.strip()]  # the last one names the error
            fault = (lines or [type(exc).__name__])[-1] if is_there else "the node left the cluster or died"
        self._tell(engine, fault)
        return Report({}, fault)

    def _tell(self, engine: RemoteEngine, message: str) -> None:
        if is_watched():
            show_line()  # instead of the progress line, which comes again
        click.echo(f"offspec: node {engine.name}: {with_flags(message)}", err=True)

    def _disconnect(self) -> None:
        """End the engines, whatever they do, and leave the cluster. Without a head they end after a minute."""
        import ray

        for engine in self._engines if self._is_head_there() else ():
            with suppress(Exception):  # it has ended, or the connection has
                ray.kill(engine.handle)
        ray.shutdown()

    def describe(self) -> str:
        """The figures of each engine and of all together, as text."""
        lines = [
            f"node      {engine.name}: {engine.num_prompts} prompts, {engine.num_tokens} tokens, "
            f"{_rate(engine.num_tokens, engine.seconds)} tokens/s including first passes"
            for engine in self._engines
        ]
        num_prompts, num_tokens = (
            sum(getattr(e, name) for e in self._engines) for name in ("num_prompts", "num_tokens")
        )
        seconds = self._ended - self._began if self._began else 0.0
        lines.append(
            f"cluster   {num_prompts} prompts, {num_tokens} tokens in {seconds:.1f} s, {_rate(num_tokens, seconds)} "
            "tokens/s since the first engine was ready"
        )
        return "\n".join(lines)


def _rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens / seconds:.1f}" if seconds else "-"


def connect(address: str) -> None:
    """Connect this process to a Ray cluster. Raises UsageError without Ray, and without a cluster at `address`."""
    try:
        import ray
        from ray._private import worker
    except ImportError as exc:
        raise UsageError(NOT_INSTALLED) from exc
    _check_address(address)
    worker._worker_logs_enabled = False  # Ray would print reports of dead processes to stdout, among the answers
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as exc:
        raise UsageError(f"cannot use a Ray cluster at {address} ({reason_of(exc)}); {START_RAY}") from exc
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray replaces it


def _check_address(address: str) -> None:
    """Raises UsageError for an address at which nobody listens; Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise UsageError(f"--batch must name the head of a Ray cluster as ray:HOST:PORT, not ray:{address}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError, ValueError) as exc:  # ValueError: a name that no host can have
        raise UsageError(f"there is no Ray cluster at {address} ({exc}); {START_RAY}") from exc
