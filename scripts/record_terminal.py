"""Record a chat and a benchmark of a real model in a terminal, as docs/chat.svg and docs/bench.svg, for docs/usage.md.

    python scripts/record_terminal.py [chat] [bench]

The model is the one that `scripts/fetch_smollm2` prints. Nothing is cut: each picture shows the whole screen. One
thread computes, so that other programs on the machine disturb less. tmux types and shows, rich draws the screen; the
script needs both, and offspec installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.tmux import Tmux  # noqa: E402 (the checkout is found only now)

SHELL, CHAT = "\n$", "\n>>>"
MODEL = "SmolLM2-135M-Instruct.gguf"
CHAT_LINES = (
    "/set verbose",
    "Write a Python function that returns the area of a circle.",
    "/set tempreature 1",
    "Rename the function to circle_area.",
    "/stats",
)
BENCH = f"offspec bench {MODEL} --budgets 4,16,auto --max-new-tokens 64 --repeats 3"


def model_path() -> Path:
    fetched = subprocess.run([ROOT / "scripts" / "fetch_smollm2"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(fetched.stdout.strip())


def ask(terminal: Tmux, line: str, prompt: str) -> None:
    """Type a line and wait until the terminal asks for the next one."""
    before = terminal.screen.count(prompt)
    terminal.type(line)
    terminal.wait(lambda screen: screen.endswith(prompt) and screen.count(prompt) > before)


def record_chat(terminal: Tmux) -> str:
    for line in (f"offspec chat {MODEL} --max-new-tokens 100", *CHAT_LINES):
        ask(terminal, line, CHAT)
    terminal.press("C-d")
    return terminal.wait(lambda screen: screen.endswith(SHELL)).removesuffix(SHELL)


def record_bench(terminal: Tmux) -> str:
    ask(terminal, BENCH, SHELL)
    return terminal.screen.removesuffix(SHELL)


RECORDINGS = {"chat": (record_chat, 92), "bench": (record_bench, 112)}  # with the columns of the terminal


def draw(screen: str, name: str, columns: int) -> None:
    console = Console(record=True, width=columns, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text(screen))
    svg = console.export_svg(title=f"offspec {name}")
    # No fonts from elsewhere: whoever reads the page has a monospaced one.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    (ROOT / "docs" / f"{name}.svg").write_text(svg, encoding="utf-8")


def main(names: Sequence[str]) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    model = model_path()
    for name in names or list(RECORDINGS):
        record, columns = RECORDINGS[name]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / MODEL).symlink_to(model)
            given = {"HOME": folder, "PATH": path, "OFFSPEC_CONFIG": "", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
            with Tmux(Path(folder), given, columns=columns, rows=80) as terminal:
                draw(record(terminal), name, columns)


if __name__ == "__main__":
    main(sys.argv[1:])
