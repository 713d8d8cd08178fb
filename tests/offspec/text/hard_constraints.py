"""Constraints that keep the library's compiler busy for longer than anybody waits, in few bytes."""

from __future__ import annotations

from offspec.scheduler.params import Constraint

ENDLESS_TEXT = "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(1, 60))
ENDLESS = Constraint.grammar(ENDLESS_TEXT)
