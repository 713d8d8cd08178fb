"""What a kind of draft is told after a pass, as one value: logits, final states, states of layers, the verdict."""

from __future__ import annotations

import torch

from offspec import Engine, SamplingParams
from offspec.drafts.base import Listener
from offspec.drafts.model_draft import ModelDraft
from offspec.scheduler.trees.verify import TargetPass

PARAMS = SamplingParams(12, temperature=0.8, seed=3, ignore_eos=True)


class Curious(ModelDraft):
    """The built-in draft, which asks for the states after two of the target's layers, as a trained head would."""

    target_layers = (1, 4)

    def __init__(self, plain: ModelDraft) -> None:
        super().__init__(plain.decoder, "curious")
        self.told: list[TargetPass] = []
        self.texts: list[list[int]] = []

    def new_listener(self) -> Listener:
        def listen(done: TargetPass) -> None:
            self.told.append(done)
            self.texts.append(list(done.text))

        return listen


def test_every_pass_is_told_with_all_that_the_target_made_of_it() -> None:
    engine = Engine.load("builtin", device="cpu", dtype="fp32", context=512)
    assert isinstance(engine.draft, ModelDraft)
    draft = Curious(engine.draft)
    curious = engine.with_draft(draft)
    expected = [token for step in engine.generate("def area(", PARAMS) for token in step.token_ids]
    steps = list(curious.generate("def area(", PARAMS))
    assert [token for step in steps for token in step.token_ids] == expected, "listening moves no text"
    assert len(draft.told) == len(steps)
    said = list(engine.encode("def area("))
    for text, done in zip(draft.texts, draft.told, strict=True):
        assert text == said
        said += done.verdict.tokens
        num_rows = 1 + len(done.tree)
        hidden = engine.target.config.hidden_size
        assert done.states.states([0, num_rows - 1]).shape == (2, hidden)
        torch.testing.assert_close(engine.target.head(done.states.states([0]))[0], done.logits[0], rtol=1e-4, atol=1e-4)
        assert set(done.states.layer_states) == set(draft.target_layers)
        for states in done.states.layer_states.values():
            assert states.shape == (done.states.num_before + num_rows, hidden)
    assert draft.told[0].states.num_before == len(engine.encode("def area(")) - 1
    draft.told.clear()
    draft.target_layers = ()  # type: ignore[assignment]
    list(engine.with_draft(draft).generate("def area(", PARAMS))
    assert all(not done.states.layer_states for done in draft.told), "a draft that asks for no layer is given none"
    engine.close()
