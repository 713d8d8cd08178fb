"""A tree during drafting: all candidates, their expansion, and the best of them.

All operations are numpy's, without Python work per node.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

import numpy as np

from ..pace.calibration import GRID
from ..trees.token_tree import CONSTRAINT, DRAFT, ROOT, BoolArray, FloatArray, IntArray, TokenTree


@dataclass(frozen=True)
class ChildScores:
    """The draft's values of the children of R expanded nodes, best first.

    tokens, values [R, C]: candidates and their v = log q + G. normalisers [R, S]: logsumexp(v / s) over the whole
    vocabulary for each s of `calibration.GRID`, so that scores for any s can be computed later.
    """

    tokens: IntArray
    values: FloatArray
    normalisers: FloatArray

    @classmethod
    def joined(cls, parts: Sequence[ChildScores]) -> ChildScores:
        """Concatenate the rows of several ChildScores."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate(columns) for columns in zip(*map(_columns, parts), strict=True)))

    def rows(self, indices: IntArray) -> ChildScores:
        return ChildScores(*(column[indices] for column in _columns(self)))

    def replaced(self, indices: IntArray, others: ChildScores) -> ChildScores:
        """A copy in which the rows of `others` replace those at `indices`."""
        columns = [column.copy() for column in _columns(self)]
        for column, other in zip(columns, _columns(others), strict=True):
            column[indices] = other
        return ChildScores(*columns)

    def log_probabilities(self, index: int) -> FloatArray:
        """[R, C]: log softmax(v / s) for s = GRID[index]; at most 0, so that scores never rise along a path."""
        scores: FloatArray = self.values / GRID[index] - self.normalisers[:, index, None]
        return np.minimum(scores, 0.0)

    def likelihood(self, row: int, token: int) -> FloatArray:
        """[S]: log-probability of `token` at one row for each s; a token outside the candidates counts as the last.

        0 for a row without candidates, which says nothing about s.
        """
        possible = np.isfinite(self.values[row])
        if not possible.any():
            return np.zeros(len(GRID))
        matches = np.flatnonzero((self.tokens[row] == token) & possible)
        value = float(self.values[row, matches[0]] if len(matches) else self.values[row, possible].min())
        log_probabilities: FloatArray = value / GRID - self.normalisers[row]
        return log_probabilities


def _columns(scores: ChildScores) -> list[np.ndarray]:
    return [getattr(scores, field.name) for field in fields(scores)]


# A candidate. parent: the parent's index, or ROOT. row: its place among the expanded nodes, which is the draft's
# pending region; -1 if not expanded. value: v at its parent, -inf if the model has not scored it. claim: a guesser's
# score, -inf if there is none; source: its place in SOURCES. forced: a constraint allows no other token at its place,
# so its score is its parent's. Otherwise score is the maximum of claim and model's score.
NODE = np.dtype(
    [
        ("token", np.int64),
        ("parent", np.int64),
        ("depth", np.int64),
        ("row", np.int64),
        ("value", np.float64),
        ("claim", np.float64),
        ("score", np.float64),
        ("forced", np.bool_),
        ("source", np.int8),
    ],
    align=True,  # torch reads columns, whose strides must be multiples of 8 bytes
)

NO_THRESHOLD = (0, 0), -np.inf
BELOW_FINAL = -2  # instead of an index: not a candidate, because it is below a final token


