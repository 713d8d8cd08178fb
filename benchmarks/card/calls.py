"""The three calls of `scripts/card`, as lists of parts in order of importance. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAIN, SANITIZERS, MODELS = "main", "sanitizers", "models"
FULL, BRIEF = "full", "brief"  # texts of `passes`
STREAM_TESTS, GRAPH_TESTS = "tests/loaders/streaming/test_link.py", "tests/offspec/model/test_cuda_graphs.py"
TRITON_TESTS = "tests/backends/triton/test_gguf.py"
LANES = ("tests/backends/x86/", "tests/offspec/model/families/", "tests/offspec/test_exact_texts_on_cuda.py")
SANITIZED = (  # (tool, tests): racecheck and synccheck look inside kernels, of which Triton's are ours
    ("memcheck", STREAM_TESTS),
    ("memcheck", TRITON_TESTS),
    ("racecheck", TRITON_TESTS),
    ("synccheck", TRITON_TESTS),
    ("memcheck", GRAPH_TESTS),
    ("racecheck", GRAPH_TESTS),
)


@dataclass(frozen=True)
class Part:
    """One process. words: a function of `one_part.MEASURES` and its arguments.

    limit_s: the watchdog ends it then. least_s: it is not started with less time left. lane: parts of different lanes
    run at the same time. after: parts that must have ended before. each_call: a result from an earlier call, perhaps
    on another machine, does not replace it.
    """

    name: str
    words: tuple[str, ...]
    limit_s: float
    least_s: float = 30.0
    lane: str = MAIN
    after: tuple[str, ...] = ()
    each_call: bool = False


@dataclass(frozen=True)
class Shapes:
    """Names of the jobs (`jobs.JOBS`) of the two models, and the memory in GiB of the card that each is limited to.

    mixtures: arguments of `mixture.mixture`. has_peers: whether other programs run, too.
    """

    big: str = "70b"
    big_gib: tuple[int | None, ...] = (24, 16, 12)
    small: str = "7b"
    small_gib: tuple[int | None, ...] = (8, 12)
    mixtures: tuple[tuple[str, ...], ...] = (("qwen3-30b-a3b", "12", "all", "4", "2"),)
    has_peers: bool = True


CARD, TINY = Shapes(), Shapes("tiny", (None,), "tiny", (None,), mixtures=(), has_peers=False)


def correctness(_: Shapes) -> list[Part]:
    """Tests marked gpu by file, and the CUDA sanitizers beside them."""
    tests = [Part(f"tests {file}", ("tests", file), 240, 15, lane=lane_of(file)) for file in gpu_test_files()]
    checks = [Part(f"{tool} {file}", ("sanitizer", tool, file), 120, 20, lane=SANITIZERS) for tool, file in SANITIZED]
    return unique([machine(), *tests, *checks])


def big(shapes: Shapes) -> list[Part]:
    """The big model within the memory of one card; the link halved, and as SpecExec; then within less memory."""
    name, first = shapes.big, shapes.big_gib[0]
    grown, ready = growth(name, after=("machine",)), (f"grow target {name}", f"grow draft {name}")
    return unique(
        [
            machine(),
            *grown,
            Part("exact", ("exact",), 90),
            Part(f"vocabulary {name}", ("vocabulary", name), 60),
            Part("small copies", ("small_copies",), 60),
            Part(f"draft {name}", ("draft_rounds", name), 120, after=ready[1:]),
            Part(within(name, first), ("passes", name, gib(first), FULL), 270, 60, after=ready),
            Part(f"{within(name, first)}, link halved", ("halved_link", name, gib(first)), 150, 60, after=ready),
            Part(f"{within(name, first)} as SpecExec", ("baseline", name, gib(first)), 150, 60, after=ready),
            *(
                Part(within(name, cap), ("passes", name, gib(cap), BRIEF), 200, 80, after=ready)
                for cap in shapes.big_gib[1:]
            ),
        ]
    )


def small(shapes: Shapes) -> list[Part]:
    """The small model in bf16: text against plain decoding, drafts from its own layers, packed weights, the disk."""
    name, first = shapes.small, shapes.small_gib[0]
    grown, ready = growth(name, after=("machine",)), (f"grow target {name}", f"grow draft {name}")
    return unique(
        [
            machine(),
            *grown,
            Part(within(name, first), ("passes", name, gib(first), FULL), 150, 60, after=ready),
            Part(f"same text {name}", ("same_text", name, gib(first)), 200, 60, after=ready),
            *([Part(f"accelerate {name}", ("accelerate", name, gib(first)), 120, 60)] if shapes.has_peers else []),
            *(Part(f"mixture {words[0]}", ("mixture", *words), 150, 60) for words in shapes.mixtures),
            Part(f"disk {name}", ("disk", name), 90, after=ready),
            Part(f"packed bf16 {name}", ("packed_bf16", name), 150, 60, after=ready),
            Part(f"shadow {name}", ("shadow_rounds", name), 120, after=ready[:1]),
            Part("shifted copies", ("shifted_copies",), 60),
            Part("copies back", ("copies_back",), 60),
            Part(f"attention {name}", ("attention", name), 90),
            Part(f"shadow texts {name}", ("shadow_texts", name), 90),
            *(
                Part(within(name, cap), ("passes", name, gib(cap), BRIEF), 150, 60, after=ready)
                for cap in shapes.small_gib[1:]
            ),
        ]
    )


CALLS: dict[str, Callable[[Shapes], list[Part]]] = {"correctness": correctness, "big": big, "small": small}


def machine() -> Part:
    return Part("machine", ("machine",), 90, each_call=True)


def growth(name: str, after: tuple[str, ...] = ()) -> list[Part]:
    """Both models of a job, each in a process of its own, beside other parts; files that exist are kept."""
    return [
        Part(f"grow {role} {name}", ("grow", role, name), 300, 10, f"{MODELS} {role}", after, each_call=True)
        for role in ("target", "draft")
    ]


def within(name: str, cap: int | None) -> str:
    return f"{name} half" if cap is None else f"{name} {cap}GB"


def gib(cap: int | None) -> str:
    return "half" if cap is None else str(cap)


def unique(parts: list[Part]) -> list[Part]:
    return list({part.name: part for part in parts}.values())


def gpu_test_files() -> list[str]:
    """Files with tests marked gpu; those of the stream come first."""
    files = [str(file.relative_to(ROOT)) for file in sorted((ROOT / "tests").rglob("test_*.py")) if has_gpu_tests(file)]
    first = [file for file in (STREAM_TESTS, "tests/offspec/test_on_cuda.py", GRAPH_TESTS) if file in files]
    return [*first, *(file for file in files if file not in first)]


def lane_of(file: str) -> str:
    """Tests of kernels and of families run beside those that measure or limit the card's memory."""
    return f"tests {Path(file).parent.name}" if file.startswith(LANES) else MAIN


def has_gpu_tests(file: Path) -> bool:
    return "pytest.mark.gpu" in file.read_text(encoding="utf-8")
