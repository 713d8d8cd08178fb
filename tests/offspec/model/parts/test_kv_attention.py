"""Masks against the ancestor relation, entry by entry, and attention against its formula."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offspec.model.parts.kv_attention import Visibility, attend, attend_by_parts
from offspec.model.parts.split_attention import KeyPart
from offspec.process import disable_cudnn_attention

from ....examples import examples


@dataclass(frozen=True)
class Pass:
    """A pass behind `committed` tokens: earlier pending nodes, a chain, new nodes. parents: -1 is the text's end."""

    committed: int
    earlier: int
    chain: int
    parents: list[int]  # of all nodes, the earlier ones first
    window: int | None

    def path(self, node: int) -> list[int]:
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    @property
    def start(self) -> int:
        return self.committed + self.earlier

    @property
    def key_positions(self) -> list[int]:
        text = self.committed + self.chain
        depths = [text - 1 + len(self.path(node)) for node in range(len(self.parents))]
        return [*range(text), *depths]

    def visibility(self) -> Visibility:
        positions = torch.tensor(self.key_positions)
        spare = positions.new_full((3,), 9999)  # slots that nothing has been written to
        return Visibility(
            start=self.start,
            positions=positions[self.start :],
            key_positions=torch.cat((positions, spare)),
            parents=np.array(self.parents, dtype=np.int64),
            num_nodes=len(self.parents) - self.earlier,
        )

    def sees(self, row: int, key: int) -> bool:
        """The definition, for slots: the text is seen by all that follows it, a node by its descendants and itself."""
        text = self.committed + self.chain
        near = self.window is None or self.key_positions[row] - self.key_positions[key] < self.window
        if key < text:
            return near and key <= row
        return near and row >= text and key - text in self.path(row - text)


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    committed, chain = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    num_nodes = draw(st.integers(0 if chain else 1, 8))
    parents = [draw(st.integers(-1, node - 1)) for node in range(num_nodes)]
    earlier = 0 if chain else draw(st.integers(0, num_nodes - 1))
    return Pass(committed, earlier, chain, parents, draw(st.none() | st.integers(1, 9)))


@given(passes(), st.data())
@examples(300)
def test_mask_is_the_ancestor_relation(p: Pass, data: st.DataObject) -> None:
    num_rows = len(p.key_positions) - p.start
    first = data.draw(st.integers(0, num_rows - 1), label="first")
    last = data.draw(st.integers(first + 1, num_rows), label="last")
    expected = [[p.sees(p.start + row, key) for key in range(p.start + last)] for row in range(first, last)]
    mask = p.visibility().mask(first, last, p.window)
    assert (torch.ones(last - first, p.start + last).bool() if mask is None else mask).tolist() == expected
    assert all(any(row) for row in expected), "softmax over nothing is NaN"


