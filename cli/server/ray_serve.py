"""OpenAI's API over one engine, as the class of a Ray Serve deployment. It does not import Ray.

docs/many-machines.md deploys it. Ray Serve starts the replicas, spreads requests over them, and replaces a replica that
is no longer healthy.
"""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette

from offspec import AUTO_TEXTS, Engine, SamplingParams, SpeculationParams

from ..serve import MAX_NEW_TOKENS, MOST_WAITING
from .routes import application
from .service import Service


class Replica:
    """One engine and its routes, those of `offspec serve`. `serve.ingress()` calls the methods by these names."""

    def __init__(self, model: str = "builtin", *, api_key: str | None = None, **options: Any) -> None:
        """options: of `Engine.load`. api_key: requests without it are refused. Raises OffspecError."""
        self._engine = Engine.load(model, **{"cache_ram": None, "texts": AUTO_TEXTS, **options})
        self._service = Service(self._engine, SpeculationParams(), most_waiting=MOST_WAITING)
        self._api_key = api_key

    def __serve_build_asgi_app__(self) -> Starlette:
        return application(self._service, SamplingParams(max_new_tokens=MAX_NEW_TOKENS), self._api_key, given=())

    def check_health(self) -> None:
        """Raises the error after which the engine cannot continue."""
        if self._service.error is not None:
            raise self._service.error

    def close(self) -> None:
        """Stop the threads, and release the engine's memory and files."""
        self._service.close()
        self._engine.close()
