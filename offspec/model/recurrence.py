"""Linear recurrences over a tree of rows, without a state per row: the gated delta rule, and Mamba2's sum.

A state S [heads, Dk, Dv] maps keys to values. Each row decays it and adds its update u at its key:

    S_r = exp(g_r) S_p + k_r u_r^T,    o_r = S_r^T q_r,    p: the row's parent

Mamba2 (2405.21060) has k = B, q = C, u = dt x and g = dt A, and adds D x to a row's output. The gated delta rule
(2412.06464) corrects what the state says for the key: u_r = beta_r (v_r - exp(g_r) S_p^T k_r). Unrolled along the path
from the root, whose state is S_0, with D_r the sum of g on the path to r:

    o_r = exp(D_r) S_0^T q_r + sum over ancestors a, and r, of exp(D_r - D_a) (k_a . q_r) u_a
    u_r + beta_r sum over strict ancestors a of exp(D_r - D_a) (k_a . k_r) u_a = beta_r (v_r - exp(D_r) S_0^T k_r)

Parents come before children, so the second line is a triangular system whose entries outside of ancestors are zero. A
chain and a tree differ in the mask alone. The state after any path follows from its rows' k, u and D.

Here these are products of many rows, for GPUs, for training, and for CPUs without kernels. `ordered_recurrence` has
kernels for other CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64  # rows of a chain that are computed at once; products and the system grow with their square
ROOT = -1  # in place of a parent


@dataclass(frozen=True)
class PathRows:
    """Rows below a root, from which the state after any of them follows. All in fp32.

    keys [R, key heads, Dk]. updates [R, heads, Dv]: u. decays [R, heads]: D, from the root to the row, itself too. Each
    key head serves heads / key heads consecutive heads.
    """

    keys: Tensor
    updates: Tensor
    decays: Tensor

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def group(self) -> int:
        """Heads per key head."""
        return self.updates.shape[1] // self.keys.shape[1]

    def at(self, rows: Tensor | Sequence[int] | slice) -> PathRows:
        """Some of the rows, in the given order."""
        return type(self)(self.keys[rows], self.updates[rows], self.decays[rows])

    def below(self, row: int, kept: Tensor | Sequence[int]) -> PathRows:
        """The rows `kept`, all of them below `row`, which becomes the root."""
        rows = self.at(kept)
        return PathRows(rows.keys, rows.updates, rows.decays - self.decays[row])

    def with_more(self, others: PathRows) -> PathRows:
        """These rows, and others behind them."""
        parts = zip(vars(self).values(), vars(others).values(), strict=True)
        return type(self)(*(torch.cat(pair) for pair in parts))

    def after(self, state: Tensor) -> Tensor:
        """The state [heads, Dk, Dv] after these rows of one path from the root, whose state is given."""
        if not len(self):
            return state
        last = self.decays[-1]
        weighted = self.updates * (last - self.decays).exp()[..., None]
        keys = self.keys.permute(1, 2, 0).repeat_interleave(self.group, 0)  # [heads, Dk, rows]
        return (state * last.exp()[:, None, None]).baddbmm_(keys, weighted.transpose(0, 1))


@dataclass(frozen=True)
class TreePlaces:
    """Where R rows are in a tree with P earlier ones. parents: int64 [P + R], before their children; or ROOT.

    ancestors: makes bool [R, P + R], the rows on the path to each row, itself among them.
    """

    ancestors: Callable[[], Tensor]
    parents: Tensor


class Paths:
    """Who is above whom among the rows of a pass and earlier ones, and how much decays in between."""

    def __init__(self, ancestors: Tensor, decays: Tensor, earlier: PathRows) -> None:
        """ancestors: bool [R, P + R], as `TreePlaces.ancestors` makes it.

        decays [R, heads]: each row's own g, at most 0. earlier: P rows below the same root.
        """
        self.ancestors, self.num_earlier = ancestors, len(earlier)
        self.totals = ancestors[:, self.num_earlier :].to(decays) @ decays + self._of_last(earlier.decays)
        exponents = self.totals.t()[..., None] - torch.cat((earlier.decays, self.totals)).t()[:, None, :]
        self._factors = exponents.masked_fill_(~ancestors, float("-inf")).exp_()

    def _of_last(self, earlier: Tensor) -> Tensor:
        """[R, heads]: D of the last earlier row above each row; 0 without any."""
        above = self.ancestors[:, : self.num_earlier]
        if not above.numel():
            return earlier.new_zeros(len(above), earlier.shape[1])
        last = (above * torch.arange(1, above.shape[1] + 1, device=above.device)).amax(1)
        return torch.cat((torch.zeros_like(earlier[:1]), earlier))[last]

    @property
    def reach(self) -> Tensor:
        """[heads, R, 1]: exp(D), what is left of the root's state."""
        return self.totals.exp().t()[..., None]

    def products(self, rows: Tensor, keys: Tensor) -> Tensor:
        """exp(D_r - D_a) (k_a . x_r): [heads, R, P + R]; 0 where a is neither an ancestor of r nor r itself.

        rows, x [R, key heads, Dk]; keys [P + R, key heads, Dk].
        """
        dots = rows.transpose(0, 1) @ keys.permute(1, 2, 0)
        return dots.repeat_interleave(len(self._factors) // len(dots), 0).mul_(self._factors)


@dataclass(frozen=True)
class DeltaInputs:
    """What R rows bring to the gated delta rule, in fp32.

    queries, keys [R, key heads, Dk]: both normalised, and queries scaled. values [R, heads, Dv]. decays [R, heads]: g.
    rates [R, heads]: beta.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor
    rates: Tensor


@dataclass(frozen=True)
class SumInputs:
    """What R rows bring to Mamba2's sum, in fp32.

    queries, keys [R, key heads, Dk]. values [R, heads, Dv]: u. decays [R, heads]: g. skips [R, heads, Dv]: D x, which
    is added to a row's output and to no state.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor
    skips: Tensor


Inputs = DeltaInputs | SumInputs


def tree_step(
    state: Tensor, inputs: Inputs, ancestors: Tensor, earlier: PathRows | None = None
) -> tuple[Tensor, PathRows]:
    """Outputs [R, heads, Dv] of R rows of a tree, and the rows for `PathRows.after`; the state stays the root's.

    state [heads, Dk, Dv]: the root's, in fp32. ancestors, earlier: as for `Paths`.
    """
    if earlier is None:
        earlier = PathRows(inputs.keys[:0], inputs.values[:0], inputs.decays[:0])
    paths = Paths(ancestors, inputs.decays, earlier)
    keys = torch.cat((earlier.keys, inputs.keys))
    if isinstance(inputs, DeltaInputs):
        updates = _corrections(state, inputs, paths, keys, earlier.updates)
    else:
        updates = inputs.values.transpose(0, 1)
    all_updates = torch.cat((earlier.updates.transpose(0, 1), updates), 1)
    outputs = paths.reach * _through(state, inputs.queries) + paths.products(inputs.queries, keys) @ all_updates
    outputs = outputs.transpose(0, 1)
    if isinstance(inputs, SumInputs):
        outputs = outputs + inputs.skips
    return outputs, PathRows(inputs.keys, updates.transpose(0, 1), paths.totals)


def _corrections(state: Tensor, inputs: DeltaInputs, paths: Paths, keys: Tensor, earlier: Tensor) -> Tensor:
    """The delta rule's u [heads, R, Dv]."""
    rates, num_earlier = inputs.rates.t()[..., None], paths.num_earlier
    wanted = rates * (inputs.values.transpose(0, 1) - paths.reach * _through(state, inputs.keys))
    system = rates * paths.products(inputs.keys, keys)
    if num_earlier:
        wanted = wanted - system[..., :num_earlier] @ earlier.transpose(0, 1)
    # The diagonal counts as 1, whatever stands there.
    solved: Tensor = torch.linalg.solve_triangular(system[..., num_earlier:], wanted, upper=False, unitriangular=True)
    return solved


def chain_step(state: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Outputs [R, heads, Dv] of R rows, each the parent of the next, and the state after the last."""
    outputs = list[Tensor]()
    for parts in zip(*(each.split(CHUNK) for each in vars(inputs).values()), strict=True):
        mask = torch.ones(len(parts[0]), len(parts[0]), dtype=torch.bool, device=state.device).tril()
        some, rows = tree_step(state, type(inputs)(*parts), mask)
        outputs.append(some)
        state = rows.after(state)
    return torch.cat(outputs), state


def _through(state: Tensor, rows: Tensor) -> Tensor:
    """State^T times rows [R, key heads, Dk]: [heads, R, Dv]."""
    return rows.transpose(0, 1).repeat_interleave(len(state) // rows.shape[1], 0) @ state