@given(passes(), st.integers(1, 5), st.data())
@examples(300)
def test_ranges_are_the_mask_in_parts(p: Pass, most: int, data: st.DataObject) -> None:
    """Each visible key is in one part, and only visible ones are without a mask."""
    num_rows = len(p.key_positions) - p.start
    first = data.draw(st.integers(0, num_rows - 1), label="first")
    last = data.draw(st.integers(first + 1, num_rows), label="last")
    found = torch.zeros(last - first, p.start + last, dtype=torch.long)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offspec.model.parts.kv_attention.MASKED_KEYS", 3)
        ranges = p.visibility().ranges(first, last, p.window)
    for part in (part for whole in ranges for part in whole.split(most)):
        assert 0 < part.end - part.first <= most
        found[:, part.first : part.end] += 1 if part.mask is None else part.mask.long()
    expected = [[int(p.sees(p.start + row, key)) for key in range(p.start + last)] for row in range(first, last)]
    assert found.tolist() == expected


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_parts_attend_as_the_whole_does(
    heads: int, kv_heads: int, cap: float | None, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a row has no key in a part: the first one, one between, and all but the last."""
    if not is_fused:
        monkeypatch.setattr("offspec.model.parts.split_attention.CPU_FLASH", "absent")
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(5, heads, 8, generator=generator)
    keys, values = torch.randn(2, kv_heads, 40, 8, generator=generator)
    mask = torch.rand(5, 40, generator=generator) < 0.5
    mask[0, :13], mask[1, 13:26], mask[2, :26] = False, False, False
    mask[:, 30:] = True
    cuts = [(0, 13), (13, 26), (26, 40)]
    parts = [KeyPart(keys[:, a:b], values[:, a:b], mask[:, a:b]) for a, b in cuts]
    expected = attend(queries, keys, values, mask, scale=0.7, cap=cap)
    torch.testing.assert_close(attend_by_parts(queries, parts, scale=0.7, cap=cap), expected, rtol=0, atol=2e-6)
    parts = [KeyPart(keys[:, a:b], values[:, a:b], None) for a, b in cuts]
    expected = attend(queries, keys, values, None, cap=cap)
    torch.testing.assert_close(attend_by_parts(queries, parts, cap=cap), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("is_masked", [True, False])
def test_sinks_are_keys_without_values(is_masked: bool) -> None:
    """Whole and by parts, and with gradients, which operators do not give."""
    generator = torch.Generator().manual_seed(0)
    queries, sinks = torch.randn(5, 6, 8, generator=generator), torch.linspace(-2, 2, 6)
    keys, values = torch.randn(2, 2, 40, 8, generator=generator)
    mask = torch.rand(5, 40, generator=generator) < 0.5 if is_masked else torch.ones(5, 40, dtype=torch.bool)
    scores = torch.einsum("thd,hsd->hts", queries, keys.repeat_interleave(3, 0)) * 0.7
    scores = torch.cat((scores.masked_fill(~mask, -torch.inf), sinks.view(-1, 1, 1).expand(-1, 5, 1)), -1)
    expected = torch.einsum("hts,hsd->thd", scores.softmax(-1)[..., :-1], values.repeat_interleave(3, 0))
    given = mask if is_masked else None
    parts = [KeyPart(keys[:, a:b], values[:, a:b], mask[:, a:b] if is_masked else None) for a, b in ((0, 13), (13, 40))]
    for found in (
        attend(queries, keys, values, given, scale=0.7, sinks=sinks),
        attend_by_parts(queries, parts, scale=0.7, sinks=sinks),
        attend(queries.requires_grad_(), keys, values, given, scale=0.7, sinks=sinks),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    (gradient,) = torch.autograd.grad(found.square().sum(), queries)
    moved = torch.zeros_like(queries)
    moved[2, 3, 1] = 1e-3
    ends = [attend((queries + step * moved).detach(), keys, values, given, scale=0.7, sinks=sinks) for step in (1, -1)]
    slope = (ends[0].square().sum() - ends[1].square().sum()) / 2e-3
    torch.testing.assert_close(gradient[2, 3, 1], slope, rtol=1e-2, atol=1e-3)


def naive_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k / sqrt(d)) v, one head at a time, keys and values repeated as the GQA paper draws it (2305.13245)."""
    group = queries.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
    heads = []
    for head in range(queries.shape[1]):
        scores = queries[:, head] @ keys[head].T / queries.shape[2] ** 0.5
        heads.append(scores.masked_fill(~mask, -torch.inf).softmax(dim=-1) @ values[head])
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_is_its_formula(heads: int, kv_heads: int, num_rows: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(heads * 100 + kv_heads)
    queries = torch.randn(num_rows, heads, 8, generator=generator)
    keys, values = torch.randn(2, kv_heads, 20, 8, generator=generator)[:, :, :11]  # a part of a longer cache
    mask = torch.rand(num_rows, 11, generator=generator) < 0.5
    mask[:, 3] = True
    out = attend(queries, keys, values, mask if masked else None)
    expected = naive_attention(queries, keys, values, mask if masked else torch.ones_like(mask))
    assert out.shape == (num_rows, heads, 8)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("most_scores", [1, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3)])
@pytest.mark.parametrize("is_masked", [False, True])
def test_capped_attention_is_its_formula(
    heads: int, kv_heads: int, is_masked: bool, most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether one head's scores fit, or those of several."""
    monkeypatch.setattr("offspec.model.parts.kv_attention.CAPPED_SCORES", most_scores)
    generator = torch.Generator().manual_seed(0)
    queries = 3 * torch.randn(5, heads, 8, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, kv_heads, 20, 8, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 20, generator=generator) < 0.5
    mask[:, 0] = True
    found = attend(queries, keys, values, mask if is_masked else None, scale=0.7, cap=1.5)
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = 1.5 * torch.tanh(0.7 * queries[:, head] @ keys[shared].T / 1.5)
        if is_masked:
            scores[~mask] = -torch.inf
        torch.testing.assert_close(found[:, head], scores.softmax(-1) @ values[shared], rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_keys"), [(1, 33), (7, 65), (64, 1025), (256, 700)])
def test_cuda_attends_as_the_cpu_does(num_rows: int, num_keys: int, dtype: torch.dtype) -> None:
    """Also where rows and keys are no multiples of what kernels like, and a text grows by one."""
    device, generator = torch.device("cuda:0"), torch.Generator().manual_seed(0)
    disable_cudnn_attention()
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    queries = torch.randn(num_rows, 16, 128, generator=generator)
    cached = torch.randn(2, 4, 2048, 128, generator=generator)
    mask = torch.rand(num_rows, num_keys, generator=generator) < 0.5
    mask[:, 0] = True
    tolerance = 1e-4 if dtype == torch.float32 else 0.06
    for seen in (mask, None):
        expected = attend(queries, cached[0, :, :num_keys], cached[1, :, :num_keys], seen)
        on_device = [tensor.to(device, dtype) for tensor in (queries, cached)]
        keys, values = on_device[1][:, :, :num_keys].unbind()
        found = attend(on_device[0], keys, values, seen if seen is None else seen.to(device))
        torch.testing.assert_close(found.float().cpu(), expected, rtol=0, atol=tolerance)
