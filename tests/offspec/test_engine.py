"""The engine on a tiny pair: its text is plain decoding's whatever is guessed, and what it counts, refuses
and survives.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams, Step
from offspec.builtin import path as builtin_path
from offspec.checkpoints import opening
from offspec.checkpoints.opening import choose_device, open_model
from offspec.drafts.model_draft import ModelDraft
from offspec.drafts.recall import RecallingText
from offspec.drafts.without_model import NoDraft
from offspec.errors import (
    CheckpointError,
    ContextLengthError,
    NumericalError,
    TokenizerError,
    UnsupportedModelError,
    UsageError,
    VocabularyMismatchError,
)
from offspec.loaders.machine.gpu_support import GpuFault
from offspec.loaders.machine.hardware import Gpu
from offspec.loaders.streaming.tiers import TieredWeights
from offspec.model.decoder import random_decoder
from offspec.notes import Note
from offspec.running import passes
from offspec.scheduler.drafting.child_scores import ChildScorer
from offspec.scheduler.pace.trials import OverlapSwitch
from offspec.scheduler.params import Scoring, Stopping
from offspec.text.prompt import Prompt

from ..pair import CONTEXT, VOCAB_SIZE, Pair, narrow, scale_weights, variant
from ..refusals import check_message, refused, tells

CPU = torch.device("cpu")
PROMPT = "def area("
PLAIN = SpeculationParams(budget=0)
GUESSING: tuple[tuple[int, Scoring], ...] = ((1, "coupled"), (24, "specexec"))  # others are those of `test_texts`
NUM_TOKENS = 8
SAMPLING = {
    "greedy": SamplingParams(NUM_TOKENS, seed=0),
    "penalty": SamplingParams(NUM_TOKENS, repetition_penalty=1.4, seed=1),
    "penalties of the answer": SamplingParams(
        NUM_TOKENS,
        frequency_penalty=0.9,
        presence_penalty=-0.4,
        logit_bias=((5, 3.0), (9, -50.0)),
        temperature=0.5,
        seed=1,
    ),
    "warm": SamplingParams(NUM_TOKENS, temperature=0.6, seed=2),
    "top-p": SamplingParams(NUM_TOKENS, temperature=1.0, top_p=0.9, seed=3),
    "everything": SamplingParams(
        NUM_TOKENS, temperature=1.3, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=0.8, seed=4, ignore_eos=True
    ),
}


def load(target: Path, draft: Path | None = None, device: str = "cpu", dtype: str = "auto") -> Engine:
    return Engine.load(str(target), draft=str(draft) if draft else "none", device=device, dtype=dtype)


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    with load(pair.target, pair.draft) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def engines(engine: Engine) -> dict[str, Engine]:
    """The same target behind drafts that guess well, perfectly and not at all."""
    noise = random_decoder(engine.target.config, 0, dtype=torch.float32, device=CPU)
    return {
        "own": engine,
        "itself": engine.with_draft(ModelDraft(engine.target, "itself")),
        "random": engine.with_draft(ModelDraft(noise, "random")),
        "none": engine.with_draft(NoDraft()),
    }


@pytest.fixture(scope="module")
def plain_of(engines: dict[str, Engine]) -> Callable[[str], list[Step]]:
    """Plain decoding's steps for a name in SAMPLING."""
    return cache(lambda name: steps(engines["none"], params=SAMPLING[name], speculation=PLAIN))


def steps(
    engine: Engine,
    prompt: Prompt = PROMPT,
    params: SamplingParams | None = None,
    speculation: SpeculationParams | None = None,
    **more: Any,
) -> list[Step]:
    """All steps of one request; `more` are sampling parameters."""
    return list(engine.generate(prompt, params or SamplingParams(**{"max_new_tokens": 24, **more}), speculation))


def fresh(engine: Engine) -> Engine:
    """The same pair, knowing nothing of it yet, so that drafting beside the pass is tried at once."""
    return engine.with_draft(engine.draft)


def ids(found: Sequence[Step]) -> list[int]:
    return list(chain.from_iterable(step.token_ids for step in found))


def text(found: Sequence[Step]) -> str:
    return "".join(step.text for step in found)


