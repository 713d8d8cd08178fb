"""The program's entry point: no Ctrl-C shows a traceback from here on, also while modules are imported and unloaded."""

from __future__ import annotations

import atexit

from .interrupts import end_at_once, handle_interrupts


def main() -> None:
    """Run the process's command line (`cli.main`), and exit."""
    handle_interrupts(at_once=True)
    import signal

    if signal.getsignal(signal.SIGINT) is end_at_once:
        # The last function that Python calls before it gives up its handlers, while torch is still being unloaded.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    from .main import main as run_program

    run_program()
