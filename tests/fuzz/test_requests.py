"""Some random bodies of requests in each run of the tests; `python -m tests.fuzz.requests` tries more."""

from __future__ import annotations

import json
import os

import pytest

from offspec import Engine

from ..cli.server.conftest import HERMES
from ..cli.server.serving import USER, served
from ..pair import build_pair, with_gaps
from . import requests

NUM_CASES = int(os.environ.get("FUZZ_CASES", "25"))


@pytest.mark.slow
def test_every_body_is_answered(tmp_path_factory: pytest.TempPathFactory) -> None:
    pair = build_pair(tmp_path_factory.mktemp("pair"), max_position_embeddings=512)
    file = pair.target / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": HERMES + "{# <think> #}"}))
    with (
        Engine.load(str(with_gaps(pair.target)), draft="lookup", device="cpu") as engine,
        served(engine, most_waiting=64) as (client, _),
    ):
        assert requests.faults(client, NUM_CASES, seed=1) == []
        assert client.chat(USER).status == 200
