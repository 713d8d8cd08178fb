"""`offspec serve`: OpenAI's completions API over HTTP."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offspec import AUTO_TEXTS, LoadOptions, SamplingParams, SpeculationParams
from offspec.errors import TokenizerError, UsageError

from .flag_declarations import OWN, OffspecCommand, option, with_flags
from .options import (
    LOADING,
    MODEL_HELP,
    WholeNumber,
    fit_to_requests,
    given_sampling,
    is_typed,
    learning_options,
    load_engine,
    loading_options,
    lookup_files_option,
    model_argument,
    more_text_options,
    number_of_texts,
    output_options,
    samples_as_recommended,
    sampling_options,
    size,
    special_in_text_option,
    speculation_options,
)

if TYPE_CHECKING:
    from offspec import Engine

    from .server.model_manager import ModelManager
    from .server.service import Service

MAX_NEW_TOKENS = 4096  # a model ends its answers itself, and clients may request fewer
# Wildcard address → an unassigned outside address (RFC 5737, RFC 3849), and the loopback address.
EVERYWHERE = {"0.0.0.0": ("192.0.2.1", "127.0.0.1"), "::": ("2001:db8::1", "::1")}
GRACE_S = 1  # for requests that are still being received when the server stops
ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+")  # without a path, as browsers state it
KEY_VARIABLES = ("OFFSPEC_SERVE_API_KEY", "OFFSPEC_API_KEY")
MOST_WAITING = 64  # requests in the queue, by default


@click.command(
    cls=OffspecCommand,
    name="serve",
    help=f"""Serve OpenAI's API over HTTP.

{MODEL_HELP} Routes: /v1/chat/completions, /v1/completions, /v1/models, /metrics, Ollama's /api/chat and llama.cpp's
/infill. Several requests share the target's passes; the others wait in a queue. The server keeps the KV caches of
several conversations, so that a request computes only new tokens. A request may override the defaults of sampling:
flags, or what the model recommends. Answers have tokens/s and other statistics under "offspec". Requests from browsers
are rejected unless an API key is set or --cors names their origin.

\b
Examples:
  offspec serve ./Llama-3.1-70B-nf4 --draft ./Llama-3.2-1B-Instruct
  curl http://127.0.0.1:8080/v1/chat/completions \\
      -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'
""",
)
@model_argument
@option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on; 0.0.0.0 accepts requests from other machines.",
)
@option(
    "--port",
    type=WholeNumber(0, 65535),
    default=8080,
    show_default=True,
    metavar="N",
    help="Port to listen on; 0 selects a free one.",
)
@option(
    "--api-key", metavar="KEY", help="Reject requests without this key; OFFSPEC_API_KEY keeps it out of process lists."
)
@option("--alias", metavar="NAME", help="Name of the model for clients. [default: the name of its folder or file]")
@option(
    "--cors",
    multiple=True,
    metavar="ORIGIN",
    help="Answer web pages of this origin, such as https://chat.example; * allows all origins and needs an API key.",
)
@option(
    "--models",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Serve the models of this folder instead of MODEL: the one that a request names is loaded.",
)
@option("--page/--no-page", default=True, help="Whether a browser gets a page to chat in at /. [default: --page]")
@option(
    "--parallel",
    callback=number_of_texts,
    default="auto",
    metavar="auto|N",
    help="Number of requests that share the target's passes. [default: auto, up to 8]",
)
@option(
    "--max-queue",
    type=WholeNumber(0),
    default=MOST_WAITING,
    show_default=True,
    metavar="N",
    help="Number of requests that may wait; others are refused with status 429.",
)
@LOADING.option(
    "cache_ram",
    group=OWN,
    default=None,
    callback=size,
    metavar="SIZE",
    help="RAM for the KV caches of earlier conversations. [default: 1/16 of the free RAM, at most 4 contexts]",
)
@loading_options
@lookup_files_option
@special_in_text_option
@speculation_options
@learning_options
@sampling_options(MAX_NEW_TOKENS)
@more_text_options
@output_options(
    quiet="Print no notes, and no line for each request.",
    verbose="Explain automatic choices, log requests; show tracebacks.",
)
def command(
    host: str,
    port: int,
    api_key: str | None,
    alias: str | None,
    cors: tuple[str, ...],
    models: Path | None,
    page: bool,
    parallel: int | None,
    max_queue: int,
    quiet: bool,
    verbose: bool,
    loading: LoadOptions,
    speculation: SpeculationParams,
    sampling: SamplingParams,
) -> None:
    loading = replace(fit_to_requests(loading, sampling, speculation), texts=parallel or AUTO_TEXTS)
    api_key = _checked_key(api_key)
    if alias is not None and not (alias.strip() and alias.isprintable()):
        raise UsageError(f"--alias must be a name of printable characters, not {alias!r}")
    _check_origins(cors, api_key)
    model_paths = {} if models is None else _models_in(models, loading, alias)
    settings: dict[str, Any] = {"given": given_sampling(speculation), "origins": cors, "alias": alias, "has_page": page}
    settings["defaults"] = sampling
    serve = partial(_serve, host=host, api_key=api_key, quiet=quiet, verbose=verbose, settings=settings)
    notify = (lambda line: None) if quiet else _log
    with listening(host, port) as sock:  # before the model is loaded

        def service_of(engine: Engine) -> Service:
            from .server.service import Service

            return Service(engine, speculation, most_waiting=max_queue, most_texts=parallel, notify=notify)

        if models is not None:
            from .server.model_manager import ModelManager

            def make(path: Path) -> Service:
                from offspec import Engine

                return service_of(Engine.load(replace(loading, model=str(path))))

            with closing(ModelManager(model_paths, make, notify)) as manager:
                serve(manager, sock, f"{len(model_paths)} models of {models} are")
            return
        engine = load_engine(loading, quiet=quiet, verbose=verbose)
        if not quiet:
            _tell_of_template(engine)
        with closing(service_of(engine)) as service:
            serve(service, sock, f"{engine.name} is")


def _serve(
    models: Service | ModelManager,
    sock: socket.socket,
    name: str,
    *,
    host: str,
    api_key: str | None,
    quiet: bool,
    verbose: bool,
    settings: Mapping[str, Any],
) -> None:
    """Answer requests until a signal ends the server. name: what is served. settings: of `application`.

    Raises an engine's last error.
    """
    import uvicorn

    from .server.connections import BACKLOG, most_connections, protocol
    from .server.routes import StoppableServer, application, is_loopback

    if not quiet:
        if api_key is None and not is_loopback(host):
            click.echo(
                f"offspec: anyone on the network who can reach {host} can use this server; --api-key KEY or "
                "OFFSPEC_API_KEY restricts access",
                err=True,
            )
        paths = "/v1, and a page to chat in at /" if settings["has_page"] else "/v1"
        click.echo(f"{name} served at http://{_address(sock)}{paths}; Ctrl-C stops the server.")
        sys.stdout.flush()
    config = uvicorn.Config(
        application(models, api_key=api_key, is_private=is_loopback(host), **settings),
        http=protocol(most_connections()),
        ws="none",
        backlog=BACKLOG,
        log_level="info" if verbose else "critical",
        timeout_graceful_shutdown=GRACE_S,
        lifespan="off",
    )
    with _process_of_a_server():
        StoppableServer(config, models).run(sockets=[sock])
    if models.error is not None:
        raise models.error


def _models_in(folder: Path, loading: LoadOptions, alias: str | None) -> dict[str, Path]:
    """The models of a folder that run, by the names that clients see. Tells of those that do not."""
    from offspec.tools.local_models import models_in

    if is_typed("model") or alias is not None:
        raise UsageError("--models serves a folder's models by their names; omit MODEL and --alias, or --models")
    if loading.learn:
        raise UsageError("--learn trains one model's draft; omit it, or --models")
    models = models_in(folder)
    for each in models:
        if each.fault:
            click.echo(f"offspec: {each.path.name} is not served: {with_flags(each.fault)}", err=True)
    names = {_name_in(folder, each.path): each.path for each in models if not each.fault}
    if not names:
        raise UsageError(f"{folder} has no model that runs; offspec models list {folder} says why")
    return names


def _name_in(folder: Path, path: Path) -> str:
    """A model's path in the folder, without the ending of a file."""
    inside = path.relative_to(folder) if path != folder else Path(path.resolve().name)
    return inside.with_suffix("").as_posix() if path.suffix == ".gguf" else inside.as_posix()


