"""RoPE's frequencies where there are none; what they are is compared with transformers' in test_model."""

from __future__ import annotations

import pytest

from offspec.errors import CheckpointError
from offspec.model.rope import rotation
from offspec.model.rope_config import RopeConfig

from ...refusals import refused


@pytest.mark.parametrize(("theta", "more"), [(1.0, {}), (1e4, {"beta_fast": 1e308}), (1e4, {"beta_fast": 1e-320})])
def test_yarn_of_numbers_that_no_model_has_is_refused(theta: float, more: dict[str, float]) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64, **more}
    with refused(CheckpointError, "config.json", "'yarn'", theta):
        rotation(RopeConfig(theta, "yarn", scaling), 16)