class CandidateTree:
    """Candidates below a root. `nodes` is an array of NODE, parents before children; scores fall along every path.

    Indices into `nodes` stay valid until `reroot`. `final` tokens (end of text) are never expanded.
    """

    def __init__(self, final: Collection[int] = ()) -> None:
        self._room = np.empty(1024, dtype=NODE)
        self.nodes = self._room[:0]
        self._final = np.array(sorted(final), dtype=np.int64)
        self._child_scores: list[ChildScores] = []  # the root's, then those of the expanded nodes, by row
        self._parents = np.empty(0, dtype=np.int64)  # of the expanded nodes: rows, or ROOT
        self._guessed = np.empty(0, dtype=np.int64)  # nodes that a guesser proposed, or a constraint forces
        # The arguments of the last `best`, and the lowest score that it returned: added nodes can only raise it.
        self._threshold = NO_THRESHOLD

    @property
    def num_expanded(self) -> int:
        return len(self._parents)

    @property
    def is_rooted(self) -> bool:
        """Whether the root has been expanded."""
        return bool(self._child_scores)

    @property
    def child_scores(self) -> ChildScores:
        """Row 0 is the root's; the node in row r of the pending region has row r + 1."""
        self._child_scores = [ChildScores.joined(self._child_scores)]
        return self._child_scores[0]

    # ------------------------------------------------------------------------------------------------ growing

    def add(self, parents: IntArray, scores: ChildScores, index: int) -> None:
        """Add the children of the nodes `parents` [R] (or [ROOT]), in the order of their rows, with s = GRID[index]."""
        self._child_scores.append(scores)
        there = np.zeros(scores.tokens.shape, dtype=np.bool_)  # children that are candidates already
        guessed = self._guessed
        for node in guessed[np.isin(self.nodes["parent"][guessed], parents)] if len(guessed) else ():
            row = int(np.flatnonzero(parents == self.nodes["parent"][node])[0])
            for column in np.flatnonzero(scores.tokens[row] == self.nodes["token"][node]):
                there[row, column] = True
                self.nodes["value"][node] = scores.values[row, column]
        self._append(parents, scores, index, ~there)
        if there.any():  # such a node may be one of `parents`, and its children's scores depend on its own
            self.rescore(index)

    def _append(self, parents: IntArray, scores: ChildScores, index: int, wanted: BoolArray) -> None:
        """Append those children of `parents` [R] that are `wanted` [R, C] as candidates."""
        sums = scores.log_probabilities(index) + self._of("score", parents, 0.0)[:, None]
        depths = self.depths(parents) + 1
        row, column = np.nonzero(wanted & (sums > -np.inf))
        new = self._more(len(row))
        new["token"], new["parent"], new["depth"] = scores.tokens[row, column], parents[row], depths[row]
        new["row"], new["claim"] = -1, -np.inf
        new["value"], new["score"] = scores.values[row, column], sums[row, column]
        new["forced"], new["source"] = False, DRAFT

    def _more(self, count: int) -> np.ndarray:
        """Extend `nodes` by `count` and return the new ones, uninitialised."""
        size = len(self.nodes)
        if size + count > len(self._room):
            larger = np.empty(max(size + count, 2 * len(self._room)), dtype=NODE)
            larger[:size] = self.nodes
            self._room = larger
        self.nodes = self._room[: size + count]
        return self.nodes[size:]

    def _of(self, name: str, nodes: IntArray, root: float) -> np.ndarray:
        """A field of these nodes; `root` is the value for ROOT."""
        values = np.full(len(nodes), root, dtype=NODE[name])
        inner = np.flatnonzero(nodes != ROOT)
        values[inner] = self.nodes[name][nodes[inner]]
        return values

    def depths(self, nodes: IntArray) -> IntArray:
        """Depths of these nodes; ROOT's is 0."""
        return self._of("depth", nodes, 0)

    def add_guesses(self, tree: TokenTree, index: int) -> None:
        """Add a guesser's tree below the same root; an existing node keeps the better score."""
        places = self._placed(tree)
        is_there = places != BELOW_FINAL
        places, scores = places[is_there], tree.scores[is_there]
        is_better = scores > self.nodes["claim"][places]
        self.nodes["source"][places[is_better]] = DRAFT if tree.sources is None else tree.sources[is_there][is_better]
        np.maximum.at(self.nodes["claim"], places, scores)
        self._find_guessed()
        self.rescore(index)

    def _placed(self, tree: TokenTree) -> IntArray:
        """The candidate of each node of a tree below the same root, a new one if needed, or BELOW_FINAL."""
        alike = np.flatnonzero(np.isin(self.nodes["token"], tree.tokens))
        pairs = zip(self.nodes["parent"][alike].tolist(), self.nodes["token"][alike].tolist(), strict=True)
        place_of, size, new = dict(zip(pairs, alike.tolist(), strict=True)), len(self.nodes), list[tuple[float, ...]]()
        places = [BELOW_FINAL] * len(tree) + [ROOT]  # the last entry serves parent ROOT
        tokens, final = tree.tokens.tolist(), set(self._final.tolist())
        for i, (token, parent) in enumerate(zip(tokens, tree.parents.tolist(), strict=True)):
            above = places[parent]
            if above == BELOW_FINAL or (parent != ROOT and tokens[parent] in final):
                continue
            if (place := place_of.get((above, token))) is None:
                place = place_of[above, token] = size + len(new)
                depth, score = tree.depths[i], tree.scores[i]
                new.append((token, above, depth, -1, -np.inf, -np.inf, score, False, DRAFT))
            places[i] = place
        self._more(len(new))[:] = np.array(new, dtype=NODE)
        return np.array(places[:-1], dtype=np.int64)

    def _find_guessed(self) -> None:
        self._guessed = np.flatnonzero(np.isfinite(self.nodes["claim"]) | self.nodes["forced"])

    def add_forced(self, above: int, tokens: Sequence[int], index: int) -> list[int]:
        """Add tokens of which each is the only one allowed, as a chain below `above` (or ROOT); returns its nodes."""
        chain, was_there = list[int](), False
        for token in tokens:
            node = self.child(above, token)
            if node is None:
                score, depth = self._of("score", np.array([above]), 0.0)[0], self.depths(np.array([above]))[0] + 1
                node = len(self.nodes)
                self._more(1)[:] = np.array(
                    [(token, above, depth, -1, -np.inf, -np.inf, score, True, DRAFT)], dtype=NODE
                )
            else:
                was_there, self.nodes["forced"][node] = True, True
            chain.append(node)
            above = node
        self._find_guessed()
        if was_there:
            self.rescore(index)
        return chain

    def disputed(self, places: IntArray, index: int) -> tuple[IntArray, FloatArray]:
        """Children of `places` (nodes, or ROOT) whose guesser gives them a higher probability than the model does.

        Only places that the model has expanded count. Returns these nodes, and the guesser's log-probability of each
        after its parent.
        """
        guessed = self._guessed[np.isin(self.nodes["parent"][self._guessed], places)]
        parents, values = self.nodes["parent"][guessed], self.nodes["value"][guessed]
        rows = np.where(parents == ROOT, 0, self._of("row", parents, ROOT) + 1)
        is_asked = (parents == ROOT) | (rows > 0)
        gains = values / GRID[index] - self.child_scores.normalisers[np.where(is_asked, rows, 0), index]
        claims = self.nodes["claim"][guessed] - self._of("score", parents, 0.0)
        is_disputed = is_asked & (claims > gains)
        return guessed[is_disputed], claims[is_disputed]

    def revise(self, parents: IntArray, scores: ChildScores, index: int) -> None:
        """Replace the scores of the children of `parents` [R], ROOT or expanded nodes; rescore with s = GRID[index].

        Children that the model no longer proposes are removed, unless a guesser proposed them.
        """
        nodes, values = self.nodes, scores.values
        rows = self._of("row", parents, ROOT) + 1
        self._child_scores = [self.child_scores.replaced(rows, scores)]
        # A row's place in `rows`; the last entry is for nodes whose parent has not been expanded.
        place = np.full(self.num_expanded + 2, -1)
        place[rows] = np.arange(len(rows))
        place = place[self._score_rows()]
        children = np.flatnonzero(place >= 0)
        place = place[children]
        same = (scores.tokens[place] == nodes["token"][children, None]) & np.isfinite(values[place])
        is_named, column = same.any(-1), same.argmax(-1)
        nodes["value"][children] = np.where(is_named, values[place, column], -np.inf)
        is_new = np.ones_like(values, dtype=np.bool_)
        is_new[place[is_named], column[is_named]] = False
        self._append(parents, scores, index, is_new)
        self.rescore(index)

    def rescore(self, index: int) -> None:
        """Recompute the score of every candidate with s = GRID[index], from the root downwards."""
        nodes, self._threshold = self.nodes, NO_THRESHOLD
        if not len(nodes):
            return
        gains = np.full(len(nodes), -np.inf)
        judged = np.isfinite(nodes["value"])
        if judged.any():
            normalisers = self.child_scores.normalisers[self._score_rows()[judged], index]
            gains[judged] = nodes["value"][judged] / GRID[index] - normalisers
        gains[nodes["forced"]] = 0.0
        for depth in range(1, int(nodes["depth"].max()) + 1):
            level = np.flatnonzero(nodes["depth"] == depth)
            base = np.zeros(len(level)) if depth == 1 else nodes["score"][nodes["parent"][level]]
            nodes["score"][level] = np.maximum(base + np.minimum(gains[level], 0.0), nodes["claim"][level])

    def _score_rows(self) -> IntArray:
        """For every node, its parent's row of `child_scores`; -1 if the parent has not been expanded."""
        rows = self.nodes["row"][self.nodes["parent"]]
        return np.where(self.nodes["parent"] == ROOT, 0, np.where(rows >= 0, rows + 1, -1))

    def expand(self, nodes: IntArray) -> IntArray:
        """Assign rows to these nodes; returns the parents of all expanded nodes, as `TreeModel.score` takes them."""
        self.nodes["row"][nodes] = np.arange(self.num_expanded, self.num_expanded + len(nodes))
        self._parents = np.append(self._parents, self._of("row", self.nodes["parent"][nodes], ROOT))
        return self._parents

    # ------------------------------------------------------------------------------------------------ choosing

    def best(self, count: int, max_depth: int) -> IntArray:
        """The best `count` candidates at most `max_depth` deep, best first: a tree, parents before children."""
        limits = count, max_depth
        least = self._threshold[1] if self._threshold[0] == limits else -np.inf
        near = np.flatnonzero(self.nodes["score"] >= least)
        near = near[(self.nodes["depth"][near] <= max_depth) & (self.nodes["score"][near] > -np.inf)]
        scores = self.nodes["score"][near]
        if count < len(near):
            least = -np.partition(-scores, count - 1)[count - 1]
            near, scores, self._threshold = near[scores >= least], scores[scores >= least], (limits, least)
        return near[np.argsort(-scores, kind="stable")][:count]

    def probabilities(self, nodes: IntArray, trust: float) -> FloatArray:
        """Acceptance probabilities of these nodes: `trust` times the model's probability, or a guesser's claim."""
        is_trusted = self.is_claimed(nodes) | self.is_certain(nodes)
        values: FloatArray = np.where(is_trusted, 1.0, trust) * np.exp(self.nodes["score"][nodes])
        return values

    def is_claimed(self, nodes: IntArray) -> BoolArray:
        """Which of these nodes have a guesser's score."""
        claimed: BoolArray = self.nodes["score"][nodes] <= self.nodes["claim"][nodes]
        return claimed

    def is_certain(self, nodes: IntArray) -> BoolArray:
        """Which of these nodes are forced, as are all nodes above them."""
        certain: BoolArray = self.nodes["forced"][nodes] & (self.nodes["score"][nodes] == 0)
        return certain

    def rows(self, path: IntArray) -> list[int]:
        """The rows of the expanded ones among these nodes."""
        return [int(row) for row in self.nodes["row"][path] if row >= 0]

    def expanded(self, count: int) -> IntArray:
        """The best `count` of the expanded candidates, best first."""
        nodes = np.flatnonzero((self.nodes["row"] >= 0) & (self.nodes["score"] > -np.inf))
        return nodes[np.argsort(-self.nodes["score"][nodes], kind="stable")][:count]

    def open_among(self, nodes: IntArray, max_depth: int) -> IntArray:
        """Those of `nodes` that can be expanded, in the same order."""
        is_open = (self.nodes["row"][nodes] < 0) & (self.nodes["depth"][nodes] < max_depth)
        if len(self._final):
            is_open &= ~np.isin(self.nodes["token"][nodes], self._final)
        return nodes[is_open]

    def child(self, node: int, token: int) -> int | None:
        """The candidate `token` below `node` (or ROOT), or None."""
        matches = np.flatnonzero((self.nodes["parent"] == node) & (self.nodes["token"] == token))
        return int(matches[0]) if len(matches) else None

    def path_tokens(self, nodes: IntArray) -> list[list[int]]:
        """For each node, the tokens from the root's child down to it."""
        tokens, parents = self.nodes["token"], self.nodes["parent"]
        paths = list[list[int]]()
        for node in nodes.tolist():
            path = list[int]()
            while node != ROOT:
                path.append(int(tokens[node]))
                node = int(parents[node])
            paths.append(path[::-1])
        return paths

    def tokens_above(self, nodes: IntArray) -> IntArray:
        """Tokens of which all paths to `nodes` consist: those of these nodes (ROOT has none) and of all inner ones."""
        parents = self.nodes["parent"]
        is_on_path = np.zeros(len(self.nodes) + 1, dtype=np.bool_)  # the last entry is for ROOT
        is_on_path[parents] = is_on_path[nodes] = True
        tokens: IntArray = self.nodes["token"][is_on_path[:-1]]
        return tokens

    def tree(self, nodes: IntArray) -> TokenTree:
        """These nodes (as `best` returns them) as a tree, in the same order."""
        renumbered = np.full(len(self.nodes) + 1, ROOT)  # the last entry is for parent ROOT
        renumbered[nodes] = np.arange(len(nodes))
        picked = self.nodes[nodes]
        sources = np.where(self.is_claimed(nodes), self.nodes["source"][nodes], DRAFT)
        return TokenTree(
            np.ascontiguousarray(picked["token"]),
            renumbered[picked["parent"]],
            np.ascontiguousarray(picked["depth"]),
            np.ascontiguousarray(picked["score"]),
            np.where(self.is_certain(nodes), CONSTRAINT, sources),
        )

    # ------------------------------------------------------------------------------------------------ from pass to pass

    def reroot(self, node: int) -> IntArray:
        """Make the expanded candidate `node` the root and drop all candidates that are not below it.

        Depths and scores then count from the new root, and the kept rows are numbered from 0 in their order. Returns
        the kept rows, ascending.
        """
        row = int(self.nodes["row"][node])
        depth, score = int(self.nodes["depth"][node]), float(self.nodes["score"][node])
        inside = self.nodes["parent"] == node
        for below in range(depth + 2, int(self.nodes["depth"].max()) + 1):
            level = np.flatnonzero(self.nodes["depth"] == below)
            inside[level] = inside[self.nodes["parent"][level]]
        kept = np.sort(self.nodes["row"][inside & (self.nodes["row"] >= 0)])
        self._child_scores = [self.child_scores.rows(np.array([row, *kept]) + 1)]
        renumbered = np.full(len(self.nodes) + 1, ROOT)
        renumbered[:-1][inside] = np.arange(int(inside.sum()))
        new_rows = np.full(self.num_expanded + 1, -1)
        new_rows[kept] = np.arange(len(kept))
        below = self.nodes[inside]
        self.nodes = self._room[: len(below)]
        self.nodes[:], self._threshold = below, NO_THRESHOLD
        self.nodes["parent"] = renumbered[self.nodes["parent"]]
        self.nodes["row"] = new_rows[self.nodes["row"]]
        self.nodes["depth"] -= depth
        self.nodes["score"] -= score
        self.nodes["claim"] -= score
        self._find_guessed()
        self._parents = new_rows[self._parents[kept]]  # -1, of rows that are not kept, is ROOT
        return kept
