"""Record a short conversation in a real terminal as docs/chat.svg, for docs/usage.md: python scripts/record_chat.py

tmux types and shows, rich draws the screen. Needs both, and offspec installed.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.tmux import Tmux  # noqa: E402 (the checkout is found only now)

COLUMNS = 88
PROMPT = "\n>>>"
LINES = (
    "/set temperature 0.6",
    "/set seed 4",
    "def close(self):",
    "def area(self, width, height):",
    "/set tempreature 1",
    "/stats",
    "/save talk.json",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        environment = {"HOME": folder, "PATH": path, "OFFSPEC_CONFIG": "", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        with Tmux(Path(folder), environment, columns=COLUMNS) as terminal:
            for line in ("offspec chat builtin --max-new-tokens 60", *LINES):
                before = terminal.screen.count(PROMPT)
                terminal.type(line)
                terminal.wait(lambda screen, before=before: screen.endswith(PROMPT) and screen.count(PROMPT) > before)
            terminal.press("C-d")
            screen = terminal.wait(lambda screen: screen.endswith("\n$")).removesuffix("\n$")
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text(screen))
    svg = console.export_svg(title="offspec chat")
    # No fonts from elsewhere: whoever reads the page has a monospaced one.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    (ROOT / "docs" / "chat.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
