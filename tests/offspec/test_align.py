"""The draft learns from the target: the text stays, the guesses get better, and what is learnt is kept or refused whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.align import Aligner, AlignmentParams, Window, divergence, learning_bytes
from offspec.errors import StorageError, UsageError
from offspec.graphs import TreeGraphs
from offspec.lora import Adapter, Packed, adapted_shapes
from offspec.model import CachedDecoder, Decoder
from offspec.scheduler.params import MAX_ROWS

from ..fakes import TinyModel
from ..pair import VOCAB_SIZE, Pair, build_pair, scale_weights, variant

PROMPTS = ("def area(", "for item in", "return width")
FAST = AlignmentParams(learning_rate=0.3, most_share=1e9)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def engine(pair: Pair) -> Engine:
    return load(pair)


def load(pair: Pair, **options: object) -> Engine:
    return Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", dtype="fp32", **options)  # type: ignore[arg-type]


def say(engine: Engine, prompt: str, params: SamplingParams) -> tuple[list[int], int]:
    """Tokens and passes of a request, from which the draft learns afterwards."""
    steps = list(engine.generate(prompt, params, SpeculationParams(budget=8, lookup=False)))
    engine.learn(steps[-1].stats)
    return [token for step in steps for token in step.token_ids], steps[-1].stats.num_passes


def randomised(adapter: Adapter) -> Adapter:
    """With additions that are worth noticing."""
    torch.manual_seed(0)
    with torch.no_grad():
        for _, b in adapter.pairs.values():
            b.copy_(0.05 * torch.randn_like(b))
    return adapter


def weights_of(draft: Decoder) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in Adapter(draft, 1)._originals.items()}


# ------------------------------------------------------------------------------------------------ the text stays


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_the_same_while_the_draft_learns(pair: Pair, temperature: float) -> None:
    plain, learning = load(pair), load(pair, learn=True)
    learning.aligner = Aligner(learning.draft, FAST)  # type: ignore[arg-type]
    for seed, prompt in enumerate((*PROMPTS, *PROMPTS)):
        params = SamplingParams(30, temperature=temperature, seed=seed, ignore_eos=True)
        assert say(learning, prompt, params)[0] == say(plain, prompt, params)[0]
    assert learning.aligner.num_steps > 0


def test_a_learnt_draft_guesses_more(pair: Pair) -> None:
    """A target that its draft knows badly: on the very prompts that were learnt from, passes get fewer."""
    engine = load(pair)
    params = SamplingParams(40, temperature=0.5, seed=1, ignore_eos=True)
    before = sum(say(engine, prompt, params)[1] for prompt in PROMPTS)
    engine.aligner = Aligner(engine.draft, FAST)  # type: ignore[arg-type]
    losses = []
    for _ in range(6):
        for prompt in PROMPTS:
            *_, last = engine.generate(prompt, params)
            engine.learn(last.stats)
            losses.append(last.stats.learnt_loss)
    after = sum(say(engine, prompt, params)[1] for prompt in PROMPTS)
    assert losses[-1] < 0.5 * losses[0]  # type: ignore[operator]
    assert after < before


# ------------------------------------------------------------------------------------------------ one forward, two ways


@pytest.mark.parametrize("family", ["llama-biased", "llama-tied", "qwen2-window", "qwen3", "mistral-window"])
def test_the_differentiable_forward_is_the_decoders(family: str, tiny_model: Callable[[str], TinyModel]) -> None:
    """With additions beside the weights, over two texts packed together, as with merged ones over each text alone."""
    decoder = tiny_model(family).decoder()
    adapter = randomised(Adapter(decoder, 4))
    texts = [torch.arange(3, 14), torch.arange(40, 65)]
    trainee = adapter.trainee()
    text_of = torch.cat([torch.full_like(text, i) for i, text in enumerate(texts)])
    rows = Packed(trainee, text_of, torch.cat([torch.arange(len(text)) for text in texts]))
    found = trainee.head(trainee.hidden(torch.cat(texts), rows))
    plain = [decoder.forward(text, torch.arange(len(text)), decoder.new_cache()) for text in texts]
    without = torch.cat([decoder.logits(hidden) for hidden in plain])
    found.sum().backward()  # type: ignore[no-untyped-call]
    adapter.merge()
    wanted = [decoder.logits(decoder.forward(t, torch.arange(len(t)), decoder.new_cache())) for t in texts]
    torch.testing.assert_close(found.detach(), torch.cat(wanted), rtol=1e-4, atol=1e-4)
    assert (found - without).abs().max() > 1e-2
    assert all(parameter.grad is not None for parameter in adapter.parameters)


def test_the_loss_is_the_divergence_and_its_gradient_points_down(engine: Engine) -> None:
    aligner = Aligner(engine.draft, AlignmentParams(window_tokens=64))  # type: ignore[arg-type]
    randomised(aligner.adapter)
    logits = torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logs, choices = aligner.likeliest(logits)
    window = aligner.open([5, 6, 7])
    window.add([8, 9, 10, 11, 12], choices, logs)
    loss = aligner.loss([window])
    gradients = [parameter.grad for parameter in aligner.adapter.parameters]
    trainee = aligner.adapter.trainee()
    tokens = torch.tensor([5, 6, 7, 8, 9, 10, 11, 12])
    rows = Packed(trainee, torch.zeros(8, dtype=torch.long), torch.arange(8))
    said = trainee.head(trainee.hidden(tokens, rows))[2:7]
    direct = divergence(said, torch.from_numpy(choices).long(), torch.from_numpy(logs).float()).mean()
    assert loss == pytest.approx(float(direct.detach()), rel=1e-5)
    for parameter, found in zip(aligner.adapter.parameters, gradients, strict=True):
        (wanted,) = torch.autograd.grad(direct, parameter, retain_graph=True)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_step_learns_from_its_batch_alone(engine: Engine) -> None:
    """A loss that somebody looks at, as a benchmark does on what is held out, must not find its way into the next step."""
    logs, choices = np.full((4, 32), -3.0, dtype=np.float16), np.arange(128, dtype=np.int32).reshape(4, 32)
    after = []
    for looks in (False, True):
        aligner = Aligner(engine.draft, FAST)  # type: ignore[arg-type]
        windows = [aligner.open([5, 6]), aligner.open([60, 61])]
        for window in windows:
            window.add([window.tokens[0]] * 4, choices, logs)
        if looks:
            aligner.loss(windows[1:])
        aligner._step(windows[:1])
        after.append([parameter.detach().clone() for parameter in aligner.adapter.parameters])
    assert all(torch.equal(a, b) for a, b in zip(*after, strict=True))


def test_divergence_is_kl_with_the_others_as_one() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    q = logits[0].softmax(-1)
    wanted = sum(float(a * (a / b).log()) for a, b in ((p[1], q[1]), (p[0], q[0]), (p[2:].sum(), q[2:].sum())))
    found = divergence(logits, torch.tensor([[1, 0]]), p[[1, 0]].log()[None])
    assert float(found) == pytest.approx(wanted, rel=1e-5)
    assert float(divergence(logits, torch.arange(4)[None], q.log()[None])) == pytest.approx(0, abs=1e-5)


# ------------------------------------------------------------------------------------------------ what is taken down


def test_what_is_taken_down_is_what_the_target_thinks(engine: Engine) -> None:
    """Across windows: each place holds the distribution that a plain pass gives after the same tokens."""
    size = 24
    engine.aligner = aligner = Aligner(engine.draft, AlignmentParams(window_tokens=size, top_k=4))  # type: ignore[arg-type]
    prompt = engine.encode("def area(width")
    steps = list(engine.generate(prompt, SamplingParams(40, temperature=0.7, seed=1, ignore_eos=True)))
    text = prompt + [token for step in steps for token in step.token_ids]
    target = engine.target
    logits = target.logits(target.forward(torch.tensor(text), torch.arange(len(text)), target.new_cache()))
    wanted = logits.log_softmax(-1)
    seen = 0
    for window in aligner._windows:
        tokens = window.tokens[: window.num_tokens].tolist()
        start = next(i for i in range(len(text)) if text[i : i + size // 2] == tokens[: size // 2])
        for row in range(window.first, window.num_tokens - 1):
            if start + row + 1 >= len(text):  # what was accepted beyond the limit is no part of the text
                continue
            best = wanted[start + row].topk(4)
            assert set(window.choices[row].tolist()) == set(best.indices.tolist())
            np.testing.assert_allclose(window.logs[row], best.values, atol=2e-2)
            assert text[start + row + 1] == tokens[row + 1]
            seen += 1
    assert len(aligner._windows) > 1
    assert seen >= 40


def test_what_is_kept_is_bounded(engine: Engine) -> None:
    params = AlignmentParams(window_tokens=32, buffer_bytes=3 * 32 * (4 + 32 * 6))
    aligner = Aligner(engine.draft, params)  # type: ignore[arg-type]
    for number in range(10):
        aligner.open([number])
    kept = [int(window.tokens[0]) for window in aligner._windows]
    assert kept == [7, 8, 9]
    window = aligner._windows[0]
    arrays = (window.tokens, window.choices, window.logs)
    assert sum(array.nbytes for array in arrays) == Window.nbytes(params)


def test_learning_takes_its_share_of_the_time_and_no_more(engine: Engine) -> None:
    now = iter(range(1000))
    params = AlignmentParams(most_share=0.5, replays=1000)
    aligner = Aligner(engine.draft, params, clock=lambda: next(now))  # type: ignore[arg-type]
    engine.aligner = aligner
    list(engine.generate(PROMPTS[0], SamplingParams(20, seed=0)))
    # A step takes a second of this clock, and so does judging what is new, first of all. Four are granted, then none, then two.
    assert aligner.learn(8.0).num_steps == 3
    assert aligner.learn(0.0).num_steps == 0
    assert aligner.learn(4.0).num_steps == 1


def test_nothing_heard_nothing_learnt(engine: Engine) -> None:
    aligner = Aligner(engine.draft, FAST)  # type: ignore[arg-type]
    found = aligner.learn(10.0)
    assert (found.num_steps, found.loss) == (0, None)


# ------------------------------------------------------------------------------------------------ merging


def test_merging_never_drifts(engine: Engine) -> None:
    draft = engine.draft
    assert draft is not None
    adapter, came = Adapter(draft, 4), weights_of(draft)
    for _ in range(3):
        randomised(adapter).merge()
    changed = weights_of(draft)
    assert all(not torch.equal(changed[name], came[name]) for name in came)
    with torch.no_grad():
        for _, b in adapter.pairs.values():
            b.zero_()
    adapter.merge()
    assert all(torch.equal(weight, came[name]) for name, weight in weights_of(draft).items())


def test_rounds_that_were_recorded_see_what_was_merged(engine: Engine) -> None:
    """CUDA graphs hold addresses of weights: merging must change what lies there, not put something else in its place."""
    draft = engine.draft
    assert draft is not None
    graphs = TreeGraphs(draft, 64 + MAX_ROWS)
    tokens, depths, mask = np.array([7, 8]), np.array([1, 1]), np.eye(2, dtype=np.bool_)

    def score(model: CachedDecoder) -> Tensor:
        model.score([1, 2, 3], tokens[:0], depths[:0], mask[:0, :0])
        return model.score([], tokens, depths, mask).clone()

    before = score(graphs.text(64))
    randomised(Adapter(draft, 4)).merge()
    after = score(graphs.text(64))
    torch.testing.assert_close(after, score(CachedDecoder(draft, 64)), rtol=1e-4, atol=1e-4)
    assert (after - before).abs().max() > 1e-2


@pytest.mark.parametrize("moment", ["step", "merge"])
def test_left_in_the_middle_the_draft_is_as_it_was(
    engine: Engine, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.aligner = aligner = Aligner(engine.draft, FAST)  # type: ignore[arg-type]
    assert engine.draft is not None
    say(engine, PROMPTS[0], SamplingParams(20, seed=0))
    before = weights_of(engine.draft)
    list(engine.generate(PROMPTS[1], SamplingParams(60, seed=0, ignore_eos=True)))
    calls = 0

    def interrupted(*args: object) -> float:
        nonlocal calls
        calls += 1
        if calls == 2 or moment == "merge":
            with torch.no_grad():  # half of it is done when Ctrl-C comes
                next(iter(aligner.adapter._merged.values())).add_(1)
                aligner.adapter.parameters[0].add_(1)
            monkeypatch.undo()
            raise KeyboardInterrupt
        return 0.0

    monkeypatch.setattr(
        aligner if moment == "step" else aligner.adapter, f"_{moment}" if moment == "step" else moment, interrupted
    )
    with pytest.raises(KeyboardInterrupt):
        aligner.learn(1.0)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(engine.draft).items())


def test_what_is_not_finite_is_not_learnt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.aligner = aligner = Aligner(engine.draft, FAST)  # type: ignore[arg-type]
    assert engine.draft is not None
    before = weights_of(engine.draft)
    list(engine.generate(PROMPTS[0], SamplingParams(20, seed=0)))

    def overflow(batch: object) -> float:
        with torch.no_grad():
            aligner.adapter.parameters[0].fill_(torch.nan)
        return float("nan")

    monkeypatch.setattr(aligner, "_step", overflow)
    assert aligner.learn(1.0).num_steps == 0
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(engine.draft).items())


# ------------------------------------------------------------------------------------------------ files


def test_what_was_learnt_comes_back(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "learnt.safetensors"
    engine = load(pair, learn=True, learn_file=file)
    assert engine.aligner is not None
    assert engine.draft is not None
    randomised(engine.aligner.adapter).merge()
    engine.aligner.adapter.save(file)
    again = load(pair, learn_file=file)
    assert again.draft is not None
    wanted = weights_of(engine.draft)
    assert all(torch.equal(weight, wanted[name]) for name, weight in weights_of(again.draft).items())
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name]
    params = SamplingParams(20, seed=0)
    assert again.aligner is not None
    say(again, PROMPTS[0], params)
    assert again.aligner.num_steps == 0  # without --learn it is used, and nothing is learnt


def test_the_file_knows_the_draft_by_its_weights_and_shape(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "learnt.safetensors"
    Adapter(load(pair).draft, 4).save(file)  # type: ignore[arg-type]
    other = scale_weights(variant(pair.draft, tmp_path / "other"), {"model.layers.1.mlp.up_proj.weight": 1.01})
    slower = variant(pair.draft, tmp_path / "slower", rope_theta=20000.0)
    for folder in (other, slower):
        with pytest.raises(UsageError, match="another draft"):
            load(Pair(pair.target, folder), learn=True, learn_file=file)
    half = Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", dtype="bf16", learn_file=file)
    assert half.aligner is not None  # the same draft in other arithmetic


def test_a_damaged_file_is_refused(pair: Pair, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "learnt.safetensors"
    Adapter(load(pair).draft, 4).save(file)  # type: ignore[arg-type]
    with safe_open(file, framework="pt") as opened:
        about, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, file, about)
    with pytest.raises(UsageError, match="damaged"):
        load(pair, learn_file=file)
    save_file({**tensors, name: tensors[name] * torch.inf}, file, about)
    with pytest.raises(UsageError, match="not finite"):
        load(pair, learn_file=file)
    save_file(tensors, file, {**about, "version": "9"})
    with pytest.raises(UsageError, match="version 9"):
        load(pair, learn_file=file)
    save_file(tensors, file)
    with pytest.raises(UsageError, match="nothing that --learn wrote"):
        load(pair, learn_file=file)
    file.write_bytes(b"not safetensors")
    with pytest.raises(UsageError, match="safetensors"):
        load(pair, learn_file=file)


def test_what_cannot_be_written_is_refused_before_anything_is_loaded(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        load(pair, learn=True, learn_file=tmp_path / "nowhere" / "learnt.safetensors")
    with pytest.raises(StorageError, match="folder"):
        load(pair, learn=True, learn_file=tmp_path)
    with pytest.raises(UsageError, match="--learn"):
        load(pair, learn_file=tmp_path / "learnt.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("draft", ["none", "lookup"])
def test_without_a_draft_model_nothing_can_learn(pair: Pair, draft: str) -> None:
    with pytest.raises(UsageError, match="--draft"):
        Engine.load(str(pair.target), draft=draft, device="cpu", learn=True)


def test_planned_is_what_the_originals_and_the_additions_take(pair: Pair) -> None:
    plain, learning = load(pair), load(pair, learn=True)
    assert learning.draft is not None
    assert plain.plan is not None
    assert learning.plan is not None
    items = {item.name: item for item in learning.plan.placement.items}
    params = AlignmentParams()
    originals = sum(4 * rows * columns for rows, columns in adapted_shapes(learning.draft.config).values())
    assert items["learning"].on_device == learning_bytes(learning.draft.config, 4, params) > originals
    assert items["learning"].on_host == params.buffer_bytes
    assert "learning" not in {item.name for item in plain.plan.placement.items}


def test_a_copy_of_the_draft_elsewhere_is_the_same_draft(pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(pair.draft, tmp_path / "moved")
    config = json.loads((tmp_path / "moved" / "config.json").read_text())
    (tmp_path / "moved" / "config.json").write_text(json.dumps(config, indent=4))
    moved = load(Pair(pair.target, tmp_path / "moved"))
    assert Adapter(load(pair).draft, 1).fingerprint == Adapter(moved.draft, 1).fingerprint  # type: ignore[arg-type]
