"""The card's benchmark without a card: every part runs, what is there is not done again, and what it says follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.card import bench, exact, kernels, link, packed, parts, passes, shadows
from benchmarks.card.__main__ import main
from benchmarks.card.bench import Bench
from benchmarks.card.jobs import JOBS, Job
from benchmarks.card.link import link_bytes_per_s
from benchmarks.card.models import Grown, pack_plainly
from benchmarks.card.report import tell, verdicts
from benchmarks.card.texts import said, texts_of
from benchmarks.card.timing import median_s
from offspec import Engine, SpeculationParams, builtin
from offspec.loaders.formats.four_bit import Layout4bit, Matrix4bit, dequantize_reference, pack_4bit

CPU = torch.device("cpu")
TINY = JOBS["tiny"]
SMALLEST = replace(
    TINY,
    target=replace(TINY.target, hidden_size=256, intermediate_size=768, num_heads=8, head_dim=32),
    repeats=1,
    num_tokens=6,
    num_plain_tokens=2,
)


RUNS = [pytest.param("once", marks=pytest.mark.slow), pytest.param("as on a card", marks=pytest.mark.nightly)]


@pytest.fixture(scope="module", params=RUNS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a run wrote, each figure measured once, or as often as on a card."""
    made = tmp_path_factory.mktemp("card")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(made / "inductor"))  # or torch sets it
        if request.param == "once":
            patch.setitem(JOBS, "tiny", SMALLEST)
            measure_once(patch)
        main([str(made), "--device", "cpu", "--shape", "tiny", "--minutes", "600"])
        yield made