# ------------------------------------------------------------------------------------------------ the text


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("draft", ["own", "itself", "random"])
@pytest.mark.parametrize("name", SAMPLING)
def test_text_does_not_depend_on_guesses(
    name: str, draft: str, engines: dict[str, Engine], plain_of: Callable[[str], list[Step]]
) -> None:
    params, plain = SAMPLING[name], plain_of(name)
    assert plain[-1].stats.tokens_per_pass == 1
    for budget, scoring in GUESSING:
        speculation = SpeculationParams(budget=budget, scoring=scoring)
        guessed = steps(engines[draft], params=params, speculation=speculation)
        assert ids(guessed) == ids(plain), speculation
        assert (text(guessed), guessed[-1].finish_reason) == (text(plain), plain[-1].finish_reason)


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("draft", ["own", "random"])
@pytest.mark.parametrize("name", ["greedy", "everything"])
def test_text_does_not_depend_on_what_lives_on_or_is_drafted_beside(
    name: str, draft: str, engines: dict[str, Engine], plain_of: Callable[[str], list[Step]]
) -> None:
    params, plain = SAMPLING[name], ids(plain_of(name))
    for reuse, overlap, budget in ((True, False, 6), (False, True, 6)):
        speculation = SpeculationParams(budget=budget, reuse=reuse, overlap=overlap)
        assert ids(steps(fresh(engines[draft]), params=params, speculation=speculation)) == plain, speculation


@pytest.mark.parametrize("stopping", ["thompson", "thompson-calibrated"])
def test_text_does_not_depend_on_when_drafting_stops(
    stopping: Stopping, engines: dict[str, Engine], plain_of: Callable[[str], list[Step]]
) -> None:
    speculation = SpeculationParams(stopping=stopping)
    assert ids(steps(engines["own"], params=SAMPLING["top-p"], speculation=speculation)) == ids(plain_of("top-p"))


@pytest.mark.slow
def test_a_perfect_draft_is_believed(engines: dict[str, Engine]) -> None:
    params = replace(SAMPLING["top-p"], max_new_tokens=12)
    speculation = SpeculationParams(budget=32, lookup=False, recall=False)  # the draft alone
    per_pass = {
        draft: steps(fresh(engines[draft]), params=params, speculation=speculation)[-1].stats.tokens_per_pass
        for draft in ("itself", "own", "random")
    }
    assert per_pass["itself"] >= 4
    assert per_pass["itself"] > per_pass["own"] > per_pass["random"]


def test_seeds(engine: Engine) -> None:
    def sampled(seed: int | None) -> list[Step]:
        return steps(engine, temperature=1.0, seed=seed, max_new_tokens=8)

    assert ids(sampled(5)) == ids(sampled(5)) != ids(sampled(6))
    drawn, other = sampled(None), sampled(None)
    assert drawn[-1].stats.seed != other[-1].stats.seed
    assert ids(sampled(drawn[-1].stats.seed)) == ids(drawn)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", ("prompt", "empty")),
        ([1, VOCAB_SIZE], ("id", VOCAB_SIZE, "vocabulary")),
        ([1, {"role": "user", "content": "hi"}], ("prompt", "ids", "messages")),
    ],
)
def test_prompts_that_are_refused(prompt: Any, words: tuple[object, ...], engine: Engine) -> None:
    with refused(UsageError, *words):
        engine.generate(prompt)  # at once, not at the first step


# ------------------------------------------------------------------------------------------------ where it ends


@pytest.mark.each_value
@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("draft", ["itself", "own", "none"])
def test_max_new_tokens_is_exact(limit: int, draft: str, engines: dict[str, Engine]) -> None:
    found = steps(engines[draft], max_new_tokens=limit, ignore_eos=True)
    assert len(ids(found)) == limit
    assert [step.finish_reason for step in found] == [None] * (len(found) - 1) + ["length"]


def test_most_of_a_chat_far_too_long_is_not_encoded(engine: Engine) -> None:
    with refused(ContextLengthError, f"{4 * CONTEXT} tokens"):
        engine.encode([{"role": "user", "content": "the cat " * 100_000}])


@pytest.mark.parametrize("num_free", [1, 5])
def test_the_context_fills_to_its_last_place(num_free: int, engines: dict[str, Engine]) -> None:
    prompt = [40] * (CONTEXT - num_free)
    found = {
        draft: steps(engines[draft], prompt, speculation=SpeculationParams(budget=200), ignore_eos=True)
        for draft in ("itself", "none")
    }
    assert ids(found["itself"]) == ids(found["none"])
    assert len(ids(found["itself"])) == num_free
    assert found["itself"][-1].finish_reason == "length"


