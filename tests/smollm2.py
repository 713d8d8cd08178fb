"""Where the real model is that some tests run: SmolLM2-135M-Instruct as GGUF, which `scripts/fetch_smollm2` fetches."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

VARIABLE = "OFFSPEC_TEST_SMOLLM2"
FOUND = "SMOLLM2_OF_TESTS"  # under which processes of pytest know it, as offspec itself takes OFFSPEC_* for settings


def smollm2_path() -> Path:
    """What the variable says, or the file in the user's cache; it need not be there."""
    said = os.environ.get(FOUND) or os.environ.get(VARIABLE)
    cache = user_cache_path("offspec", appauthor=False)
    return Path(said) if said else cache / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
