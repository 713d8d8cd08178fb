"""`offspec serve`: OpenAI's completions API over HTTP, for editors, chat windows and programs that speak it."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offspec.errors import TokenizerError, UsageError

from .learning import learning_kept
from .options import (
    MODEL,
    MODEL_HELP,
    OffspecCommand,
    WholeNumber,
    learning_options,
    load_engine,
    loading_options,
    request_of,
    sampling_options,
    speculation_options,
)

if TYPE_CHECKING:
    from offspec import Engine

MAX_NEW_TOKENS = 4096  # a model ends its answers itself, and clients may say less
GRACE_S = 1  # for answers under way when the server is stopped


@click.command(
    cls=OffspecCommand,
    name="serve",
    help=f"""Answer requests over HTTP, as OpenAI's API has them.

{MODEL_HELP} /v1/chat/completions, /v1/completions and /v1/models, whole or as a stream. One request is answered at a
time, the others wait; what a request shares with the one before it stays in the KV caches. Sampling flags hold for
requests that do not say otherwise. Answers carry tokens/s and the other figures under "offspec".

\b
Examples:
  offspec serve ./Llama-3.1-70B-nf4 --draft ./Llama-3.2-1B-Instruct
  curl http://127.0.0.1:8080/v1/chat/completions \\
      -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'
""",
)
@click.argument("model", default="builtin", type=MODEL)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Where to listen; 0.0.0.0 lets other machines in.",
)
@click.option(
    "--port", type=WholeNumber(0, 65535), default=8080, show_default=True, metavar="N", help="0 takes a free one."
)
@click.option("--api-key", metavar="KEY", help="Refuse requests that do not bear this key.")
@loading_options
@speculation_options
@learning_options
@partial(sampling_options, max_new_tokens=MAX_NEW_TOKENS)
@click.option("-q", "--quiet", is_flag=True, help="No notes.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Say what was chosen and why, and every request; traceback on errors."
)
def command(
    model: str,
    host: str,
    port: int,
    api_key: str | None,
    quiet: bool,
    verbose: bool,
    learn: bool,
    learn_file: Path | None,
    **options: Any,
) -> None:
    params, speculation = request_of(options)
    options["needs_draft_model"] = speculation.is_lossy
    if api_key is not None and not (api_key and api_key.isascii()):
        raise UsageError(
            "--api-key is empty or not ASCII, so that nobody could bear it; leave it out to let everybody in"
        )
    options |= {"learn": learn, "learn_file": learn_file, "tree": speculation.budget}
    with listening(host, port) as sock:  # before gigabytes are read
        engine = load_engine(model, quiet=quiet, verbose=verbose, **options)
        import uvicorn

        from .connections import BACKLOG, Seldom, most_connections, protocol
        from .server import Service, application, is_loopback

        if not quiet:
            _tell_of_template(engine)
            click.echo(f"{engine.name} answers at http://{_address(sock)}/v1; Ctrl-C stops it.")
            sys.stdout.flush()
        with learning_kept(engine, learn_file, quiet=quiet), closing(Service(engine, speculation)) as service:
            app = application(service, params, api_key, is_private=is_loopback(host))
            config = uvicorn.Config(
                app,
                http=protocol(most_connections()),
                ws="none",
                backlog=BACKLOG,
                log_level="info" if verbose else "critical",
                timeout_graceful_shutdown=GRACE_S,
                lifespan="off",
            )
            logging.getLogger("asyncio").addFilter(Seldom())
            server = uvicorn.Server(config)
            service.give_up = lambda: setattr(server, "should_exit", True)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn stops first, and then raises it again
            server.run(sockets=[sock])
        if service.error is not None:
            raise service.error


def _tell_of_template(engine: Engine) -> None:
    try:
        engine.tokenizer.check_chat_template()
    except TokenizerError as exc:
        click.echo(f"offspec: {exc}. Chats are refused, text completions are answered.", err=True)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises UsageError where that cannot be."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as exc:
        raise UsageError(
            f"cannot listen at {host} port {port} ({exc.strerror or exc}); give another --port, or --host"
        ) from exc


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
