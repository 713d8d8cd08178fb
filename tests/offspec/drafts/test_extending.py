"""A kind of draft of one's own is registered, and nothing else is touched (docs/developing/extending.md).

It guesses by a table: after each token the one that followed it in a text that is known. What it guesses comes true
where the text goes on as that one did, and whatever it guesses, the text is the target's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offspec import Engine, LoadOptions, SamplingParams, SpeculationParams
from offspec.checkpoints.model_files import ModelFiles
from offspec.drafts.base import Attach, Draft, DraftTask, OpenRequest
from offspec.drafts.draft_stats import DraftStats
from offspec.drafts.kinds import KINDS
from offspec.errors import UsageError
from offspec.loaders.machine.hardware import Rates
from offspec.loaders.streaming.placement import Item, Placement
from offspec.model.decoder import Decoder
from offspec.planning.draft_forecast import Acceptance, Guessing
from offspec.planning.memory import MemoryUse, Reservation
from offspec.scheduler.drafting.drafter import Drafter, NoDrafter
from offspec.scheduler.trees.token_tree import TokenTree
from offspec.tools.forecast import make_forecast

from ...pages import ROOT, blocks
from ...pair import Pair
from ...refusals import refused

PROMPT = "def area("
GREEDY, SAMPLED = SamplingParams(12, seed=5), SamplingParams(12, temperature=1.0, seed=5)
CONTEXT = 128


# ---------------------------------------------------------------------------------------------------- the kind of draft


class TableDrafter(NoDrafter):
    """Guesses a chain of at most MAX_NODES tokens; learns nothing."""

    MAX_NODES = 8

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        tokens = [text[-1]]
        for _ in range(min(max_depth, self.MAX_NODES)):
            tokens.append(int(self._table[tokens[-1]]))
        return TokenTree.chain(tokens[1:])


class TableDraft(Draft):
    """The table in memory. Having no model, a text has caches of the target alone, as `Draft.new_caches` makes them."""

    def __init__(self, table: Tensor) -> None:
        super().__init__("table")
        self._table = table

    def drafter(self, task: DraftTask, stats: DraftStats) -> Drafter:
        return NoDrafter() if task.speculation.budget == 0 else TableDrafter(self._table)


@dataclass(frozen=True)
class OpenedTable:
    """The table before it is loaded. followers: token → the token after it."""

    followers: Mapping[int, int]
    models: Sequence[ModelFiles] = ()

    @classmethod
    def open(cls, followers: Mapping[int, int], request: OpenRequest) -> OpenedTable:
        request.options.refuse_exit_file()
        return cls(followers)

    def memory_use(self, target: ModelFiles, reservation: Reservation) -> MemoryUse:
        return MemoryUse((Item("successor table", on_device=8 * target.config.vocab_size),))

    def guessing(self, placement: Placement) -> Guessing:
        return Guessing(acceptance=Acceptance({8: 3.0}, {8: 1.2}, "this test"))

    def load(self, device: torch.device) -> Attach:
        def attach(target: Decoder) -> Draft:
            table = torch.zeros(target.config.vocab_size, dtype=torch.long, device=device)
            table[list(self.followers)] = torch.tensor([*self.followers.values()], device=device)
            return TableDraft(table)

        return attach


# --------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def plain(pair: Pair) -> dict[SamplingParams, list[int]]:
    """What the target says without any draft: the prompt's tokens, and then its own."""
    with load(pair, "none") as engine:
        return {params: engine.encode(PROMPT) + ids_of(engine, params)[0] for params in (GREEDY, SAMPLED)}


@pytest.fixture
def _registered(plain: dict[SamplingParams, list[int]]) -> Iterator[None]:
    """`--draft table`, made of the greedy text."""
    KINDS["table"] = partial(OpenedTable.open, dict(pairwise(plain[GREEDY])))
    yield
    del KINDS["table"]


def load(pair: Pair, draft: str) -> Engine:
    return Engine.load(str(pair.target), draft=draft, device="cpu", dtype="fp32", context=CONTEXT)


def ids_of(
    engine: Engine, params: SamplingParams, speculation: SpeculationParams | None = None
) -> tuple[list[int], int]:
    """The tokens that follow the prompt, and in how many passes."""
    steps = list(engine.generate(PROMPT, params, speculation))
    return [token for step in steps for token in step.token_ids], steps[-1].stats.num_passes


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "temperature 1"])
def test_the_text_is_plain_decodings(
    pair: Pair, plain: dict[SamplingParams, list[int]], params: SamplingParams
) -> None:
    with load(pair, "table") as engine:
        ids, num_passes = ids_of(engine, params)
        ids_without, num_without = ids_of(engine, params, SpeculationParams(budget=0))
        assert engine.draft_name == "table"
        assert ids == ids_without == plain[params][-len(ids) :]
        assert num_without == len(ids)
        if params is GREEDY:  # what the table was made of
            assert num_passes < len(ids)


@pytest.mark.usefixtures("_registered")
def test_its_memory_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine, and by `offspec plan`, which loads nothing."""
    with Engine.load("builtin", draft="table", device="cpu", context=CONTEXT) as engine:
        assert engine.plan is not None
        table_bytes = 8 * engine.target.config.vocab_size
        assert Item("successor table", on_device=table_bytes) in engine.plan.placement.items
    monkeypatch.setattr("offspec.tools.forecast.measure_rates", lambda *_, **__: Rates(matmul_flops={1: 1e10}))
    forecast = make_forecast(LoadOptions("builtin", draft="table", device="cpu", context=CONTEXT))
    assert ("successor table", 0, table_bytes) in forecast.rows()


@pytest.fixture
def _followers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's example as a module that Python finds."""
    (code,) = (code for code in blocks(ROOT / "docs/developing/extending.md", "python") if "FollowersDraft" in code)
    (tmp_path / "followers.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("followers", None)


@pytest.mark.usefixtures("_followers")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "temperature 1"])
def test_a_strangers_kind_is_named_by_its_module(
    pair: Pair, plain: dict[SamplingParams, list[int]], params: SamplingParams
) -> None:
    with load(pair, "followers:FollowersDraft") as engine:
        ids, num_passes = ids_of(engine, params)
        assert engine.draft_name == "followers"
        assert ids == plain[params][-len(ids) :]
        assert num_passes <= len(ids)


@pytest.mark.usefixtures("_followers")
@pytest.mark.parametrize(
    ("draft", "told"),
    [
        ("no_such_module:Name", ["no_such_module", "PYTHONPATH"]),
        ("followers:Missing", ["module followers", "Missing"]),
        ("followers:TokenTree", ["TokenTree", "open(request)"]),
    ],
)
def test_what_is_no_kind_of_draft_is_refused(draft: str, told: list[str]) -> None:
    with refused(UsageError, draft, *told):
        Engine.load("builtin", draft=draft, device="cpu")
