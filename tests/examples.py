"""How many random examples a property test tries: an eighth of what it names, and all of them with `--nightly`."""

from __future__ import annotations

from hypothesis import settings

_is_nightly = False


def configure(*, is_nightly: bool) -> None:
    """Set Hypothesis' defaults, before tests are imported: the same examples in each run, and others each night."""
    global _is_nightly
    _is_nightly = is_nightly
    settings.register_profile("offspec", deadline=None, derandomize=not is_nightly, database=None)
    settings.load_profile("offspec")


def examples(nightly: int) -> settings:
    """Settings of a property test: this many examples with `--nightly`, by default an eighth of them."""
    return settings(max_examples=nightly if _is_nightly else max(5, nightly // 8))
