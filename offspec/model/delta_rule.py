"""The gated delta rule over a tree of rows: a linear-attention layer's recurrence without a state per row.

A state S [heads, Dk, Dv] maps keys to values. Each row first decays it, then corrects what it says for the row's key:

    S_r = exp(g_r) S_p + k_r u_r^T,    u_r = beta_r (v_r - exp(g_r) S_p^T k_r),    p: the row's parent
    o_r = S_r^T q_r

(Gated Delta Networks, 2412.06464). Unrolled along the path from the root, whose state is S_0, with D_r the sum of g on
the path to r:

    u_r + beta_r sum over strict ancestors a of exp(D_r - D_a) (k_a . k_r) u_a = beta_r (v_r - exp(D_r) S_0^T k_r)
    o_r = exp(D_r) S_0^T q_r + sum over ancestors a, and r, of exp(D_r - D_a) (k_a . q_r) u_a

Parents come before children, so the updates u of all rows solve a triangular system whose entries outside of ancestors
are zero: a chain and a tree differ in the mask alone. The state after any path follows from its rows' k, u and D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64  # rows of a chain for which one triangular system is solved; its cost grows with their square


@dataclass(frozen=True)
class DeltaInputs:
    """What R rows bring to the rule, in fp32.

    queries, keys [R, key heads, Dk]: both normalised, and queries scaled. values [R, heads, Dv]. decays [R, heads]: g,
    at most 0. rates [R, heads]: beta. Each key head serves heads / key heads consecutive heads.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor
    rates: Tensor

    def __len__(self) -> int:
        return len(self.keys)

    def slice(self, first: int, last: int) -> DeltaInputs:
        """Rows first .. last."""
        return DeltaInputs(*(each[first:last] for each in vars(self).values()))


@dataclass(frozen=True)
class DeltaRows:
    """Rows below a root, from which the state after any of them follows.

    keys [R, key heads, Dk]. updates [R, heads, Dv]: u. decays [R, heads]: D, from the root to the row.
    """

    keys: Tensor
    updates: Tensor
    decays: Tensor

    @classmethod
    def none(cls, inputs: DeltaInputs) -> DeltaRows:
        """No rows, of the shapes that `inputs` has."""
        return cls(inputs.keys[:0], inputs.values[:0], inputs.decays[:0])

    def __len__(self) -> int:
        return len(self.keys)

    def at(self, rows: Tensor | Sequence[int] | slice) -> DeltaRows:
        """Some of the rows, in the given order."""
        return DeltaRows(self.keys[rows], self.updates[rows], self.decays[rows])

    def with_more(self, others: DeltaRows) -> DeltaRows:
        """These rows, and others behind them."""
        return DeltaRows(
            torch.cat((self.keys, others.keys)),
            torch.cat((self.updates, others.updates)),
            torch.cat((self.decays, others.decays)),
        )


def tree_step(
    state: Tensor, inputs: DeltaInputs, ancestors: Tensor, earlier: DeltaRows | None = None
) -> tuple[Tensor, DeltaRows]:
    """Outputs [R, heads, Dv] of R rows of a tree, and the rows for `state_after`; the state stays the root's.

    state [heads, Dk, Dv]: the root's, in fp32. ancestors: bool [R, P + R]; which of the `earlier` P rows and of the R
    rows are on the path to each row, itself among them. A row's ancestors precede it.
    """
    before = DeltaRows.none(inputs) if earlier is None else earlier
    num_before, group = len(before), inputs.values.shape[1] // inputs.keys.shape[1]
    is_above = ancestors.clone()
    is_above[:, num_before:].fill_diagonal_(False)
    decays = torch.cat((before.decays, inputs.decays))
    # A row's D is the sum of its ancestors' g; those of earlier rows are in the D of the last of them on its path.
    totals = ancestors[:, num_before:].to(decays) @ inputs.decays
    if num_before:
        totals = totals + _of_last(before.decays, ancestors[:, :num_before])
    decays[num_before:] = totals
    keys = torch.cat((before.keys, inputs.keys))
    factors = _decay_factors(totals, decays, ancestors)
    from_keys = _products(inputs.keys, keys, group) * factors
    from_queries = _products(inputs.queries, keys, group) * factors
    from_keys = from_keys.masked_fill(~is_above, 0.0) * inputs.rates.t()[..., None]
    reach = totals.exp().t()[..., None]  # [heads, R, 1]
    root_values = reach * _through(state, inputs.keys, group)
    wanted = inputs.rates.t()[..., None] * (inputs.values.transpose(0, 1) - root_values)
    known = before.updates.transpose(0, 1)  # [heads, P, Dv]
    if num_before:
        wanted = wanted - from_keys[..., :num_before] @ known
    updates = torch.linalg.solve_triangular(from_keys[..., num_before:], wanted, upper=False, unitriangular=True)
    outputs = reach * _through(state, inputs.queries, group) + from_queries @ torch.cat((known, updates), dim=1)
    return outputs.transpose(0, 1), DeltaRows(inputs.keys, updates.transpose(0, 1), totals)


def chain_step(state: Tensor, inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Outputs [R, heads, Dv] of R rows, each the parent of the next, and the state after the last."""
    outputs = torch.empty_like(inputs.values)
    for first in range(0, len(inputs), CHUNK):
        some = inputs.slice(first, first + CHUNK)
        mask = torch.ones(len(some), len(some), dtype=torch.bool, device=state.device).tril()
        outputs[first : first + CHUNK], rows = tree_step(state, some, mask)
        state = state_after(state, rows)
    return outputs, state


def state_after(state: Tensor, path: DeltaRows) -> Tensor:
    """The state [heads, Dk, Dv] after the rows of a path from the root, whose state is given."""
    if not len(path):
        return state
    last = path.decays[-1]
    group = path.updates.shape[1] // path.keys.shape[1]
    weighted = path.updates * (last - path.decays).exp()[..., None]
    keys = path.keys.permute(1, 2, 0).repeat_interleave(group, 0)  # [heads, Dk, rows]
    return state * last.exp()[:, None, None] + keys @ weighted.transpose(0, 1)


def _of_last(decays: Tensor, is_above: Tensor) -> Tensor:
    """[R, heads]: D of the last row that is above each of R rows by bool [R, P]; 0 without any."""
    place = torch.arange(1, is_above.shape[1] + 1, device=is_above.device)
    last = (is_above * place).amax(1)
    return torch.cat((torch.zeros_like(decays[:1]), decays))[last]


def _decay_factors(row_totals: Tensor, totals: Tensor, ancestors: Tensor) -> Tensor:
    """exp(D_r - D_a) [heads, R, P + R] where a is an ancestor of r or r itself, else 0."""
    exponents = row_totals.t()[..., None] - totals.t()[:, None, :]
    return exponents.masked_fill(~ancestors, float("-inf")).exp()


def _products(rows: Tensor, keys: Tensor, group: int) -> Tensor:
    """Inner products [heads, R, P + R] of rows [R, key heads, Dk] with keys [P + R, key heads, Dk]."""
    return (rows.transpose(0, 1) @ keys.permute(1, 2, 0)).repeat_interleave(group, 0)


def _through(state: Tensor, rows: Tensor, group: int) -> Tensor:
    """State^T times rows [R, key heads, Dk]: [heads, R, Dv]."""
    return rows.transpose(0, 1).repeat_interleave(group, 0) @ state
