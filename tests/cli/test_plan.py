"""`offspec plan` tells what goes where, and refuses with the numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from offspec import convert
from offspec.loaders.machine.hardware import Memory, Rates
from offspec.tools import forecast

from .. import pair
from ..llama_configs import LLAMA_8B, write_config
from ..refusals import tells
from .conftest import Offspec


@pytest.fixture(scope="module")
def made_once() -> Callable[..., forecast.Forecast]:
    """`make_forecast`, which several tests ask for the same: as a table, with details, as JSON."""
    made, make = dict[str, forecast.Forecast](), forecast.make_forecast

    def get(*args: object, widths: Sequence[int], drafts: Sequence[str], progress: Any) -> forecast.Forecast:
        asked = repr((args, drafts))
        if asked not in made:
            made[asked] = make(*args, widths=widths, drafts=drafts, progress=progress)
        return made[asked]

    return get


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("large"), LLAMA_8B)


@pytest.fixture(autouse=True)
def _measured(made_once: Callable[..., forecast.Forecast], monkeypatch: pytest.MonkeyPatch) -> None:
    rates = Rates(disk_bytes_per_s=2e9, matmul_flops={1: 1e10}, sources={"disk_bytes_per_s": "2 readers"})
    monkeypatch.setattr("offspec.tools.forecast.measure_rates", lambda *_, **__: rates)
    monkeypatch.setattr("offspec.planning.probe.product_flops", lambda *_, **__: {})
    # A machine on which any of these tests' limits is free, whatever this one has.
    monkeypatch.setattr(
        "offspec.loaders.machine.hardware.read_memory", lambda *_: Memory(64 << 30, 60 << 30, 64 << 30, "given")
    )
    monkeypatch.setattr("psutil.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(forecast, "make_forecast", made_once)


@pytest.mark.slow
def test_earlier_conversations_of_a_server(offspec: Offspec, large: Path) -> None:
    """By default 1/16 of what is free, which the table names when it is planned."""
    args = ("plan", large, "--draft", "none", "--device", "cpu", "--ram", "8GiB", "-qv")
    told = json.loads(offspec(*args, "--json").out)
    assert 2**28 < told["parked_bytes"] < 2**29
    assert "earlier conversations, in up to" in offspec(*args).out
    planned = offspec(*args, "--cache-ram", "1GiB").out
    assert "in up to" not in planned
    assert next(line for line in planned.splitlines() if line.startswith("earlier conversations")).endswith(" 1 GiB")


def test_json(offspec: Offspec, large: Path) -> None:
    result = offspec("plan", large, "--gpu", "rtx4090", "--ram", "64GiB", "--format", "nf4", "--json", "-q")
    told = json.loads(result.out)
    assert result.out.count("\n") == 1
    assert told["stream_bytes_per_pass"] == 0  # 8B in 4 bits fits the card
    assert len(told["resident_layers"]) == 32
    assert set(told["pass_s"]) == {"1", "16", "64", "256", "512"}
    assert told["model"] == str(large)
    assert told["title"].startswith(f"{large.name}: 8 B parameters, nf4")


@pytest.mark.slow
def test_a_card_that_is_not_here_is_planned_for_without_measuring(
    offspec: Offspec, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offspec.tools.forecast.measure_rates", None)
    asked = ("plan", large, "--gpu", "4090", "--vram", "8GiB", "--ram", "4GiB", "--draft", "none", "-q")
    told = json.loads(offspec(*asked, "--json").out)
    assert told["rates"]["disk_bytes_per_s"] == 7e9
    assert "data sheet" in told["rates"]["sources"]["disk_bytes_per_s"]


def test_a_busy_machine_is_told_where_it_is_measured(
    offspec: Offspec, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.getloadavg", lambda: (1e6, 1e6, 1e6))
    asked = ("plan", large, "--draft", "none", "--ram", "9GiB", "-q")
    assert "is busy" in offspec(*asked, "--device", "cpu").out.splitlines()[0]
    assert json.loads(offspec(*asked, "--device", "cpu", "--json").out)["busy"] is not None
    assert (
        "is busy" not in offspec(*asked, "--gpu", "4090").out
    )  # a data sheet's figures are the same on a busy machine


@pytest.mark.slow
def test_what_a_user_would_notice(offspec: Offspec, large: Path) -> None:
    asked = ("plan", large, "--gpu", "rtx4090", "--vram", "8GiB", "--ram", "8GiB", "--draft", "none", "-qv")
    told, shown = json.loads(offspec(*asked, "--json").out), offspec(*asked).out
    assert f"{told['plain_tokens_per_s']:.2f} tokens/s" in shown
    assert 0.99 * told["pass_s"]["512"] < told["prompt_s"] < 10 * told["pass_s"]["512"]
    assert told["context"] < told["max_context"] == 8192
    assert told["four_bit"]["pass_s"] < told["pass_s"]["64"] / 3
    best = told["improvement"]
    assert "What would help most: 4 bit, --format nf4" in shown
    assert best["times"] >= 1.5
    assert "4 bit (--format nf4)" in shown
    packed = offspec(*asked, "--format", "nf4")
    assert "4 bit (--format" not in packed.out
    assert json.loads(offspec(*asked, "--format", "nf4", "--json").out)["four_bit"] is None
    assert {gain["memory"] for gain in told["gains"]} == {"VRAM", "RAM"}


def test_a_draft_that_is_slower_than_plain_decoding_says_so(offspec: Offspec, large: Path) -> None:
    """In RAM on a CPU, 64 rows take 64 times as long as one; on a card, about as long."""
    asked = ("plan", large, "--draft", "lookup", "-q")
    slow, fast = offspec(*asked, "--device", "cpu").out, offspec(*asked, "--gpu", "rtx4090").out
    assert "--draft lookup does not make it faster" in slow
    assert "not make it faster" not in fast


def verdict_of(shown: str) -> list[str]:
    """The lines after the title, up to the assumptions; each as one line."""
    verdict, _, _ = shown.replace("\n  ", " ").partition("\n\n")
    return verdict.splitlines()[1:]


def in_words(shown: str) -> str:
    """What is shown, as one line."""
    return " ".join(shown.split())


def test_the_verdict_comes_first_and_is_short(offspec: Offspec, large: Path) -> None:
    asked = ("plan", large, "--draft", "lookup", "--gpu", "rtx4090", "--vram", "8GiB", "--ram", "64GiB", "-q")
    told, verdict = json.loads(offspec(*asked, "--json").out), verdict_of(offspec(*asked).out)
    assert len(verdict) <= 6
    shown = offspec(*asked, "-v").out.replace(str(large), "MODEL")  # commands are as long as its path
    assert [line for line in shown.splitlines() if len(line) > 120] == []
    assert verdict[0].startswith("It runs. 32 layers: ")
    drafts = {draft["draft"]: draft for draft in told["drafts"]}
    for line, kind in ((verdict[1], "greedy"), (verdict[2], "sampled")):
        found = drafts["lookup"][kind]
        shown = re.findall(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)", line)
        for name, rounding, figures in zip(("tokens_per_s", "tokens_per_pass"), (0.0051, 0.051), shown, strict=True):
            usual, least, most = (found[prefix + name] for prefix in ("", "least_", "most_"))
            assert least < usual < most
            assert [*map(float, figures)] == pytest.approx([usual, least, most], abs=rounding)
    assert f"Without a draft: {drafts['none']['greedy']['tokens_per_s']:.2f} tokens/s" in verdict[2]
    assert tells(verdict[3], "llama.cpp", "without a draft")
    assert tells(verdict[4], "2000", "first token")
    best = told["improvement"]
    assert best["tokens_per_s"] == pytest.approx(best["times"] * drafts["lookup"]["greedy"]["tokens_per_s"])
    assert f"{best['times']:.1f} times as many" in verdict[5]
    assert drafts["lookup"]["source"] in in_words(offspec(*asked).out)
    assert drafts["lookup"]["range_source"] in in_words(offspec(*asked).out)


def test_a_plan_for_a_card_without_bf16(offspec: Offspec, large: Path) -> None:
    asked = ("plan", large, "--draft", "none", "--ram", "64GiB", "--format", "nf4")
    assert tells(offspec(*asked, "--gpu", "rtx2080ti").err, "bf16", "fp16", "--dtype fp32")


def test_what_more_memory_would_bring(offspec: Offspec, large: Path) -> None:
    """16 GB of weights: on 8 GiB some stay, with 8 more most, with 16 more all."""
    asked = ("plan", large, "--draft", "none", "--device", "cpu", "--ram", "8GiB", "-qv")
    told = json.loads(offspec(*asked, "--json").out)
    kept = [len(told["resident_layers"]), *(gain["num_layers"]["resident"] for gain in told["gains"])]
    seconds = [told["pass_s"]["64"], *(gain["pass_s"] for gain in told["gains"])]
    assert kept == sorted(set(kept))
    assert kept[-1] == 32
    assert seconds == sorted(seconds, reverse=True)
    assert [(gain["memory"], gain["more_bytes"]) for gain in told["gains"]] == [
        ("RAM", step * 8 * 2**30) for step in range(1, len(kept))
    ]
    shown = offspec(*asked).out
    assert "s per pass of 64" in shown
    assert re.search(r"^8 GiB more RAM +[\d.]+ +[\d.]+  \d+ resident", shown, re.MULTILINE)
    assert "32 resident" in shown


MIXTURE = {
    **LLAMA_8B,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 2048,
    "head_dim": 128,
    "vocab_size": 32000,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
}


def test_a_mixture_for_a_card_takes_no_rate_of_this_machine(
    offspec: Offspec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU and RAM beside the card are assumed, told, and can be set."""
    monkeypatch.setattr("offspec.tools.forecast.host_flops", None)
    write_config(tmp_path, MIXTURE)
    asked = ("plan", tmp_path, "--gpu", "rtx4090", "--vram", "2GiB", "--ram", "16GiB", "--draft", "none", "-q")
    shown = in_words(offspec(*asked).out)
    assert tells(shown, "RAM: 60 GB/s", "8 cores", "assumed: desktop", "--cpu and --ram-rate")
    assert tells(shown, "experts: not measured on a card")
    assert shown.count("experts are on the device") == 1
    assert "llama.cpp, which computes on the CPU" in shown
    rates = {
        flags: json.loads(offspec(*asked, *flags, "--json").out)["plain_tokens_per_s"]
        for flags in ((), ("--cpu", "server"), ("--ram-rate", "20GB"))
    }
    assert rates["--ram-rate", "20GB"] < rates[()] < rates["--cpu", "server"]
    offspec(*asked, "--cpu", "abacus").refusal(2, "--cpu abacus", "desktop-ddr4", "this")
    offspec(*asked, "--ram-rate", "0").refusal(2, "--ram-rate 0", "60GB")
    offspec("plan", tmp_path, "--device", "cpu", "--cpu", "desktop", "-q").refusal(2, "--cpu", "--gpu")


