"""Models whose chat templates know tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ...pair import Pair, build_pair, with_tokenizer_config

if TYPE_CHECKING:
    from offspec import Engine

    from .serving import Client

HERMES = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "Answer <tool_call>\\n{name, arguments}\\n</tool_call><|end|>{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\\n</tool_call>{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tool_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    found = build_pair(tmp_path_factory.mktemp("tools"), max_position_embeddings=1024)
    with_tokenizer_config(found.target, chat_template=HERMES)
    return found


@pytest.fixture(scope="module")
def tool_engine(tool_pair: Pair) -> Iterator[Engine]:
    from offspec import Engine

    with Engine.load(str(tool_pair.target), draft=str(tool_pair.draft), device="cpu") as found:
        yield found


@pytest.fixture(scope="module")
def served_pair(tool_engine: Engine) -> Iterator[tuple[Client, Engine]]:
    """With the key `k`."""
    from .serving import served

    with served(tool_engine, tries=True, api_key="k") as (client, _):
        yield client, tool_engine


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is soon told that it waits."""
    monkeypatch.setattr("offspec.cli.server.responses.KEEP_ALIVE_S", 0.02)
    monkeypatch.setattr("offspec.cli.server.responses.SILENCE_S", 0.05)