@pytest.mark.parametrize("num_tokens", [CONTEXT, 10 * CONTEXT])
def test_a_prompt_that_leaves_no_room(num_tokens: int, engine: Engine) -> None:
    with refused(ContextLengthError, f"{num_tokens} tokens", "context", CONTEXT):
        engine.generate([40] * num_tokens)


def test_end_of_text(pair: Pair, engines: dict[str, Engine], tmp_path: Path) -> None:
    unbounded = ids(steps(engines["none"], max_new_tokens=20))
    folder = variant(pair.target, tmp_path / "target")
    token = unbounded[12]
    at = unbounded.index(token)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, token]}))
    guessed = load(folder, pair.draft)
    for engine in (guessed, guessed.with_draft(NoDraft())):
        found = steps(engine, max_new_tokens=20)
        assert ids(found) == unbounded[: at + 1]
        assert found[-1].finish_reason == "eos"
        assert text(found) == engine.tokenizer.decode(unbounded[:at])
        assert ids(steps(engine, max_new_tokens=20, ignore_eos=True)) == unbounded


@pytest.mark.slow
def test_stop_texts_end_the_text_wherever_tokens_end(engines: dict[str, Engine]) -> None:
    whole = text(steps(engines["none"], max_new_tokens=16))
    for first, length in ((3, 1), (3, 5), (13, 2)):
        stop = whole[first : first + length]
        plain, found = (
            steps(engines[name], max_new_tokens=16, stop=(stop, "never said"), seed=0) for name in ("none", "itself")
        )
        for each in (plain, found):
            assert (text(each), each[-1].finish_reason) == (whole[: whole.find(stop)], "stop")
        assert ids(found) == ids(plain)


def test_text_that_looked_like_a_stop_is_given_back(engines: dict[str, Engine]) -> None:
    whole = text(steps(engines["none"], max_new_tokens=12))
    found = steps(engines["own"], max_new_tokens=12, stop=(whole[-3:] + "never said",))
    assert (text(found), found[-1].finish_reason) == (whole, "length")


# ------------------------------------------------------------------------------------------------ what is counted


def test_counts(engines: dict[str, Engine]) -> None:
    found = steps(engines["own"], temperature=0.8, seed=3, max_new_tokens=16, stop=("\ufffd",))
    stats = found[-1].stats
    assert found[0].token_ids, "the first pass already yields tokens"
    assert stats.num_tokens == len(ids(found))
    assert stats.num_passes == len(found)
    assert stats.tokens_per_pass == stats.num_tokens / len(found)
    assert stats.num_first_pass_tokens == len(found[0].token_ids)
    assert stats.num_prompt_tokens == len(engines["own"].encode(PROMPT))
    assert 0 < stats.prefill_s <= stats.ttft_s
    assert stats.draft_s + stats.target_s <= stats.prefill_s + stats.decode_s
    if len(found) > 1:
        expected = (stats.num_tokens - stats.num_first_pass_tokens) / stats.decode_s
        assert stats.decode_tokens_per_s == pytest.approx(expected)
    assert stats.peak_host_bytes > 2**20
    assert stats.as_dict().items() >= {"seed": 3, "num_tokens": stats.num_tokens, "link_gb_per_s": None}.items()


# ------------------------------------------------------------------------------------------------ many requests


@pytest.fixture
def wanted(plain_of: Callable[[str], list[Step]]) -> list[int]:
    return ids(plain_of("top-p"))


def drafts_beside(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[torch.Tensor], torch.Tensor]) -> threading.Event:
    """Every pass of the target waits until the draft has scored beside it (else it may be too late);
    `spoil` its logits.
    """
    scored, score, together = threading.Event(), RecallingText.score, passes.score_together

    def spied(self: RecallingText, *args: Any) -> torch.Tensor:
        logits = score(self, *args)
        if threading.current_thread().name == "offspec-draft":
            logits = spoil(logits)
            scored.set()
        return logits

    def late(*args: Any) -> Any:
        assert scored.wait(300)
        return together(*args)

    monkeypatch.setattr(OverlapSwitch, "is_on", lambda _: True)
    monkeypatch.setattr(RecallingText, "score", spied)
    monkeypatch.setattr(passes, "score_together", late)
    return scored