def test_what_fits_on_the_card_is_for_other_programs(offspec: Offspec, large: Path) -> None:
    asked = ("plan", large, "--gpu", "rtx4090", "--format", "q4_k_m", "-q")
    told, verdict = json.loads(offspec(*asked, "--json").out), verdict_of(offspec(*asked).out)
    times = told["llama_cpp_tokens_per_s"] / told["plain_tokens_per_s"]
    assert 1.1 < times < 4
    assert f"Use llama.cpp: about 130 tokens/s without a draft (estimate), {times:.1f} times as many" in verdict[2]
    assert tells(told["title"], "q4_k_m", "4.6 GiB")
    on_cpu = offspec("plan", large, "--draft", "lookup", "--device", "cpu", "-q").out
    assert "Use llama.cpp: without a draft" in on_cpu


def test_what_is_too_slow_says_so(offspec: Offspec, large: Path) -> None:
    asked = ("plan", large, "--gpu", "rtx3060", "--vram", "5GiB", "--ram", "3GiB", "--disk", "0.02GB", "-q")
    assert json.loads(offspec(*asked, "--format", "q8_0", "--json").out)["is_too_slow"]
    assert "too slowly to be worth it" in offspec(*asked, "--format", "q8_0").out


@pytest.mark.slow
def test_the_familys_draft_is_what_helps_most(offspec: Offspec, tmp_path: Path) -> None:
    """Without a draft of one's own, a plan names it, and what it takes to download it: here for a 70B."""
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
    write_config(tmp_path, LLAMA_8B | shape)
    asked = ("plan", tmp_path, "--gpu", "rtx4090", "--ram", "64GiB", "--format", "q4_k_m", "-q")
    shown, verdict = in_words(offspec(*asked).out), verdict_of(offspec(*asked).out)
    assert "What would help most: --draft meta-llama/Llama-3.2-1B-Instruct, a download of 2.3 GiB" in verdict[-1]
    assert "tokens per pass of meta-llama/Llama-3.2-1B-Instruct: Qwen2.5-Coder" in shown
    assert "llama.cpp, which computes on the CPU what is in RAM: about 2.4 tokens/s" in shown


