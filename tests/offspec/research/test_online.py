"""The draft learns from the target: the text stays, the guesses get better, and what is learnt is kept
or refused whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.errors import StorageError, UsageError
from offspec.model.cuda_graphs import TreeGraphs
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.research.lora import Adapter, TreeRows, adapted_shapes, hidden_states
from offspec.research.online import Aligner, AlignmentParams, Listener, Window, divergence, learning_bytes
from offspec.scheduler.params import MAX_ROWS
from offspec.scheduler.trees.token_tree import ROOT, TokenTree
from offspec.scheduler.trees.verify import NoStates, TargetPass, Verdict

from ...fakes import TinyModel
from ...pair import VOCAB_SIZE, Pair, scale_weights, variant
from ...refusals import refused

PROMPTS = ("def area(", "for item in", "return width")
FAST = AlignmentParams(learning_rate=0.3, most_share=1e9)
TREE = TokenTree(  # 8 → (9 → (11 → 13, 12), 10 → 14), of which the target says 8 and 10
    tokens=np.array([8, 9, 10, 11, 12, 14, 13]),
    parents=np.array([ROOT, 0, 0, 1, 1, 2, 3]),
    depths=np.array([1, 2, 2, 3, 3, 3, 4]),
    scores=np.log([0.9, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1]),
)
VERDICT = Verdict([0, 2], [8, 10, 20])
NOTHING_DRAFTED = (np.empty(0, dtype=np.int64),) * 3


@pytest.fixture
def engine(pair: Pair) -> Iterator[Engine]:
    with load(pair) as engine:
        yield engine


def load(pair: Pair, **options: object) -> Engine:
    models: dict[str, Any] = {"draft": str(pair.draft), "device": "cpu", "dtype": "fp32", **options}
    return Engine.load(str(pair.target), **models)


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


def sayings(seed: int = 0) -> Tensor:
    """What a target might think after the root of TREE and after each node: logits [8, V]."""
    return torch.randn(1 + len(TREE), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def heard(aligner: Aligner, context: list[int], seed: int = 0) -> Window:
    """A window that has heard of TREE below a text."""
    listener = Listener(aligner, context, NoStates())
    listener.observe(TargetPass(context, TREE, VERDICT, sayings(seed)))
    return aligner.windows[-1]


def weights_of(draft: Decoder) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in Adapter(draft, 1).originals.items()}


# ------------------------------------------------------------------------------------------------ the text stays


@pytest.mark.slow
def test_text_is_the_same_while_the_draft_learns(pair: Pair) -> None:
    """That of another engine, which does not learn."""
    with load(pair, learn=True) as learning, load(pair) as other:
        learning.draft.aligner = Aligner(learning.draft.decoder, FAST)  # type: ignore[arg-type]
        for seed, prompt in enumerate(PROMPTS[:2]):
            params = SamplingParams(8, temperature=0.8, seed=seed, ignore_eos=True)
            plain = other.generate(prompt, params, SpeculationParams(0))
            expected = [token for step in plain for token in step.token_ids]
            assert say(learning, prompt, params)[0] == expected
        assert learning.aligner.num_steps > 0


@pytest.mark.slow
def test_a_learnt_draft_guesses_more(engine: Engine) -> None:
    """A target that its draft knows badly: on the very prompts that were learnt from, passes get fewer."""
    params = SamplingParams(20, temperature=0.5, seed=1, ignore_eos=True)
    prompts = PROMPTS[:2]
    before = sum(say(engine, prompt, params)[1] for prompt in prompts)
    engine.draft.aligner = Aligner(engine.draft.decoder, FAST)  # type: ignore[arg-type]
    losses = list[float]()
    for prompt in 4 * prompts:
        *_, last = engine.generate(prompt, params, SpeculationParams(16))  # a budget, so that no clock decides
        engine.learn(last.stats)
        assert last.stats.learnt_loss is not None
        losses.append(last.stats.learnt_loss)
        if len(losses) >= len(prompts) and losses[-1] < 0.5 * losses[0]:
            break
    after = sum(say(engine, prompt, params)[1] for prompt in prompts)
    assert losses[-1] < 0.5 * losses[0]
    assert after < before


# ------------------------------------------------------------------------------------------------ one forward, two ways


@pytest.mark.parametrize("family", ["llama-biased", "qwen2-window", "qwen3"])
def test_a_tree_at_once_is_each_of_its_paths_alone(family: str, tiny_model: Callable[[str], TinyModel]) -> None:
    """With additions beside the weights, over random trees below two texts, as
    with merged ones over each path by itself.
    """
    decoder, draws = tiny_model(family).decoder(), np.random.default_rng(0)
    adapter = randomised(Adapter(decoder, 4))
    parents = np.array([ROOT, *range(11), *(draws.integers(0, row) for row in range(12, 18))])
    parents = np.concatenate((parents, np.where(parents == ROOT, ROOT, parents + 18)))
    tokens = draws.integers(3, 60, size=36)
    trainee = adapter.trainee()
    found = trainee.head(trainee.normed(hidden_states(trainee, torch.from_numpy(tokens), TreeRows(trainee, parents))))
    found.sum().backward()  # type: ignore[no-untyped-call]

    def alone(row: int) -> Tensor:
        path = [row]
        while parents[path[0]] != ROOT:
            path.insert(0, parents[path[0]])
        hidden = decoder.forward(torch.from_numpy(tokens[path]), torch.arange(len(path)), decoder.new_cache())
        return decoder.logits(hidden[-1:])

    without = torch.cat([alone(row) for row in range(36)])
    adapter.merge()
    wanted = torch.cat([alone(row) for row in range(36)])
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-4, atol=1e-4)
    assert (found - without).abs().max() > 1e-2
    assert all(parameter.grad is not None for parameter in adapter.parameters)


@pytest.mark.slow
def test_the_loss_is_the_weighted_divergence_and_its_gradient_points_down(engine: Engine) -> None:
    """Over two windows, each path of a tree by itself."""
    params = AlignmentParams(window_tokens=64, reach_power=1.0, top_k=VOCAB_SIZE)
    aligner = Aligner(engine.draft.decoder, params)  # type: ignore[arg-type]
    randomised(aligner.adapter)
    contexts, paths = ([5, 6, 7], [30, 31]), ([], *(TREE.path(node) for node in range(len(TREE))))
    loss = aligner.loss([heard(aligner, context, seed) for seed, context in enumerate(contexts)])
    gradients = [parameter.grad for parameter in aligner.adapter.parameters]
    trainee, weighted, whole = aligner.adapter.trainee(), [], 0.0
    for seed, context in enumerate(contexts):
        logs, choices = aligner.likeliest(list(sayings(seed)))
        p = np.exp(np.take_along_axis(logs.astype(np.float32), choices.argsort(-1), -1))
        # The target says 8 and 10: there its guesses count 1, the others what it gives them from where they leave
        # these.
        nine = float(p[1, 9])
        weights = [1, 1, nine, 1, nine * float(p[2, 11]), nine * float(p[2, 12]), float(p[3, 14])]
        weights.append(weights[4] * float(p[4, 13]))
        for place, (path, weight) in enumerate(zip(paths, weights, strict=True)):
            tokens = torch.tensor([*context, *TREE.tokens[path]])
            rows = TreeRows(trainee, np.arange(len(tokens)) - 1)
            said = trainee.head(trainee.normed(hidden_states(trainee, tokens, rows)))[-1:]
            known = torch.from_numpy(choices[place : place + 1]).long(), torch.from_numpy(logs[place : place + 1])
            weighted.append(weight * divergence(said, known[0], known[1].float()).sum())
            whole += weight
    direct = torch.stack(weighted).sum() / whole
    assert loss == pytest.approx(float(direct.detach()), rel=1e-5)
    for found, wanted in zip(gradients, torch.autograd.grad(direct, aligner.adapter.parameters), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


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
    """Across windows: each place, of the text and of a guess,
    holds the distribution that a plain pass gives after its path.
    """
    size = 24
    settings = AlignmentParams(window_tokens=size, top_k=4)
    engine.draft.aligner = aligner = Aligner(engine.draft.decoder, settings)  # type: ignore[arg-type]
    prompt, target = engine.encode("def area(width"), engine.target
    params = SamplingParams(24, temperature=0.7, seed=1, ignore_eos=True)
    steps = list(engine.generate(prompt, params, SpeculationParams(16)))  # a budget, so that no clock decides
    text = prompt + [token for step in steps for token in step.token_ids]
    places, num_guesses = set[int](), 0
    for window in aligner.windows:
        walk = window.text()
        context = window.tokens[walk].tolist()
        start = next(i for i in range(len(text)) if text[i : i + size // 4] == context[: min(size // 4, len(text) - i)])
        for row in np.flatnonzero(window.weights).tolist():
            path = [row]
            while window.parents[path[0]] != ROOT:
                path.insert(0, int(window.parents[path[0]]))
            before = text[:start] + window.tokens[path].tolist()
            logits = target.logits(target.forward(torch.tensor(before), torch.arange(len(before)), target.new_cache()))
            best = logits[-1].log_softmax(-1).topk(4)
            assert set(window.choices[row].tolist()) == set(best.indices.tolist())
            np.testing.assert_allclose(window.logs[row], best.values, atol=2e-2)
            if row in walk:
                places.add(start + len(path))
                assert window.weights[row] == 1
            else:
                num_guesses += 1
                assert 0 < window.weights[row] <= 1
    assert places >= set(range(len(prompt), len(text)))
    assert len(aligner.windows) > 1
    assert num_guesses >= 5


@pytest.mark.each_value
@pytest.mark.parametrize("most_prompt", [3, 1000])
@pytest.mark.parametrize("num_held", [0, 30])
def test_what_the_target_thinks_along_the_prompt_is_taken_down(engine: Engine, most_prompt: int, num_held: int) -> None:
    """Of what was new to it, the end; each place once, in windows that begin with the text before."""
    params = AlignmentParams(window_tokens=16, most_prompt=most_prompt, most_guesses=0, top_k=VOCAB_SIZE)
    engine.draft.aligner = aligner = Aligner(engine.draft.decoder, params)  # type: ignore[arg-type]
    prompt = torch.randint(0, VOCAB_SIZE, (61,), generator=torch.Generator().manual_seed(0)).tolist()
    caches = engine.new_caches()
    if num_held:
        aligner.is_listening = False
        list(engine.generate(prompt[:num_held], SamplingParams(1, ignore_eos=True), caches=caches))
        aligner.is_listening = True
    steps = list(
        engine.generate(prompt, SamplingParams(3, ignore_eos=True), SpeculationParams(budget=0), caches=caches)
    )
    whole, num_new = prompt + [token for step in steps for token in step.token_ids], steps[0].stats.num_prefilled_tokens
    assert num_new == 61 - num_held
    logits = CachedDecoder(engine.target).score_rows(prompt, *NOTHING_DRAFTED).before(0, 60).log_softmax(-1)
    told = list[int]()
    for window in aligner.windows:
        text = window.tokens[window.text()].tolist()
        (at,) = (i for i in range(len(whole)) if whole[i : i + len(text)] == text)
        for row in np.flatnonzero(window.weights).tolist():
            if at + row < 60:
                told.append(at + row)
                said = torch.from_numpy(window.logs[row].astype(np.float32))
                torch.testing.assert_close(said, logits[at + row][window.choices[row]], atol=2e-2, rtol=1e-2)
    assert told == list(range(60 - min(most_prompt, num_new - 1), 60))
    *before, answer = aligner.windows
    assert len(answer.said()) == 3  # and this alone is judged by
    assert not any(len(window.said()) for window in before)


def test_what_is_kept_is_bounded(engine: Engine) -> None:
    params = AlignmentParams(window_tokens=32, buffer_bytes=3 * 32 * (12 + 32 * 6))
    aligner = Aligner(engine.draft.decoder, params)  # type: ignore[arg-type]
    for number in range(10):
        aligner.open([number])
    kept = [int(window.tokens[0]) for window in aligner.windows]
    assert kept == [7, 8, 9]
    window = aligner.windows[0]
    arrays = (window.tokens, window.parents, window.weights, window.choices, window.logs)
    assert sum(array.nbytes for array in arrays) == Window.nbytes(params)


def test_learning_takes_its_share_of_the_time_and_no_more(engine: Engine) -> None:
    now = iter(range(1000))
    params = AlignmentParams(most_share=0.5, replays=1000)
    aligner = Aligner(engine.draft.decoder, params, clock=lambda: next(now))  # type: ignore[arg-type]
    engine.draft.aligner = aligner
    list(engine.generate(PROMPTS[0], SamplingParams(20, seed=0)))
    # A step takes a second of this clock, and so does judging what is new, first of all. Four are allowed, then none,
    # then two.
    assert aligner.learn(8.0).num_steps == 3
    assert aligner.learn(0.0).num_steps == 0
    assert aligner.learn(4.0).num_steps == 1


# ------------------------------------------------------------------------------------------------ merging


def test_merging_never_drifts(engine: Engine) -> None:
    draft = engine.draft.decoder
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
    """CUDA graphs hold addresses of weights: merging must change what lies there,
    not put something else in its place.
    """
    draft = engine.draft.decoder
    assert draft is not None
    graphs = TreeGraphs(draft, 64 + MAX_ROWS)
    tokens, depths, parents = np.array([7, 8]), np.array([1, 1]), np.array([ROOT, ROOT])

    def score(model: CachedDecoder) -> Tensor:
        model.score([1, 2, 3], tokens[:0], depths[:0], parents[:0])
        return model.score([], tokens, depths, parents).clone()

    before = score(graphs.text(64))
    randomised(Adapter(draft, 4)).merge()
    after = score(graphs.text(64))
    torch.testing.assert_close(after, score(CachedDecoder(draft, 64)), rtol=1e-4, atol=1e-4)
    assert (after - before).abs().max() > 1e-2


@pytest.mark.parametrize("moment", ["step", "merge"])
def test_left_in_the_middle_the_draft_is_as_it_was(
    engine: Engine, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.draft.aligner = aligner = Aligner(engine.draft.decoder, FAST)  # type: ignore[arg-type]
    assert engine.draft.decoder is not None
    say(engine, PROMPTS[0], SamplingParams(8, seed=0))
    before = weights_of(engine.draft.decoder)
    list(engine.generate(PROMPTS[1], SamplingParams(8, seed=0, ignore_eos=True)))
    calls = 0

    def interrupted(*args: object) -> float:
        nonlocal calls
        calls += 1
        if calls == 2 or moment == "merge":
            with torch.no_grad():  # half of it is done when Ctrl-C comes
                next(iter(aligner.adapter.merged.values())).add_(1)
                aligner.adapter.parameters[0].add_(1)
            monkeypatch.undo()
            raise KeyboardInterrupt
        return 0.0

    monkeypatch.setattr(aligner if moment == "step" else aligner.adapter, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        aligner.learn(1.0)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(engine.draft.decoder).items())


def test_what_is_not_finite_is_not_learnt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.draft.aligner = aligner = Aligner(engine.draft.decoder, FAST)  # type: ignore[arg-type]
    assert engine.draft.decoder is not None
    before = weights_of(engine.draft.decoder)
    list(engine.generate(PROMPTS[0], SamplingParams(20, seed=0)))

    def overflow(batch: object) -> float:
        with torch.no_grad():
            aligner.adapter.parameters[0].fill_(torch.nan)
        return float("nan")

    monkeypatch.setattr(aligner, "step", overflow)
    assert aligner.learn(1.0).num_steps == 0
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(engine.draft.decoder).items())


# ------------------------------------------------------------------------------------------------ files


def test_what_was_learnt_comes_back(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "learnt.safetensors"
    with load(pair, learn=True, learn_file=file) as engine:
        assert engine.aligner is not None
        assert engine.draft.decoder is not None
        randomised(engine.aligner.adapter).merge()
        engine.aligner.adapter.save(file)
        wanted = weights_of(engine.draft.decoder)
    with load(pair, learn_file=file) as again:
        assert again.draft.decoder is not None
        assert all(torch.equal(weight, wanted[name]) for name, weight in weights_of(again.draft.decoder).items())
        assert [entry.name for entry in tmp_path.iterdir()] == [file.name]
        assert again.aligner is not None
        say(again, PROMPTS[0], SamplingParams(6, seed=0))
        assert again.aligner.num_steps == 0  # without --learn it is used, and nothing is learnt


def test_the_file_knows_the_draft_by_its_weights_and_shape(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "learnt.safetensors"
    Adapter(load(pair).draft.decoder, 4).save(file)  # type: ignore[arg-type]
    other = scale_weights(variant(pair.draft, tmp_path / "other"), {"model.layers.1.mlp.up_proj.weight": 1.01})
    slower = variant(pair.draft, tmp_path / "slower", rope_theta=20000.0)
    for folder in (other, slower):
        with refused(UsageError, file, "another draft"):
            load(Pair(pair.target, folder), learn=True, learn_file=file)
    half = Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", dtype="bf16", learn_file=file)
    assert half.aligner is not None  # the same draft in other arithmetic


def test_a_damaged_file_is_refused(pair: Pair, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "learnt.safetensors"
    Adapter(load(pair).draft.decoder, 4).save(file)  # type: ignore[arg-type]
    with safe_open(file, framework="pt") as opened:
        about, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, file, about)
    with refused(UsageError, file, "damaged"):
        load(pair, learn_file=file)
    save_file(tensors, file, {**about, "version": "9"})
    with refused(UsageError, file, "version 9"):
        load(pair, learn_file=file)
    file.write_bytes(b"not safetensors")
    with refused(UsageError, file, "safetensors"):
        load(pair, learn_file=file)


def test_what_cannot_be_written_is_refused_before_anything_is_loaded(pair: Pair, tmp_path: Path) -> None:
    with refused(StorageError, tmp_path / "nowhere" / "learnt.safetensors", "No such file"):
        load(pair, learn=True, learn_file=tmp_path / "nowhere" / "learnt.safetensors")
    with refused(StorageError, tmp_path, "folder"):
        load(pair, learn=True, learn_file=tmp_path)
    with refused(UsageError, tmp_path / "learnt.safetensors", "`learn`"):
        load(pair, learn_file=tmp_path / "learnt.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("draft", ["none", "lookup"])
def test_without_a_draft_model_nothing_can_learn(pair: Pair, draft: str) -> None:
    with refused(UsageError, "draft model", "`draft=PATH`"):
        Engine.load(str(pair.target), draft=draft, device="cpu", learn=True)


def test_planned_is_what_the_originals_and_the_additions_take(pair: Pair) -> None:
    plain, learning = load(pair), load(pair, learn=True)
    assert learning.draft.decoder is not None
    assert plain.plan is not None
    assert learning.plan is not None
    items = {item.name: item for item in learning.plan.placement.items}
    params = AlignmentParams()
    originals = sum(4 * rows * columns for rows, columns in adapted_shapes(learning.draft.decoder.config).values())
    assert items["learning"].on_device == learning_bytes(learning.draft.decoder.config, 4, params) > originals
    assert items["learning"].on_host == params.buffer_bytes
    assert "learning" not in {item.name for item in plain.plan.placement.items}
