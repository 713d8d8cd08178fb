"""Pictures of the page of `offspec serve`, in build/page: a real server, a real browser, a conversation.

python -m tests.cli.server.picture_page [MODEL [DRAFT]]
"""

from __future__ import annotations

import sys
from pathlib import Path

from offspec import Engine, SpeculationParams

from .browser import Browser, chromium
from .serving import served

FOLDER = Path("build") / "page"
PROMPT = 'def area(shape):\n    """The area of a shape."""\n'
SHOWCASE = """Here is a *short* answer with **Markdown**:

1. A list with `code` and a [link](https://example.org).
2. A second item
   - and one below

| rows | seconds |
|---|---|
| 1 | 0.41 |
| 512 | 0.43 |

```python
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
```

> Quoted text, and مرحبا بالعالم in another direction.
"""


def picture(browser: Browser, name: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    browser.driver.save_screenshot(str(FOLDER / f"{name}.png"))
    print(FOLDER / f"{name}.png")


def show_markdown(browser: Browser) -> None:
    """Replace the last answer's text by one that has everything."""
    browser.run("window.showcase = arguments[0]", SHOWCASE)
    browser.driver.execute_async_script(
        """
        const [text, done] = [window.showcase, arguments[0]];
        import("/page/markdown.js").then(({ Markdown }) => {
          const body = [...document.querySelectorAll(".assistant .body")].at(-1);
          const prose = document.createElement("div");
          prose.className = "prose";
          body.replaceChildren(prose);
          const view = new Markdown(prose);
          view.push(text);
          view.end();
          done();
        });
        """
    )


def choose_pass(browser: Browser) -> None:
    """A pass of some tokens, whose tree has branches."""
    bars = "return [...document.querySelectorAll('.bars rect')].map((bar) => Number(bar.getAttribute('height')))"
    heights = browser.run(bars)
    best = min(range(1, len(heights)), key=lambda place: abs(heights[place] - 0.4 * max(heights)))
    for _ in range(len(heights) - 1 - best):
        browser.run("document.querySelector(arguments[0]).click()", "[aria-label='Earlier pass']")


def main(model: str = "builtin", draft: str = "auto") -> None:
    with (
        Engine.load(model, draft=draft, device="cpu", context=1024) as engine,
        served(engine, has_page=True, speculation=SpeculationParams(budget=20)) as (client, _),
        chromium(1360, 860) as browser,
    ):
        browser.open(f"http://127.0.0.1:{client.port}/")
        picture(browser, "1-empty")
        browser.click("#settings-button")
        browser.find("#s-max_tokens").send_keys("120")
        browser.find("#s-temperature").send_keys("0.8")
        browser.find("#s-seed").send_keys("7")
        picture(browser, "2-settings")
        browser.press("Done", "#settings")
        browser.run("document.querySelector('#prompt').value = arguments[0]", PROMPT)
        browser.find("#prompt").send_keys("\n")
        browser.wait_for_answer()
        browser.click("#insight-button")
        browser.click("#sources")
        choose_pass(browser)
        picture(browser, "3-passes")
        browser.click("#sources")
        show_markdown(browser)
        picture(browser, "4-markdown")
        browser.run("document.documentElement.dataset.theme = 'dark'")
        picture(browser, "5-dark")
        browser.click("#insight-button")
        browser.driver.set_window_size(420, 860)
        picture(browser, "6-narrow")
        browser.click("#insight-button")
        picture(browser, "7-narrow-passes")
        for message in browser.errors():
            print(message)


if __name__ == "__main__":
    main(*sys.argv[1:])