def test_a_draft_of_another_vocabulary_is_marked(offspec: Offspec, large: Path, tmp_path: Path) -> None:
    write_config(tmp_path / "foreign", LLAMA_8B | {"num_hidden_layers": 2, "hidden_size": 1024, "vocab_size": 32000})
    asked = ("plan", large, "--gpu", "rtx4090", "--vram", "10GiB", "--ram", "64GiB", "-q")
    shown = offspec(*asked, "--draft", tmp_path / "foreign", "--draft", "lookup").out
    assert re.search(r"^foreign \* ", shown, re.MULTILINE)
    assert "* another vocabulary than the target's" in shown


def test_details_are_shown_if_they_are_asked_for(offspec: Offspec, large: Path) -> None:
    asked = ("plan", large, "--draft", "lookup", "--gpu", "rtx4090", "--vram", "8GiB", "--ram", "64GiB", "-q")
    short, full = offspec(*asked).out, offspec(*asked, "-v").out
    assert len(short.splitlines()) <= 25 < len(full.splitlines())
    assert tells(short.splitlines()[-1], "-v", "memory", "drafts")
    assert full.startswith(short[: short.index("Assumed:")])
    assert tells(full, "resident layers", "With more memory", "Drafts, by these rates")


@pytest.mark.slow
def test_drafts_are_compared_in_one_table(offspec: Offspec, large: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_hidden_layers": 8}
    (small / "config.json").write_text(json.dumps(json.loads((large / "config.json").read_text()) | shape))
    card = ("plan", large, "--gpu", "rtx4090", "--vram", "10GiB", "--ram", "64GiB", "-c", "2048", "-q")
    asked = (*card, "--draft", small, "--draft", "shadow:3", "--draft", "self:4")
    told = json.loads(offspec(*asked, "--json").out)
    drafts = {draft["draft"]: draft for draft in told["drafts"]}
    assert list(drafts) == [str(small), "shadow:3", "self:4", "shadow:4", "shadow:2", "lookup", "none"]
    usable = {name: draft for name, draft in drafts.items() if "greedy" in draft}
    assert told["draft"] == max(
        [str(small), "shadow:3", "self:4"], key=lambda name: usable[name]["greedy"]["tokens_per_s"]
    )
    assert drafts["none"]["greedy"]["tokens_per_s"] == pytest.approx(1 / drafts["none"]["greedy"]["pass_s"])
    assert drafts["none"]["draft_bytes"] == 0 < drafts["shadow:2"]["draft_bytes"] < drafts["shadow:4"]["draft_bytes"]
    shown = offspec(*asked).out
    fastest = max(usable, key=lambda name: usable[name]["greedy"]["tokens_per_s"])
    assert f"The fastest is {fastest}, " in in_words(shown)
    for name, draft in usable.items():
        (row,) = (re.split(r"\s{2,}", line) for line in shown.splitlines() if line.split()[:1] == [Path(name).name])
        for cell, kind in zip(row[-2:], ("greedy", "sampled"), strict=True):
            assert float(cell.split()[0]) == pytest.approx(draft[kind]["tokens_per_s"], rel=5e-3)


def test_a_draft_that_does_not_fit_says_so_in_the_table(offspec: Offspec, large: Path) -> None:
    asked = ("plan", large, "--gpu", "rtx4090", "--vram", "5GiB", "--ram", "64GiB", "-c", "2048", "-qv")
    shown = offspec(*asked, "--draft", "lookup").out
    assert "shadow:4: 5 GiB of VRAM are not enough" in shown
    assert "The fastest is " in shown
    refused = offspec(*asked, "--draft", "shadow:4")
    refused.refusal(1, "shadow", "5 GiB of VRAM")
    assert offspec(*asked, "--draft", "shadow:4", "--draft", "none").code == 0


@pytest.mark.slow
def test_texts_that_share_passes(offspec: Offspec, large: Path) -> None:
    asked = ("plan", large, "--draft", "lookup", "--gpu", "rtx4090", "--ram", "64GiB", "--vram", "8GiB", "-qv")
    told = json.loads(offspec(*asked, "--json").out)
    assert [found["num_texts"] for found in told["texts"]] == [1, 2, 4, 8, 16]
    assert told["num_texts"] == 1
    alone = next(draft for draft in told["drafts"] if draft["draft"] == "lookup")
    assert told["texts"][0]["greedy"] == alone["greedy"]
    for found in told["texts"]:
        assert found["tokens_per_s"] == pytest.approx(found["num_texts"] * found["each_tokens_per_s"])
        assert found["tokens_each"] == (4096 + 1024 * (found["num_texts"] - 1)) // found["num_texts"]
    rates = [found["tokens_per_s"] for found in told["texts"]]
    assert rates == sorted(rates)
    rows = {line[:22].strip(): line[22:].split() for line in offspec(*asked).out.splitlines()}
    assert rows["texts"] == ["1", "2", "4", "8", "16"]
    assert [float(cell) for cell in rows["tokens/s together"]] == pytest.approx(rates, rel=1e-2)
    assert rows["tokens each may have"][:2] == ["4096", "2560"]


def test_a_plan_for_several_texts(offspec: Offspec, large: Path) -> None:
    asked = ("plan", large, "--draft", "none", "--device", "cpu", "--ram", "6GiB", "--context", 2048, "-q")
    one, three = (json.loads(offspec(*asked, "--texts", number, "--json").out) for number in (1, 3))
    assert [found["num_texts"] for found in three["texts"]] == [1, 2, 3, 4, 8, 16]
    kv_bytes = [next(row["ram_bytes"] for row in told["memory"] if row["what"] == "KV cache") for told in (one, three)]
    assert kv_bytes[1] - kv_bytes[0] == 2 * 1024 * 32 * 2 * 8 * 128 * 2  # two texts of 1024 tokens, in bf16
    assert offspec(*asked, "--texts", "0").code == 2


def test_refusals(offspec: Offspec, large: Path, tmp_path: Path) -> None:
    offspec("plan", large, "--draft", "none", "--device", "cpu", "--ram", "1GiB", "-q").refusal(1, "1 GiB", "--ram")
    offspec("plan", large, "--gpu", "rtx9999", "-q").refusal(2, "rtx9999", "rtx4090")
    offspec("plan", large, "--ram", "plenty").refusal(2, "--ram", "plenty", "20GiB")
    offspec("plan", large, "--gpu", "rtx4090", "--device", "cpu", "-q").refusal(2, "--gpu rtx4090", "--device cpu")
    offspec("plan", large, "--disk", "0", "-q").refusal(2, "--disk 0", "7GB")
    offspec("plan", large, "--draft", "lookup", "--exit-layer", "2", "-q").refusal(2, "--exit-layer", "--draft self:N")
    offspec("plan", tmp_path, "-q").refusal(1, tmp_path, "config.json")


def test_formats_of_the_kv_cache(offspec: Offspec, large: Path) -> None:
    """What each would bring, and that packing changes the text."""
    asked = ("plan", large, "--draft", "none", "--gpu", "rtx4090", "--vram", "5GiB", "--format", "nf4", "-qv")
    told = json.loads(offspec(*asked, "--context", 8192, "--json").out)
    assert told["kv_cache"] == "8"
    assert [found["kv_cache"] for found in told["kv_caches"]] == ["16", "8", "4"]
    assert [found["token_bytes"] for found in told["kv_caches"]] == [131_072, 69_632, 45_568]
    residents = [found["num_resident_layers"] for found in told["kv_caches"]]
    assert residents == sorted(residents)
    shown = offspec(*asked, "--context", 8192, "--kv-cache", "4").out
    assert re.search(r"^4 \(planned\) +4 bit ", shown, re.MULTILINE)
    assert "the text is that of plain decoding with" in shown


def test_a_format_that_is_larger_than_the_stored_one(offspec: Offspec, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    convert(pair.build_pair(tmp_path, **pair.MIXTURE).target, folder)
    asked = ("plan", folder, "--draft", "none", "--device", "cpu")
    assert "larger" not in offspec(*asked).err
    (line,) = (line for line in offspec(*asked, "--format", "fp32").err.splitlines() if "larger" in line)
    assert tells(line, "packed", "fp32", "nf4", "twice")