def measure_once(patch: pytest.MonkeyPatch) -> None:
    """All parts of a run, with few widths and tokens, and no repeats."""

    def brief(measure: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return lambda *args, **others: measure(*args, **(others | options))

    def brief_text(engine: Engine, job: Job, temperature: float, speculation: SpeculationParams, *_: int) -> Any:
        return said(engine, job, temperature, speculation, 8, 1)

    for module in (kernels, link, packed, passes):
        patch.setattr(module, "median_s", lambda work, wait, *_, after=None, **__: measured_once(work, wait, after))
    for module in (kernels, shadows):
        patch.setattr(module, "WIDTHS", (4,))
    patch.setattr(packed, "WIDTHS", (1,))
    for name in ("measure_dequantise", "measure_memory", "measure_matmul"):
        patch.setattr(bench, name, brief(getattr(bench, name), seconds=0.001))
    patch.setattr(bench, "link_bytes_per_s", lambda device, *_: link_bytes_per_s(device, 2**16, 0.01))
    patch.setattr(exact, "said", brief_text)
    for module in (passes, shadows):
        patch.setattr(module, "texts_of", lambda engine, job, **_: texts_of(engine, job, is_brief=True))
    patch.setattr(parts, "release_memory", lambda device: None)


def measured_once(work: Callable[[], object], wait: Callable[[], object], after: Callable[[], object] | None) -> float:
    return median_s(work, wait, 1, warm_ups=0, after=after or wait)


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return {line["part"]: line for line in json.loads((folder / "card.json").read_text())}


def test_every_part_has_figures(results: dict[str, Any]) -> None:
    assert list(results) == [
        *("machine", "small copies", "exact", "draft tiny", "vocabulary tiny", "shadow tiny", "shadow texts tiny"),
        *("tiny half", "tiny half as SpecExec", "packed bf16 tiny", "attention tiny"),
    ]
    assert not any("error" in line for line in results.values())
    assert results["exact"]["figures"]["texts_equal"]
    assert 0 < results["exact"]["figures"]["num_resident_layers"] < JOBS["tiny"].target.num_layers
    assert results["exact"]["figures"]["largest_logit_difference"] < 1e-3


def test_passes_stand_beside_their_bounds(results: dict[str, Any]) -> None:
    figures, job = results["tiny half"]["figures"], JOBS["tiny"]
    assert 0 < figures["num_resident"] < figures["num_layers"] == job.target.num_layers
    assert figures["planned_bytes"] <= figures["allowed_bytes"]
    for width in job.widths:
        p = figures["passes"][str(width)]
        assert p["over_bound"] == pytest.approx(p["seconds"] / max(p["link_s"], p["compute_s"]))
        assert p["link_share"] == pytest.approx(p["link_s"] / p["seconds"])
    texts = figures["texts"]
    assert (
        texts["greedy"]["tokens_per_pass"] >= texts["greedy, plain"]["tokens_per_pass"] == 1
    )  # budgets follow a clock
    assert "token_ids" not in texts["greedy"]


def test_the_baseline_keeps_nothing(results: dict[str, Any]) -> None:
    figures = results["tiny half as SpecExec"]["figures"]
    assert figures["num_resident"] == 0
    assert figures["stream_bytes"] > results["tiny half"]["figures"]["stream_bytes"]


def test_packed_bf16_moves_fewer_bytes(results: dict[str, Any]) -> None:
    figures = results["packed bf16 tiny"]["figures"]
    assert figures["kernel"]["is_equal"]
    assert min(figures["kernel"]["seconds"], figures["kernel"]["bytes_per_s"]) > 0
    plain, packed = figures["plain"], figures["packed"]
    assert packed["num_resident"] >= plain["num_resident"]
    assert packed["stream_bytes"] < 0.77 * plain["stream_bytes"]
    assert plain["pass_s"].keys() == packed["pass_s"].keys()
    assert figures["logits_are_equal"]


def test_rounds_of_shadows_stand_beside_their_prediction(results: dict[str, Any]) -> None:
    figures = results["shadow tiny"]["figures"]
    assert list(figures) == ["4 bits", "3 bits", "2 bits"]
    sizes = [figures[bits]["bytes"] for bits in figures]
    assert sizes == sorted(sizes, reverse=True)
    for found in figures.values():
        rounds = found["round_s"]["unpacked"]
        assert rounds.keys() == found["predicted_s"].keys()
        assert min(*rounds.values(), *found["predicted_s"].values()) > 0
    texts = results["shadow texts tiny"]["figures"]["texts"]
    assert texts["greedy"]["tokens_per_pass"] >= texts["greedy, plain"]["tokens_per_pass"] == 1


def test_both_ways_of_attention_agree(results: dict[str, Any]) -> None:
    (figures,) = results["attention tiny"]["figures"].values()
    assert figures["largest_difference"] < 0.05  # bf16
    assert min(figures["sdpa_s"], figures["flex_s"], figures["flex_first_s"]) > 0


def test_a_translation_says_what_it_is(results: dict[str, Any]) -> None:
    there = results["tiny half"]["figures"]["translation"]
    iteration_s = there["pass_s"]["256"] + there["draft_s"]
    assert there["tokens_per_s_at_12"] == pytest.approx(12 / iteration_s)
    assert there["link_bytes_per_s"] == 25e9
    assert "not measured" in tell(results)


def test_what_is_there_is_not_done_again(
    folder: Path, results: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / "results.jsonl").read_text()
    (folder / "results.jsonl").write_text(lines + '{"part": "cut o')  # as a run that was killed leaves it
    main([str(folder), "--device", "cpu", "--shape", "tiny", "--minutes", "600"])
    assert (folder / "results.jsonl").read_text() == lines + '{"part": "cut o\n'
    assert capsys.readouterr().out.strip() == tell(results).strip()


def test_without_time_nothing_is_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path), "--device", "cpu", "--shape", "tiny", "--minutes", "0"])
    assert not (tmp_path / "results.jsonl").exists()
    assert capsys.readouterr().err.count("no time left") == 11


