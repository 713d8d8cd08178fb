"""The models of a server: one, or those of a folder, of which one is loaded at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offspec.errors import OffspecError, UsageError

from .privacy import public_name, without_paths
from .request_parts import Json

if TYPE_CHECKING:
    from .service import Service

IDLE_S = 0.05  # between two looks whether the loaded model is idle
BEGAN_S = int(time.time())


class UnknownModelError(OffspecError):
    """The server has no model of this name."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that can answer. name: as clients see it."""

    service: Service
    name: str

    def described(self) -> Json:
        """The model as `/v1/models` lists it. The context is `max_model_len` in vLLM, in llama.cpp's server `meta`."""
        engine = self.service.engine
        config, most = engine.target.config, engine.max_context
        meta = {"n_ctx": most, "n_ctx_train": config.max_context, "n_vocab": config.vocab_size}
        return {**described(self.name), "max_model_len": most, "context_length": most, "meta": meta}


def described(name: str) -> Json:
    return {"id": name, "object": "model", "created": BEGAN_S, "owned_by": "offspec"}


class ModelManager:
    """The models of a folder. A request for another one than the loaded waits until that is idle; then it is loaded.

    Requests have their turns in the order in which they come, so that a model in use delays another one by no more than
    the answers under way.
    """

    def __init__(
        self, paths: Mapping[str, Path], load: Callable[[Path], Service], notify: Callable[[str], None]
    ) -> None:
        """load: makes a model's service; the manager closes it, and its engine."""
        self.paths, self._load, self.notify = paths, load, notify
        self.loaded: LoadedModel | None = None
        self._num_using = 0
        self._turn = asyncio.Lock()
        self.give_up: Callable[[], None] = lambda: None

    @asynccontextmanager
    async def using(self, name: Any) -> AsyncIterator[LoadedModel]:
        async with self._turn:
            loaded = await self._switched(self.checked(name))
            self._num_using += 1
        try:
            yield loaded
        finally:
            self._num_using -= 1

    def checked(self, name: Any) -> str:
        """The name of the model that a request means: the named one, else the loaded one, else the first.

        Raises UnknownModelError.
        """
        if name in (None, ""):
            return self.loaded.name if self.loaded is not None else next(iter(self.paths))
        if not isinstance(name, str) or name not in self.paths:
            raise UnknownModelError(f"unknown model {name!r}; this server has {', '.join(self.paths)}")
        return name

    async def _switched(self, name: str) -> LoadedModel:
        if self.loaded is not None and self.loaded.name == name:
            return self.loaded
        while self._num_using or (self.loaded is not None and not self.loaded.service.is_idle):
            await asyncio.sleep(IDLE_S)
        return await asyncio.get_running_loop().run_in_executor(None, self._switch, name)

    def _switch(self, name: str) -> LoadedModel:
        """End the loaded model, which is idle, and load another one."""
        self.close()
        began = time.monotonic()
        try:
            service = self._load(self.paths[name])
        except OffspecError as exc:
            raise UsageError(f"{name} cannot be loaded: {without_paths(str(exc))}") from exc
        service.give_up = self.give_up
        self.loaded = LoadedModel(service, name)
        self.notify(f"{name} is loaded after {time.monotonic() - began:.1f} s")
        return self.loaded

    def list(self) -> list[Json]:
        return [self.describe(name) for name in self.paths]

    def describe(self, name: str) -> Json:
        """A model as `/v1/models` lists it. Raises UnknownModelError."""
        if name not in self.paths:
            raise UnknownModelError(f"unknown model {name!r}; this server has {', '.join(self.paths)}")
        loaded = self.loaded
        return loaded.described() if loaded is not None and loaded.name == name else described(name)

    @property
    def fault(self) -> str | None:
        """Why each further request fails; None if that is not so."""
        return None if (loaded := self.loaded) is None else loaded.service.fault

    @property
    def error(self) -> OffspecError | None:
        return None if self.loaded is None else self.loaded.service.error

    def tell_progress(self) -> None:
        if (loaded := self.loaded) is not None:
            loaded.service.tell_progress()

    def stop(self) -> None:
        if (loaded := self.loaded) is not None:
            loaded.service.stop()

    def close(self) -> None:
        """End the loaded model, and free its memory."""
        if (loaded := self.loaded) is not None:
            self.loaded = None
            loaded.service.close()
            loaded.service.engine.close()


class OneModel(ModelManager):
    """A server's only model. Requests may name it as they like."""

    def __init__(self, service: Service, alias: str | None = None) -> None:
        public, folder = public_name(service.engine.name), service.engine.tokenizer.folder
        self._loaded = LoadedModel(service, alias or public)
        super().__init__({self._loaded.name: folder}, lambda path: service, service.notify)
        self.loaded = self._loaded
        self._names = {self._loaded.name, public, service.engine.name}  # by which a client may ask what it is

    def checked(self, name: Any) -> str:
        return self._loaded.name

    def describe(self, name: str) -> Json:
        return super().describe(self._loaded.name if name in self._names else name)