def of_drafting() -> set[threading.Thread]:
    """Threads that draft, whoever started them."""
    return {thread for thread in threading.enumerate() if thread.name == "offspec-draft"}


def test_drafting_beside_the_pass_leaves_no_thread_behind(
    engine: Engine, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SAMPLING["top-p"]
    one, before = fresh(engine), of_drafting()
    scored = drafts_beside(monkeypatch, lambda logits: logits)
    under_way = one.generate(PROMPT, params, SpeculationParams(budget=8))
    next(under_way)
    assert scored.is_set()
    assert of_drafting() == before
    under_way.close()
    monkeypatch.undo()
    assert ids(steps(one, params=params)) == wanted


def test_a_pass_that_fails_while_the_draft_is_at_work(
    engine: Engine, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SAMPLING["top-p"]
    one = fresh(engine)
    scored = drafts_beside(monkeypatch, lambda logits: logits)

    def failing(*args: Any) -> None:
        assert scored.wait(300)
        raise KeyboardInterrupt

    monkeypatch.setattr(passes, "score_together", failing)
    with pytest.raises(KeyboardInterrupt):
        next(one.generate(PROMPT, params, SpeculationParams(budget=8)))
    monkeypatch.undo()
    assert ids(steps(one, params=params)) == wanted


def test_a_draft_that_fails_beside_the_pass_ends_no_text(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(pair.target, pair.draft) as one:
        plain, num_notes = ids(steps(one, speculation=PLAIN, max_new_tokens=12)), len(one.notes)
        drafts_beside(monkeypatch, lambda logits: logits * float("nan"))
        found = steps(one, speculation=SpeculationParams(budget=8), max_new_tokens=12)
        assert ids(found) == plain
        check_message(found[-1].stats.draft_fault or "", "draft", "logits", "finite")
        steps(one, speculation=SpeculationParams(budget=8), max_new_tokens=12)
        assert len(one.notes) == num_notes + 1, "it is told once"
        monkeypatch.undo()
        assert steps(one, max_new_tokens=12)[-1].stats.draft_fault is None


@pytest.mark.each_value
@pytest.mark.parametrize("draft", ["model", pytest.param("self", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["greedy", "warm"])
def test_a_draft_that_fails_ends_no_text(draft: str, name: str, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its conversation goes on with the draft, whose cache may hold anything by then."""
    options: dict[str, Any] = {"draft": str(pair.draft)} if draft == "model" else {"draft": draft, "exit_layer": 1}
    with Engine.load(str(pair.target), device="cpu", **options) as one:
        plain = ids(steps(one, params=SAMPLING[name], speculation=PLAIN))
        score, num_calls = ChildScorer.score, count()

        def spoilt(self: ChildScorer, logits: torch.Tensor, *args: Any) -> Any:
            return score(self, logits * float("nan") if next(num_calls) >= 2 else logits, *args)

        caches = one.new_caches()
        with monkeypatch.context() as patch:
            patch.setattr(ChildScorer, "score", spoilt)
            found = list(one.generate(PROMPT, SAMPLING[name], SpeculationParams(8, lookup=False), caches=caches))
        assert ids(found) == plain
        check_message(found[-1].stats.draft_fault or "", "draft", "logits", "finite")
        longer = [*one.encode(PROMPT), *plain]
        again = list(one.generate(longer, SAMPLING[name], SpeculationParams(8), caches=caches))
        assert ids(again) == ids(steps(one, longer, SAMPLING[name], PLAIN))
        assert again[-1].stats.draft_fault is None


@pytest.mark.parametrize(("maker", "user"), [("none", "own"), ("own", "none")])
def test_caches_of_an_engine_with_another_draft(
    maker: str, user: str, engines: dict[str, Engine], plain_of: Callable[[str], list[Step]]
) -> None:
    """They hold the same target's text; where they have no room for the draft, it does not guess."""
    caches = engines[maker].new_caches()
    for sampling in ("greedy", "warm"):
        found = engines[user].generate(PROMPT, SAMPLING[sampling], caches=caches)
        assert [token for step in found for token in step.token_ids] == ids(plain_of(sampling))


# ------------------------------------------------------------------------------------------------ weights and drafts


def test_weights_that_are_no_numbers(pair: Pair, tmp_path: Path) -> None:
    bad = {"model.norm.weight": float("nan")}
    target = scale_weights(variant(pair.target, tmp_path / "target"), bad)
    with refused(NumericalError, "target", "logits", "finite"):
        steps(load(target))
    draft = scale_weights(variant(pair.draft, tmp_path / "draft"), bad)
    check_message(steps(load(pair.target, draft))[-1].stats.draft_fault or "", "draft", "finite")


def test_fp16_that_overflows(pair: Pair, tmp_path: Path) -> None:
    large = scale_weights(variant(pair.target, tmp_path / "target"), {"lm_head.weight": 3e5})
    with refused(NumericalError, "`dtype=fp32`"):
        steps(load(large, dtype="fp16"))
    assert steps(load(large, dtype="fp32"), max_new_tokens=2)


def test_a_draft_with_a_shorter_context(pair: Pair, engines: dict[str, Engine], tmp_path: Path) -> None:
    draft = variant(pair.draft, tmp_path / "draft", max_position_embeddings=20)
    found = steps(
        load(pair.target, draft),
        speculation=SpeculationParams(budget=64, lookup=False),
        max_new_tokens=30,
        ignore_eos=True,
    )
    assert ids(found) == ids(steps(engines["none"], max_new_tokens=30, ignore_eos=True))
    assert len(found[0].token_ids + found[1].token_ids) > 2
    assert all(len(step.token_ids) == 1 for step in found[-9:])  # it has nothing to say there


def other_vocabulary(pair: Pair, folder: Path) -> Path:
    """One whose tokens' text depends on their neighbours; others are drafted for (`test_other_vocabulary`)."""
    variant(pair.draft, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def without_tokenizer(pair: Pair, folder: Path) -> Path:
    narrow(variant(pair.draft, folder), 305)
    (folder / "tokenizer.json").unlink()
    return folder


@pytest.mark.parametrize("break_draft", [other_vocabulary, without_tokenizer])
def test_a_draft_with_another_vocabulary(
    break_draft: Any, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TieredWeights, "__init__", lambda *_, **__: pytest.fail("weights were read first"))
    with refused(VocabularyMismatchError, "draft"):
        load(pair.target, break_draft(pair, tmp_path / "draft"))


def test_what_cannot_be_read_is_named(pair: Pair, tmp_path: Path) -> None:
    folder = variant(pair.target, tmp_path / "unknown", model_type="mamba")
    with refused(UnsupportedModelError, folder, "mamba"):
        load(folder)
    folder = variant(pair.target, tmp_path / "bad", hidden_size=None)
    with refused(CheckpointError, folder, "hidden_size"):
        load(pair.target, folder)


def test_a_target_needs_a_tokenizer(pair: Pair, tmp_path: Path) -> None:
    folder = variant(pair.target, tmp_path / "target")
    (folder / "tokenizer.json").unlink()
    with refused(TokenizerError, folder):
        load(folder)


# ------------------------------------------------------------------------------------------------ device and dtype


@pytest.mark.parametrize(
    ("wanted", "dtype"),
    [("auto", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_dtypes(wanted: str, dtype: torch.dtype, pair: Pair) -> None:
    engine = load(pair.target, pair.draft, dtype=wanted)
    assert engine.draft.decoder is not None
    assert engine.target.dtype == engine.draft.decoder.dtype == dtype
    assert len(ids(steps(engine, max_new_tokens=2, ignore_eos=True))) == 2
    told = [note.text for note in engine.notes if "dtype" in note.text]
    assert len(told) == (2 if wanted == "auto" else 0)
    assert all(tells(text, "dtype fp32", role) for text, role in zip(told, ("target", "draft"), strict=False))


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    notes: list[Note] = []
    assert choose_device("cpu", notes) == CPU
    assert choose_device("cuda:1", notes) == torch.device("cuda:1")
    assert choose_device("auto", notes) == choose_device("cuda", notes) == torch.device("cuda:0")
    assert [note.text for note in notes] == ["device cuda:0 (found)"]
    for wanted in ("cuda:2", "cuda:x", "mps", ""):
        with refused(UsageError, f"`device={wanted}`"):
            choose_device(wanted, notes)


@pytest.mark.parametrize("has_driver", [False, True])
def test_device_without_a_card(monkeypatch: pytest.MonkeyPatch, has_driver: bool) -> None:
    """Where there is a driver, there is a card that could be used."""
    fault = GpuFault("the driver is too old", "update it", has_driver)
    monkeypatch.setattr(opening, "gpu_fault", lambda: fault)
    notes: list[Note] = []
    assert choose_device("auto", notes) == CPU
    assert notes == [Note("device cpu: the driver is too old; update it", advice=has_driver)]
    with refused(UsageError, "`device=cuda`", "too old", "update it", "`device=cpu`"):
        choose_device("cuda", notes)
    assert choose_device("cpu", notes) == CPU


def test_device_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that is older than the second of two cards."""
    monkeypatch.setattr(opening, "gpu_fault", lambda: None)
    monkeypatch.setattr(opening, "card_fault", lambda index: GpuFault("no kernels", "install it") if index else None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", []) == torch.device("cuda:0")
    with refused(UsageError, "`device=cuda:1`", "no kernels", "install it"):
        choose_device("cuda:1", [])
    monkeypatch.setattr(opening, "card_fault", lambda index: GpuFault("no kernels", "install it"))
    notes: list[Note] = []
    assert choose_device("auto", notes) == CPU
    assert notes == [Note("device cpu: no kernels; install it", advice=True)]


@pytest.mark.parametrize(
    ("capability", "model_type", "dtype"),
    [
        ((8, 6), "llama", torch.bfloat16),
        ((7, 5), "llama", torch.float16),
        ((7, 5), "gemma2", torch.float32),
    ],
)
def test_cards_without_bf16(capability: tuple[int, int], model_type: str, dtype: torch.dtype) -> None:
    """fp16, or fp32 for families whose activations exceed its range; what a user sets is kept."""
    gpu = Gpu("RTX", 0, 11 * 2**30, 10 * 2**30, capability)
    files = open_model(builtin_path("target"), "bf16", [])
    config, notes = replace(files.config, model_type=model_type), list[Note]()
    wanted = opening.dtype_on("auto", gpu)
    assert opening.choose_dtype(wanted, "model", config, files.stored, notes) == dtype
    assert [note.advice for note in notes] == [dtype != torch.bfloat16]
    assert dtype == torch.bfloat16 or tells(
        notes[0].text, "bf16", "fp16", "fp32" if dtype == torch.float32 else "range"
    )
    assert opening.dtype_on("bf16", gpu) == "bf16"


def test_an_old_card_loads_in_fp16(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Target and draft."""
    monkeypatch.setattr(opening, "SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr("offspec.loading.dtype_on", lambda wanted, gpu: opening.AUTO_WITHOUT_BF16)
    with Engine.load("builtin", draft="builtin", device="cpu", context=256) as engine:
        assert engine.draft.decoder is not None
        assert engine.target.dtype == engine.draft.decoder.dtype == torch.float16
        assert len([note for note in engine.notes if note.advice and "dtype fp16" in note.text]) == 2


def test_a_dtype_that_does_not_exist(pair: Pair) -> None:
    with refused(UsageError, "int3"):
        load(pair.target, dtype="int3")


def test_threads(pair: Pair) -> None:
    before = torch.get_num_threads()
    try:
        Engine.load(str(pair.target), draft="none", threads=1)
        assert torch.get_num_threads() == 1
        with refused(UsageError, "threads", 0):
            Engine.load(str(pair.target), threads=0)
    finally:
        torch.set_num_threads(before)


def test_a_model_without_a_known_draft_says_so(pair: Pair) -> None:
    engine = Engine.load(str(pair.target), device="cpu")
    assert engine.draft.decoder is None
    assert [note.text for note in engine.notes if note.advice] == []  # nothing is predicted for a resident target
    assert any("no draft model was given" in note.text for note in engine.notes)
    assert steps(engine, max_new_tokens=4)[-1].stats.tokens_per_pass == 1


def test_a_revision_is_refused_where_there_is_no_hub(pair: Pair) -> None:
    for model in ("builtin", str(pair.target)):
        with refused(UsageError, "revision", "hub id"):
            Engine.load(model, revision="main")
