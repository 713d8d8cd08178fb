"""What heads that are trained see, where they begin, and what they learn beside the target's likeliest tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from offspec.model.block import PassRows
from offspec.model.heads.head import Advanced, Inputs
from offspec.model.heads.text import HeadText
from offspec.model.pass_rows import CHUNK_ROWS
from offspec.research.distillation import Teacher
from offspec.research.head_structures import structure_of
from offspec.research.heads import HeadStudent

from ...fakes import FAMILIES, build
from ..model.heads.test_kinds_of_head import told
from .test_heads import batch_of


@pytest.mark.parametrize(
    ("kind", "sees_path"), [("clover", True), ("clover2", True), ("amphista", False), ("medusa", False)]
)
def test_which_tokens_a_head_sees(kind: str, sees_path: bool, teacher: Teacher) -> None:
    """All but Medusa see the text's last token; the path's tokens only those that go from token to token."""
    student = HeadStudent(structure_of(kind)(teacher.target, 0), teacher.target)
    with torch.no_grad():
        for part in student.parts.values():
            part.add_(0.1 * torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
    text, empty = HeadText(student.head), np.empty(0, dtype=np.int64)

    def after(root: int, token: int) -> torch.Tensor:
        text.truncate(0)
        text.feed(told([5, 6], torch.ones(2, student.width), (), [], [root]))
        text.states([root], empty, empty, empty)
        text.states([], np.array([token]), np.array([1]), np.array([-1]))
        return text.states([], np.array([9]), np.array([2]), np.array([-1, 0]))

    assert torch.equal(after(7, 20), after(7, 20))
    assert torch.equal(after(7, 20), after(7, 21)) == (not sees_path)
    assert torch.equal(after(7, 20), after(8, 20)) == (kind == "medusa")


@pytest.mark.parametrize("kind", ["clover", "fspad"])
def test_a_long_prompt_is_read_in_parts(kind: str, teacher: Teacher) -> None:
    """No computation has more than CHUNK_ROWS rows; waiting rows hold the target's states, and no room for a path."""
    head = HeadStudent(structure_of(kind)(teacher.target, 0), teacher.target).head
    count, hidden, computed = 2 * CHUNK_ROWS + 5, head.target.config.hidden_size, list[torch.Size]()
    words = np.random.default_rng(0).integers(5, 200, count + 1).tolist()
    states = torch.randn(count, hidden, generator=torch.Generator().manual_seed(0))
    empty = np.empty(0, dtype=np.int64)

    def states_of(parts: list[int]) -> torch.Tensor:
        """After the text's last token, if the head is told of the text in such parts."""
        text, end = HeadText(head), 0
        for part in parts:
            end += part
            text.feed(told(words[:end], states[end - part : end], (), [], words[end : end + 1]))
            found = text.states(words[end : end + 1], empty, empty, empty)
        return found

    def watched(inputs: Inputs, rows: PassRows) -> Advanced:
        computed.append(inputs.features.shape)
        return advance(inputs, rows)

    advance = head.advance
    expected = states_of([300, 300, 300, count - 900])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "advance", watched)
        torch.testing.assert_close(states_of([count]), expected, atol=1e-4, rtol=1e-4)
    assert computed
    assert all(rows <= CHUNK_ROWS and width == hidden for rows, width in computed)


def test_medusa_begins_as_the_targets_head(tmp_path: Path) -> None:
    """Also where the target scales its logits."""
    target = build(FAMILIES["granite"], tmp_path).decoder()
    head = HeadStudent(structure_of("medusa")(target, 0), target).head
    states = torch.randn(3, target.config.hidden_size)
    with torch.no_grad():
        made = head.advance(Inputs(states, np.zeros(3, dtype=np.int64), np.arange(3)), None)  # type: ignore[arg-type]
        torch.testing.assert_close(head.head(made.states), target.head(states))


@pytest.mark.parametrize("kind", ["clover2", "fspad"])
def test_the_distance_from_the_targets_states_counts(kind: str, teacher: Teacher) -> None:
    """Of the head's states or features at each place ahead, from the target's final state there; less from step to
    step.
    """
    beginning = structure_of(kind)(teacher.target, 0)
    batch, losses = batch_of(teacher, ()), list[torch.Tensor]()
    with torch.no_grad():
        final = teacher.target.normed(batch["hidden"])
        for more_loss in (beginning.more_loss, None):
            student = HeadStudent(replace(beginning, more_loss=more_loss), teacher.target)
            losses.append(student._loss(batch))
        distances = list[torch.Tensor]()
        for step, (made, _) in enumerate(student.unrolled(batch)):
            found = made.features if kind == "fspad" else made.states
            distances.append(torch.nn.functional.smooth_l1_loss(found, final[:, 1 + step :].flatten(0, 1)))
    weights = [0.8**step for step in range(len(distances))]
    wanted = 10 * sum(w * each for w, each in zip(weights, distances, strict=True)) / sum(weights)
    torch.testing.assert_close(losses[0] - losses[1], wanted, atol=1e-4, rtol=1e-4)