samples_as_recommended(command)


@contextmanager
def _process_of_a_server() -> Iterator[None]:
    """During the body, SIGTERM exits with 0, and asyncio's messages about failed accepts are few.

    uvicorn stops the server first, then raises the signal again.
    """
    from .server.connections import Seldom

    messages, seldom = logging.getLogger("asyncio"), Seldom()
    messages.addFilter(seldom)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        messages.removeFilter(seldom)


def _checked_key(api_key: str | None) -> str | None:
    """The key without spaces around it. Raises UsageError for one that no request can state, such as an empty one."""
    if api_key is None:
        for variable in KEY_VARIABLES:
            if variable in os.environ:  # elsewhere, an empty variable is no setting; here it would open the server
                raise UsageError(f"{variable} is empty; set it to a key, or unset it to disable authentication")
        return None
    key = api_key.strip()
    if not (key and key.isascii() and key.isprintable()):
        raise UsageError("--api-key must be non-empty printable ASCII; omit it to disable authentication")
    return key


def _check_origins(origins: Sequence[str], api_key: str | None) -> None:
    for origin in origins:
        if origin == "*" and api_key is None:
            raise UsageError("--cors * would let every web page ask; set --api-key as well, or name origins")
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise UsageError(f"--cors must be an origin such as https://chat.example:8080, not {origin!r}")


def _log(line: str) -> None:
    with suppress(OSError):  # requests go on without
        click.echo(f"{time.strftime('%H:%M:%S')} {line}", err=True)


def _tell_of_template(engine: Engine) -> None:
    try:
        engine.tokenizer.check_chat_template()
    except TokenizerError as exc:
        click.echo(f"offspec: {with_flags(str(exc))}. Chat requests will be refused; text completions work.", err=True)


def listening(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError if host or port cannot be used."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as exc:
        raise UsageError(
            f"cannot listen on {host} port {port} ({exc.strerror or exc}); give another --port or --host"
        ) from exc


def _address(sock: socket.socket) -> str:
    """The address for clients; for a wildcard address, this machine's address in the network."""
    host, port = sock.getsockname()[:2]
    if host in EVERYWHERE:
        outside, host = EVERYWHERE[host]
        with socket.socket(sock.family, socket.SOCK_DGRAM) as probe, suppress(OSError):  # there may be no network
            probe.connect((outside, 9))  # sends nothing
            host = probe.getsockname()[0]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
