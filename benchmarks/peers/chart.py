"""A bar chart of tokens/s as SVG, for a README: light and dark, readable without a program."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, LEFT, LONGEST, STEP = 720, 260, 400, 30
STYLE = """
    .paper { fill: #ffffff; stroke: #d0d7de; } .ink { fill: #1f2328; } .soft { fill: #57606a; }
    .ours { fill: #0969da; } .peer { fill: #8c959f; }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #0d1117; stroke: #30363d; } .ink { fill: #e6edf3; } .soft { fill: #9198a1; }
      .ours { fill: #4493f8; } .peer { fill: #6e7681; }
    }
    text { font: 14px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
    .head { font-weight: 600; font-size: 15px; } .small { font-size: 12px; }
"""


def chart(bars: Sequence[tuple[str, float]], conditions: str) -> str:
    """bars: (name, tokens/s), ours first. conditions: the line below the title."""
    height = 68 + STEP * len(bars)
    fastest = max(rate for _, rate in bars)
    rows = [
        _bar(58 + STEP * i, name, rate, LONGEST * rate / fastest, ours=i == 0) for i, (name, rate) in enumerate(bars)
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-labelledby="title">\n'
        f'  <title id="title">Decoding speed in tokens per second: {escape(conditions)}</title>\n'
        f"  <style>{STYLE}  </style>\n"
        f'  <rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>\n'
        f'  <text class="ink head" x="16" y="26">Decoding, tokens/s</text>\n'
        f'  <text class="soft small" x="16" y="44">{escape(conditions)}</text>\n'
    )
    return head + "".join(rows) + "</svg>\n"


def _bar(top: int, name: str, rate: float, length: float, *, ours: bool) -> str:
    return (
        f'  <text class="ink" x="{LEFT - 10}" y="{top + 14}" text-anchor="end">{escape(name)}</text>\n'
        f'  <rect class="{"ours" if ours else "peer"}" x="{LEFT}" y="{top}" width="{length:.1f}" height="18" rx="2"/>\n'
        f'  <text class="ink" x="{LEFT + length + 8:.1f}" y="{top + 14}">{rate:.2f}</text>\n'
    )
