"""The table of a run, and the verdicts on its requirements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offspec.loaders.units import format_size

TOKENS_PER_PASS = 12  # assumed for the published figures


def tell(results: Mapping[str, Any]) -> str:
    """The table, and the verdicts."""
    lines = list[str]()
    for part, line in results.items():
        figures = line["figures"]
        if "error" in line:
            lines.append(f"{part}: failed: {line['error']}")
        if not figures:
            continue
        teller = _tell_passes if "passes" in figures else _tell_texts if "texts" in figures else _tell_plain
        lines += [f"{part} ({line['seconds']:.0f} s)", *teller(figures), ""]
    return "\n".join([*lines, *verdicts(results)])


def _tell_plain(figures: Mapping[str, Any]) -> list[str]:
    def shown(value: Any) -> str:
        if isinstance(value, Mapping):
            return ", ".join(f"{key}: {shown(each)}" for key, each in value.items())
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return [f"  {name}: {shown(value)}" for name, value in figures.items()]


def _tell_passes(figures: Mapping[str, Any]) -> list[str]:
    lines = [
        f"  {figures['num_resident']} of {figures['num_layers']} layers are resident, "
        f"{format_size(figures['stream_bytes'])} per pass; "
        f"limit {format_size(figures['allowed_bytes'])}, peak {format_size(figures['peak_device_bytes'])}; loaded in "
        f"{figures['load_s']:.0f} s",
        "  tokens   pass s   link s   compute s   / max(link, compute)   link used   exact s   exact compute s",
    ]
    for width, p in figures["passes"].items():
        lines.append(
            f"  {width:>6} {p['seconds']:8.3f} {p['link_s']:8.3f} {p['compute_s']:11.3f} {p['over_bound']:22.2f} "
            f"{p['link_share']:10.0%}"
            + (f" {p['exact_s']:10.3f} {p['exact_compute_s']:16.3f}" if "exact_s" in p else "")
        )
    lines += [f"  {name}: {format_size(figures[name])}" for name in ("outside_torch_bytes",) if name in figures]
    if "texts" in figures:
        lines += _tell_texts(figures)
    if "trace" in figures:
        lines.append(f"  trace: {figures['trace']['file']}")
    if "translation" not in figures:  # of the halved link, which is measured; or the run was interrupted before
        return lines
    there, assumed = figures["translation"], f"tokens_per_s_at_{TOKENS_PER_PASS}"
    return [
        *lines,
        f"  translated to an {there['card']} (not measured: its data sheet, {there['link_bytes_per_s'] / 1e9:.0f} "
        "GB/s): "
        f"{there['pass_s']['256']:.2f} s per pass, {there['tokens_per_s']:.1f} tokens/s at the text's tokens per pass, "
        f"{there[assumed]:.1f} at {TOKENS_PER_PASS}, {there['plain_tokens_per_s']:.1f} plain",
    ]


def _tell_texts(figures: Mapping[str, Any]) -> list[str]:
    return ["  text                   tokens/s   tokens/pass   target s   draft s   draft share"] + [
        f"  {kind:<20} {t['tokens_per_s']:10.2f} {t['tokens_per_pass']:13.2f} {t['target_s_per_pass']:10.3f} "
        f"{t['draft_s_per_pass']:9.4f} {t['draft_share']:13.0%}"
        + ("" if t.get("joules_per_token") is None else f"   {t['joules_per_token']:.1f} J/token")
        for kind, t in figures["texts"].items()
    ]


def verdicts(results: Mapping[str, Any]) -> list[str]:
    """The requirements of the run, and whether each is met."""
    found = list[tuple[str, bool, str]]()
    for part, line in results.items():
        figures = line.get("figures", {})
        if "failed" in figures:
            passed, failed, skipped = (figures[outcome] for outcome in ("passed", "failed", "skipped"))
            told = f"{passed} GPU tests passed, {failed} failed, {skipped} were skipped"
            found.append((told, passed > 0 and failed == 0, part))
        if "first_differences" in figures:
            found.append(
                (
                    f"{figures['num_equal_texts']} of {figures['num_prompts']} texts equal plain ones",
                    figures["num_equal_texts"] > 0,
                    part,
                )
            )
        if "texts_equal" in figures:
            found.append(("fp32 text equals the CPU's", figures["texts_equal"], part))
        for kind in ("builtin", "grown"):
            if kind in figures:
                worst = max(figures[kind]["graph_over_eager"].values())
                found.append(
                    (f"a round as a graph takes ≤ 1/3 of eager: worst {worst:.2f} ({kind})", worst <= 1 / 3, part)
                )
        if "passes" not in figures:
            continue
        found.append(("peak ≤ limit", figures["peak_device_bytes"] <= figures["allowed_bytes"], part))
        if "texts" in figures:
            for kind in ("greedy", "sampled"):
                if kind in figures["texts"]:
                    share = figures["texts"][kind]["draft_share"]
                    found.append((f"drafting outside the pass ≤ 20 %: {share:.0%} ({kind})", share <= 0.2, part))
        for width, p in figures["passes"].items():
            if figures["stream_bytes"] and int(width) <= 256 and p["compute_s"] < p["link_s"]:
                found.append(
                    (f"{width} tokens use ≥ 95 % of the link: {p['link_share']:.0%}", p["link_share"] >= 0.95, part)
                )
            elif int(width) <= 512:
                found.append(
                    (f"{width} tokens ≤ 1.1 times the bound: {p['over_bound']:.2f}", p["over_bound"] <= 1.1, part)
                )
        if part == "70b 24GB" and "translation" in figures:
            rate = figures["translation"][f"tokens_per_s_at_{TOKENS_PER_PASS}"]
            found.append((f"translated ≥ 10 tokens/s: {rate:.1f}", rate >= 10, part))
    return [f"{'yes' if good else 'NO '}  {part}: {what}" for what, good, part in found]