@pytest.mark.slow
def test_a_part_that_fails_is_told_and_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Iterator[dict[str, Any]]:
        yield {"card": "half of it"}
        raise RuntimeError("no such device\nand more")

    measured = {"machine": fail, "exact": lambda: iter([{"texts_equal": False}])}
    monkeypatch.setattr(parts, "parts_of", lambda bench, names: measured)
    results = parts.run(Bench(tmp_path, CPU), ["tiny"], minutes=600)
    assert "machine: failed: no such device" in tell(results)
    assert "half of it" in tell(results)
    assert not results["machine"]["is_done"]
    assert verdicts(results) == ["NO   exact: fp32 text equals the CPU's"]
    measured["machine"], measured["exact"] = lambda: iter([{"torch": "2"}]), fail  # what was done is not asked again
    results = parts.run(Bench(tmp_path, CPU), ["tiny"], minutes=600)
    assert results["machine"]["figures"] == {"torch": "2"}
    assert results["exact"]["is_done"]
    capsys.readouterr()


def test_what_ended_the_process_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or it would end the next run as well, before anything else was measured."""
    begun = list[str]()

    def die() -> Iterator[dict[str, Any]]:
        begun.append("machine")
        raise SystemExit

    def live() -> Iterator[dict[str, Any]]:
        begun.append("exact")
        yield {"texts_equal": True}

    monkeypatch.setattr(parts, "parts_of", lambda bench, names: {"machine": die, "exact": live})
    for _ in range(2):
        with pytest.raises(SystemExit):
            parts.run(Bench(tmp_path, CPU), ["tiny"], minutes=600)
    assert begun == ["machine", "exact", "machine"]
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert "the process ended in it" in {line["part"]: line for line in lines}["machine"]["error"]
    capsys.readouterr()


def test_a_large_vocabulary_is_left_free() -> None:
    """Llama 3's: two gigabytes of head, and half of one of the draft's, less what the built-in pair has."""
    job, shape = JOBS["70b"], JOBS["70b"].target
    small, heads = 4096, (shape.hidden_size, JOBS["70b"].draft.hidden_size)
    files = [SimpleNamespace(config=SimpleNamespace(vocab_size=small, hidden_size=width)) for width in heads]
    assert job.vocabulary_bytes(*files) == 2 * sum(heads) * (128_256 - small)  # type: ignore[arg-type]


def test_no_card_is_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match=r"Error: .*device=cuda:0.* cannot be used: .*--device cpu"):
        main(["unused"])


def test_layers_that_say_nothing_share_a_file(folder: Path) -> None:
    shape = JOBS["tiny"].target
    grown = Grown.make(
        builtin.path("target"), folder / f"target-{shape.hidden_size}x{shape.num_layers}-nf4", shape, CPU
    )
    assert len(grown.files.stored.layers) == shape.num_layers
    paths = {layer.record.extents[0].path for layer in grown.files.stored.layers}
    assert len(paths) == 9  # eight layers that speak, and one for all the others
    names = {info.name for layer in grown.files.stored.layers for w in layer.weights.values() for info in w.streamed}
    assert {int(name.split(".")[2]) for name in names} == set(range(shape.num_layers))


def test_packing_without_bitsandbytes() -> None:
    matrix = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    ours, theirs = pack_plainly(matrix, "nf4"), pack_4bit(matrix, "nf4", nested=False)
    assert ours.keys() == theirs.keys()
    for suffix in (".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4"):
        assert torch.equal(ours[suffix], theirs[suffix])
    layout, found = Layout4bit((96, 128), "nf4", 64), list[torch.Tensor]()
    for packing in (ours, theirs):
        out = torch.empty(96 * 128)
        packed = Matrix4bit(layout, packing[""][:, 0], packing[".absmax"])
        dequantize_reference(packed.codes, packed.absmax, layout, out)
        found.append((out - matrix.view(-1)).abs())
    assert (found[0] <= found[1] + 1e-6).all()  # never further from the matrix than bitsandbytes' own
