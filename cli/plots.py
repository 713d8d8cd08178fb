"""`offspec bench --save`: four charts of one report. Needs matplotlib, the `bench` extra."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from offspec.errors import StorageError

if TYPE_CHECKING:
    from offspec.tools.benchmark import BenchmarkReport

PARTS = ("draft", "target", "rest")


def plot(report: BenchmarkReport, title: str, file: Path) -> None:
    """Draw a report into a .png or .svg file. Raises StorageError if it cannot be written."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    (times, lengths), (budgets, reliability) = figure.subplots(2, 2)
    _draw_times(times, report)
    _draw_budgets(budgets, report)
    _draw_lengths(lengths, report)
    _draw_reliability(reliability, report)
    figure.suptitle(title)
    try:
        figure.savefig(file)
    except OSError as exc:
        raise StorageError(f"cannot write {file}: {exc.strerror}; choose another --save") from exc


def _draw_times(axes: Any, report: BenchmarkReport) -> None:
    """Time per pass, separately for first and later passes: the first contains the prefill."""
    rows = [row for row in report.rows() if row.kind == report.rows()[-1].kind]
    bars = [
        (f"{row.budget_name}, {which}", parts)
        for row in reversed(rows)
        for which, parts in (("later", row.later_ms), ("first", row.first_ms))
        if parts is not None
    ]
    labels = [label for label, _ in bars]
    left = [0.0] * len(bars)
    for index, name in enumerate(PARTS):
        widths = [max(0.0, parts[index]) for _, parts in bars]
        axes.barh(labels, widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(title="Time per pass", xlabel="ms per pass", ylabel="budget, pass")
    axes.legend()


def _draw_budgets(axes: Any, report: BenchmarkReport) -> None:
    for kind in dict.fromkeys(row.kind for row in report.rows()):
        rows = [row for row in report.rows() if row.kind == kind]
        medians = [row.tokens_per_pass.median for row in rows]
        below = [row.tokens_per_pass.median - row.tokens_per_pass.low for row in rows]
        above = [row.tokens_per_pass.high - row.tokens_per_pass.median for row in rows]
        axes.errorbar(
            [row.budget_name for row in rows], medians, yerr=(below, above), marker="o", capsize=3, label=kind
        )
    axes.set(title="Tokens per pass against budget", xlabel="budget", ylabel="tokens per pass")
    axes.legend()


def _draw_lengths(axes: Any, report: BenchmarkReport) -> None:
    longest = max((max(acceptance.lengths, default=0) for acceptance in report.acceptance.values()), default=0)
    width = 0.8 / max(1, len(report.acceptance))
    for offset, (name, acceptance) in enumerate(report.acceptance.items()):
        total = max(1, acceptance.lengths.total())
        at = [n + (offset + 0.5) * width - 0.4 for n in range(longest + 1)]
        axes.bar(at, [acceptance.lengths[n] / total for n in range(longest + 1)], width=width, label=f"budget {name}")
    axes.set(title="Accepted nodes per pass", xlabel="accepted nodes", ylabel="share of passes")
    if report.acceptance:
        axes.legend()


def _draw_reliability(axes: Any, report: BenchmarkReport) -> None:
    axes.plot((0, 1), (0, 1), linestyle="--", color="grey", label="exact prediction")
    for name, acceptance in report.acceptance.items():
        points = acceptance.reliability()
        axes.plot([p for p, _, _ in points], [a for _, a, _ in points], marker="o", label=f"budget {name}")
    axes.set(title="Reliability of predicted acceptance", xlabel="predicted probability", ylabel="share accepted")
    axes.legend()
