"""The page in a real browser: before a server that does what the test says, and before a real one.

Skipped where Chromium is missing. scripts/fetch_axe fetches what looks for faults of accessibility.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from offspec import Engine, SamplingParams
from offspec.cli.serve import listening
from offspec.cli.server.page_routes import HEADERS, page_routes

from .browser import Browser, chromium, wait, why_missing
from .serving import Client, served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_missing()), reason=why_missing())]
AXE = Path(__file__).parents[3] / "build" / "axe.min.js"
FIGURES = {"num_tokens": 2, "num_passes": 1, "tokens_per_pass": 2.0, "decode_tokens_per_s": 8.5, "ttft_s": 0.1}
STREAMED = {"stream_bytes_per_pass": 4_200_000_000, "stream_gb_per_s": 11.2, "link_gb_per_s": 12.0}
TREE = {
    "num_nodes": 3,
    "texts": ["one", " two", " <b>"],
    "parents": [-1, 0, -1],
    "probabilities": [0.75, 0.5, 0.125],
    "sources": ["draft", "lookup", "recycling"],
    "accepted": [0],
}
FULL = {"error": {"message": "the context is too small", "code": "context_length_exceeded"}}
CUT = {"choices": [{"delta": {}, "finish_reason": "length"}]}
FAULTS = """
    const [done] = arguments, of = (fault) => [fault.impact, fault.id, fault.nodes.map((node) => node.html)];
    axe.run().then((found) => done(found.violations.map(of)));
"""
HOSTILE = (
    "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>\n\n"
    "[link](javascript:document.title='pwned') ![image](https://evil.example/x.png) <https://evil.example>\n\n"
    '```html" onload="x\n<svg onload=alert(1)>\n```\n\n| <b>a</b> | b |\n|---|---|\n| <i onclick=x> | 2 |\n'
)
ANSWER = r"""# Title *one* ##

Some **bold `co**de` text**, a*b and `c*d`, \*not\*, [a link](https://example.org/a_b), https://example.org/x. 😀

```python
def f(x):
    return "``" + `x`

```
Text at once
~~~~ js
~~~
`` ` ``
~~~~

Windows' line,\r
and the next one\r
\r
```\r
dir c:\\r
```\r

1. One
   - nested *em*
        - deeper `code`
   - and
     ```sh
     echo $$ ``
       deep
     ```
2. Two
> quote with **bold**
> > inner
> \[
> - q
> \]

| a | b \| c |
|---|:-:|
| `x|y` | \( |x| \) |
| *em* | 2 |

***
Energy \( E = mc^2 \), 5*x with \( 3*y_1 \), $$ c_1 * d_2 * e $$ and \(unfinished *em*.
Then
\[
- x_1 + y_1 \\[2pt]
+ z_1 | w
---
\]
- Item \[
  - a
  \]
- Price: $$
- Price *good*: $$

$$
- u_i * v_i
$$
``
after

``` unfinished
x = 1
``""".replace("\\r\n", "\r\n")
FORMULAS = [
    "\\[\n- q\n\\]",
    "\\( |x| \\)",
    "\\( E = mc^2 \\)",
    "\\( 3*y_1 \\)",
    "$$ c_1 * d_2 * e $$",
    "\\[\n- x_1 + y_1 \\\\[2pt]\n+ z_1 | w\n---\n\\]",
    "\\[\n  - a\n  \\]",
    "$$\n- u_i * v_i\n$$",
]
CODES = ['def f(x):\n    return "``" + `x`\n\n', "~~~\n`` ` ``\n", "dir c:\\\n", "echo $$ ``\n  deep\n", "x = 1\n``\n"]
# At once, because the list, and a field in it, is made anew when the server has ended an answer.
RENAME = """
    document.querySelector("#conversations .open [title=Rename]").click();
    const field = document.querySelector("#conversations input");
    field.value = arguments[0];
    field.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
"""
STORED = """
    import("/page/store.js").then(async (store) => {
      const nodes = await store.nodesOf(sessionStorage.getItem("offspec.open"));
      arguments[0](nodes.sort((one, other) => one.created - other.created).map(({ content }) => content));
    });
"""
SHOW_CUT = """
    const [text, done] = arguments;
    import("/page/markdown.js").then(({ Markdown }) => {
      const shown = (...parts) => {
        const root = document.createElement("div"), view = new Markdown(root);
        for (const part of parts) view.push(part), view.render();
        view.end();
        return root;
      };
      const whole = shown(text), texts = (of) => [...whole.querySelectorAll(of)].map((each) => each.textContent);
      const isOther = (...parts) => shown(...parts).innerHTML !== whole.innerHTML;
      const cuts = [...Array(text.length).keys()];
      const others = cuts.filter((at) => isOther(text.slice(0, at), text.slice(at)));
      if (isOther(...text.split(""))) others.push("each character");
      const root = document.createElement("div"), view = new Markdown(root), firsts = [];
      for (const part of ["one\\n\\n", "two\\n\\n", "three"]) {
        view.push(part), view.render(), firsts.push(root.firstChild);
      }
      const isKept = new Set(firsts).size === 1;  // a block that is over is not drawn again
      const [numEmpty, numItems] = [texts(".block:empty").length, texts("li").length];
      done([others, isKept, texts("pre"), texts(".formula"), texts("em"), numEmpty, numItems]);
    });
"""


class FakeServer:
    """Answers chats by `script`, a function from a request's body to pieces: deltas, choices' fields, or an Event.

    A word is a token. A chat that has `context` of them is refused: at once, or, if `is_late`, in its stream.
    """

    def __init__(self) -> None:
        self.script: Callable[[Any], Iterator[Any]] = lambda body: iter(["Hello."])
        self.bodies, self.num_left, self.key = list[Any](), 0, ""
        self.names, self.context, self.is_late = ["<i>fake</i>"], 4096, False
        self.sampling = dict[str, float]()
        self.sock = listening("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}/"
        self.start()

    def start(self) -> None:
        app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
                *page_routes(),
            ]
        )
        config = uvicorn.Config(app, ws="none", log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = Thread(target=self._server.run, kwargs={"sockets": [self.sock]})
        self._thread.start()

    def stop(self) -> None:
        """Leave; a later `restart` takes the same port."""
        self._server.should_exit = True
        self._thread.join()
        self.sock.close()

    def restart(self) -> None:
        self.sock = listening("127.0.0.1", int(self.url.rsplit(":", 1)[1].rstrip("/")))
        self.start()

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "the API key is missing or wrong"}}, 401)
        common = {"context_length": self.context, "sampling": self.sampling}
        return JSONResponse({"data": [{"id": name, **common} for name in self.names]})

    async def count_tokens(self, request: Request) -> Response:
        return JSONResponse({"input_tokens": num_words(await request.json())})

    async def chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        if num_words(self.bodies[-1]) >= self.context and not self.is_late:
            return JSONResponse(FULL, 400)
        return StreamingResponse(self._events(self.bodies[-1]), media_type="text/event-stream")

    async def _events(self, body: Any) -> AsyncIterator[str]:
        def event(delta: Any, **fields: Any) -> str:
            return f"data: {json.dumps({'choices': [{'delta': delta}], **fields})}\n\n"

        yield ": waiting\n\n"
        if num_words(body) >= self.context:
            yield f"event: error\ndata: {json.dumps(FULL)}\n\n"
            return
        try:
            for piece in self.script(body):
                if isinstance(piece, Event):
                    while not piece.is_set():
                        await asyncio.sleep(0.01)
                elif isinstance(piece, dict):
                    is_delta = piece.keys().isdisjoint(("offspec", "choices"))
                    yield event(piece) if is_delta else event({}, **piece)
                else:
                    yield event({"content": piece})
        except asyncio.CancelledError:
            self.num_left += 1
            raise
        yield "data: [DONE]\n\n"


def num_words(body: Any) -> int:
    return sum(len(message["content"].split()) for message in body["messages"])


def passed(text: str = "one", number: int = 1) -> dict[str, Any]:
    """A pass of two tokens, the second by the target."""
    tokens = [{"text": text, "source": "draft"}, {"text": "!", "source": "target"}]
    return {"offspec": {**FIGURES, **STREAMED, "num_passes": number, "pass": {"tokens": tokens, "tree": TREE}}}


@pytest.fixture(scope="module")
def browsers() -> Generator[Browser, None, None]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def fakes() -> Generator[FakeServer, None, None]:
    found = FakeServer()
    yield found
    found.stop()


@pytest.fixture
def fake(fakes: FakeServer) -> FakeServer:
    fakes.script, fakes.key, fakes.num_left = (lambda body: iter(["Hello."])), "", 0
    fakes.names, fakes.context, fakes.is_late = ["<i>fake</i>"], 4096, False
    fakes.bodies.clear()
    fakes.sampling = {}
    return fakes


@pytest.fixture
def page(browsers: Browser, fake: FakeServer) -> Generator[Browser, None, None]:
    """The page before the fake server, without earlier conversations. No fault may be in the console at the end."""
    browsers.driver.get(f"{fake.url}health")
    browsers.run("localStorage.clear(); sessionStorage.clear(); indexedDB.deleteDatabase('offspec')")
    browsers.errors()
    browsers.open(fake.url)
    yield browsers
    assert [error for error in browsers.errors() if "net::ERR" not in error and "status of 401" not in error] == []


def test_a_conversation_is_told_to_the_server_and_survives_a_reload(page: Browser, fake: FakeServer) -> None:
    fake.script = lambda body: iter([{"reasoning_content": "Hm."}, "Hello", " **you**.", passed("Hello")])
    page.say("hi")
    assert page.wait_for_answer().split("\n")[-1] == "Hello you."
    page.say("more")
    wait(lambda: len(fake.bodies) == 2)
    page.wait_for_answer()
    told = [(message["role"], message["content"]) for message in fake.bodies[1]["messages"]]
    assert told == [("user", "hi"), ("assistant", "Hello **you**."), ("user", "more")]
    assert fake.bodies[1]["offspec"] == {"passes": True}
    assert page.run("return document.querySelector('details.thinking').open") is False
    page.driver.refresh()
    page.until("return document.querySelectorAll('.message').length === 4")
    assert page.texts(".user .body") == ["hi", "more"]
    assert page.text("#conversations .open .title") == "hi"
    page.until("return document.querySelector('h1').innerText === '<i>fake</i>'")  # the server says it later
    assert page.run("return document.querySelector('h1 i')") is None


def test_regenerating_and_editing_make_branches(page: Browser, fake: FakeServer) -> None:
    answers = iter(["first", "second", "third"])
    fake.script = lambda body: iter([next(answers)])
    page.say("hi")
    assert page.wait_for_answer() == "first"
    page.press("Regenerate")
    page.until("return document.querySelector('.assistant .body')?.innerText === 'second'")
    assert page.wait_for_answer() == "second"
    assert page.text(".assistant .branches span") == "2/2"
    page.click(".assistant [aria-label='Earlier branch']")
    page.until("return document.querySelector('.assistant .body')?.innerText === 'first'")  # once the choice is stored
    assert page.texts(".assistant .body") == ["first"]
    page.press("Edit")
    field = page.find(".editor textarea")
    field.clear()
    field.send_keys("other\n")
    page.until("return document.querySelector('.assistant .body')?.innerText === 'third'")
    assert page.text(".user .branches span") == "2/2"
    assert [message["content"] for message in fake.bodies[-1]["messages"]] == ["other"]


def test_stop_keeps_what_came_and_leaves_the_server(page: Browser, fake: FakeServer) -> None:
    gate = Event()
    fake.script = lambda body: iter(["begun ", gate, "never"])
    page.say("hi")
    page.until("return document.querySelector('.assistant .body')?.innerText.includes('begun')")
    page.keys("\ue00c")  # Escape
    assert page.wait_for_answer() == "begun"
    assert page.text(".assistant .state") == "stopped"
    wait(lambda: fake.num_left == 1)
    fake.script = lambda body: iter(["again"])
    page.say("more")
    page.until("return [...document.querySelectorAll('.assistant .body')].at(-1).innerText === 'again'")


def test_a_cut_answer_goes_on_in_its_message(page: Browser, fake: FakeServer) -> None:
    """Cut by its length, by the person, by a server that fails, and at its end; each time it keeps what came."""

    def failing() -> Iterator[Any]:
        yield from (" three", failure)
        raise OSError

    gate, failure = Event(), Event()
    scripts = iter([[{"reasoning_content": "Hm."}, "**one", passed(), CUT], [" two", gate], failing(), [gate, "**"]])
    fake.script = lambda body: iter(next(scripts))
    page.say("hi")
    answer, state = page.wait_for_answer, partial(page.text, ".assistant .state")
    assert (answer().split("\n")[-1], state()) == ("**one", "cut at its greatest length")
    page.press("Continue", ".assistant")
    page.until("return document.querySelector('.assistant .body')?.innerText.endsWith('**one two')")
    page.keys("\ue00c")  # Escape
    assert (answer().split("\n")[-1], state()) == ("**one two", "stopped")
    page.driver.refresh()
    page.press("Continue", ".assistant")
    page.until("return document.querySelector('.assistant .body')?.innerText.endsWith('**one two three')")
    failure.set()
    page.until("return document.querySelector('.assistant .state')?.innerText.startsWith('ended early')")
    assert answer().split("\n")[-1] == "**one two three"
    page.press("Continue", ".assistant")
    page.until("return document.querySelector('.assistant .state')?.innerText === 'waiting for other answers'")
    gate.set()
    assert (answer().split("\n")[-1], state()) == ("one two three", "")
    assert page.texts(".assistant .foot button") == ["Regenerate", "Copy"]
    assert (page.texts(".branches"), page.texts(".assistant .prose strong")) == ([], ["one two three"])
    begun = [body["messages"][1] for body in fake.bodies[1:]]
    assert begun == [
        {"role": "assistant", "content": text, "reasoning_content": "Hm."}
        for text in ("**one", "**one two", "**one two three")
    ]
    assert [body.get("continue_final_message") for body in fake.bodies] == [None, True, True, True]


def test_a_reload_keeps_what_came_and_ends_the_answer(page: Browser, fake: FakeServer) -> None:
    fake.script = lambda body: iter(["begun", Event()])
    page.say("hi")
    page.until("return document.querySelector('.assistant .body')?.innerText === 'begun'")
    page.driver.refresh()
    page.until("return document.querySelector('.assistant')")
    assert page.wait_for_answer() == "begun"
    assert page.texts(".assistant .state") == ["stopped"]
    assert "Regenerate" in page.texts(".assistant .foot button")


def test_an_answer_of_a_tab_that_crashed_ends(page: Browser, fake: FakeServer) -> None:
    page.say("hi")
    page.wait_for_answer()
    lose = """
        const [done] = arguments, wait = setTimeout;
        window.setTimeout = (then, ms) => wait(then, ms / 50);
        import("/page/store.js").then(async (store) => {
          const nodes = await store.nodesOf(sessionStorage.getItem("offspec.open"));
          const node = nodes.find(({ role }) => role === "assistant");
          await store.saveNode({ ...node, state: "running", saved: Date.now() });
          done();
        });
    """
    page.driver.execute_async_script(lose)
    page.click("#conversations .title")
    page.until("return document.querySelector('.assistant').getAttribute('aria-busy') === 'true'")
    page.run("const now = Date.now; Date.now = () => now() + 20000")
    page.until("return document.querySelector('.assistant .state')?.innerText === 'stopped'")


def test_a_server_that_leaves_and_comes_back(browsers: Browser) -> None:
    gate, fake = Event(), FakeServer()
    fake.script = lambda body: iter(["begun", gate])
    browsers.open(fake.url)
    browsers.run("const wait = setTimeout; window.setTimeout = (then, ms) => wait(then, ms / 50)")
    browsers.say("hi")
    browsers.until("return document.querySelector('.assistant .body')?.innerText === 'begun'")
    stopping = Thread(target=fake.stop)
    stopping.start()
    browsers.until("return document.querySelector('.assistant .state')?.innerText.startsWith('ended early')")
    gate.set()
    stopping.join()
    assert browsers.text("#server") == "server away"
    fake.restart()
    browsers.until("return document.querySelector('#server').innerText === ''")
    fake.script = lambda body: iter(["back"])
    browsers.press("Retry")
    browsers.until("return document.querySelector('.assistant .body')?.innerText === 'back'")
    fake.stop()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_full_context_is_left_by_the_oldest_turns(page: Browser, fake: FakeServer, is_late: bool) -> None:
    fake.context, fake.is_late, fake.script = 20, is_late, lambda body: iter(["four words of answer"])
    for number in range(4):
        page.say(f"question number {number}")
        page.until("return document.querySelectorAll('.message').length === arguments[0]", 2 * number + 2)
        page.wait_for_answer()
    assert page.texts(".state")[-1] == "ended early: the context is too small"
    page.press("Go on without the oldest turns")
    page.until("return [...document.querySelectorAll('.state')].at(-1).innerText.startsWith('the oldest 2 turns are')")
    assert page.wait_for_answer() == "four words of answer"
    assert [message["content"][-1] for message in fake.bodies[-1]["messages"]] == ["2", "r", "3"]
    page.driver.refresh()
    page.until("return document.querySelectorAll('.message').length === 8")
    page.say("question number 4")  # the person need not say it again
    page.until("return document.querySelectorAll('.message').length === 10")
    assert page.wait_for_answer() == "four words of answer"
    assert [message["content"][-1] for message in fake.bodies[-1]["messages"]] == ["3", "r", "4"]
    assert page.texts(".assistant .state")[-1] == "the oldest turn is left out from here on"
    page.errors()  # of the refusal


def test_a_cut_answer_says_why(page: Browser, fake: FakeServer) -> None:
    figures = {"offspec": {**FIGURES, "num_prompt_tokens": 1}}
    fake.script = lambda body: iter(["two words", {"choices": [{"delta": {}, "finish_reason": "length"}]}, figures])
    page.say("hi")
    page.wait_for_answer()
    assert page.texts(".assistant .state") == ["cut at its greatest length"]
    fake.context = 3
    page.press("Regenerate")
    page.until("return document.querySelector('.assistant .state').innerText === 'the context is full'")


def test_a_second_tab_sees_what_the_first_one_does(page: Browser, fake: FakeServer) -> None:
    page.say("hi")
    page.wait_for_answer()
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    try:
        page.open(fake.url)
        page.until("return document.querySelectorAll('.message').length === 2")
        second = page.driver.current_window_handle
        page.driver.switch_to.window(first)
        page.say("more")
        page.until("return document.querySelectorAll('.message').length === 4")
        page.driver.switch_to.window(second)
        page.until("return document.querySelectorAll('.message').length === 4")
        page.until("return [...document.querySelectorAll('.assistant .body')].at(-1).innerText === 'Hello.'")
    finally:
        page.driver.close()
        page.driver.switch_to.window(first)


def test_hostile_text_stays_text(page: Browser, fake: FakeServer, tmp_path: Path) -> None:
    fake.script = lambda body: iter([*HOSTILE, passed("<b>x</b>")])
    turned = "\u202e".encode(sys.getfilesystemencoding(), "ignore").decode(sys.getfilesystemencoding())
    file = tmp_path / f"<img src=x onerror=alert(1)>`{turned}.txt"  # without the character where names cannot have it
    file.write_text("```\n<script>alert(1)</script>\n")
    page.find("#file").send_keys(str(file))
    page.until("return document.querySelectorAll('#files li').length === 1")
    page.say("<b>hi</b>")
    shown = page.wait_for_answer()
    for text in ("<img src=x onerror=", "<script>document.title='pwned'</script>", "<svg onload=alert(1)>", "<b>a</b>"):
        assert text in shown
    told = fake.bodies[0]["messages"][0]["content"]
    assert told.startswith(f"File {json.dumps(file.name, ensure_ascii=False)}:\n````\n```\n<script>")
    assert told.endswith("\n````\n\n<b>hi</b>")
    page.click("#sources")
    page.click("#insight-button")
    made = (
        "img, script:not([src^='/page/']), b, i, [onload], [onerror], [onclick], a:not([href^='http']):not([href^='#'])"
    )
    assert page.run("return document.querySelectorAll(arguments[0]).length", made) == 0
    assert "pwned" not in page.driver.title
    page.run("try { document.body.innerHTML = '<p>'; window.wasSet = true } catch {}")
    assert page.run("return window.wasSet") is None  # trusted types: no module can set HTML
    page.errors()  # of that attempt


def test_an_answer_looks_the_same_however_it_is_cut(page: Browser) -> None:
    others, is_kept, codes, formulas, emphasised, num_empty, num_items = page.driver.execute_async_script(
        SHOW_CUT, ANSWER
    )
    assert (others, is_kept) == ([], True)
    assert (codes, num_empty) == (CODES, 0)
    assert formulas == FORMULAS
    assert emphasised == ["one", "em", "em", "em", "good"]
    assert num_items == 8


def test_the_panel_shows_rates_and_trees(page: Browser, fake: FakeServer) -> None:
    fake.script = lambda body: iter(["one!", passed("one"), "two!", passed("two", 2)])
    page.say("hi")
    page.wait_for_answer()
    page.click("#insight-button")
    figures = page.text("#insight .figures")
    for text in ("8.5", "2.00", "4.20 GB at 11.2 of 12.0 GB/s"):
        assert text in figures
    assert page.text("#insight .place") == "pass 2 of 2"
    page.click("#insight [aria-label='Earlier pass']")
    assert page.text("#insight .place") == "pass 1 of 2"
    nodes = page.run(
        "return [...document.querySelectorAll('#insight .node')].map(n => [n.classList.value.trim(), n.textContent])"
    )
    assert ["node from-draft accepted", "one: draft, guessed 75.0 %one.75"] in nodes
    assert ["node from-lookup", "·two: lookup, guessed 50.0 %·two.50"] in nodes
    assert ["node from-target accepted", "!: target!"] in nodes
    page.click("#sources")
    spans = page.run("return [...document.querySelectorAll('.tokens span')].map(s => [s.className, s.textContent])")
    assert spans == [["from-draft", "one"], ["from-target", "!"], ["from-draft", "two"], ["from-target", "!"]]


def test_settings_and_keys(page: Browser, fake: FakeServer) -> None:
    fake.sampling = {"top_k": 20}
    page.keys("\ue00a" + "s")  # Alt+S
    page.until("return document.querySelector('#settings').open")
    page.until("return document.querySelector('#s-top_k').placeholder === '20'")  # the server's default
    page.find("#system").send_keys("Be brief.")
    page.find("#s-temperature").send_keys("0.5")
    page.run("document.querySelector('#thinking').value = 'off'")
    page.press("Done", "#settings")
    page.say("hi")
    page.wait_for_answer()
    body = fake.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["chat_template_kwargs"]) == (0.5, {"enable_thinking": False})
    page.keys("\ue00a" + "n")
    page.until("return document.querySelectorAll('.message').length === 0")
    page.run("document.activeElement.blur()")
    page.keys("?")
    page.until("return document.querySelector('#keys').open")


def test_conversations_are_renamed_and_searched(page: Browser, fake: FakeServer) -> None:
    page.say("first")
    page.wait_for_answer()
    page.keys("\ue00a" + "n")  # Alt+N
    page.until("return document.querySelectorAll('.message').length === 0")
    page.say("second")
    page.wait_for_answer()
    page.run(RENAME, "<b>Other</b>")
    page.until("return document.querySelector('#conversations .open .title')?.innerText === '<b>Other</b>'")
    page.driver.refresh()
    page.until("return document.activeElement?.id === 'prompt'")
    for text, titles in (("OTHER", ["<b>Other</b>"]), ("second", ["<b>Other</b>"]), ("fIrst", ["first"]), ("none", [])):
        page.find("#search").clear()
        page.find("#search").send_keys(text)
        shown = "return JSON.stringify([...document.querySelectorAll('#conversations .title')].map(e => e.innerText))"
        page.until(f"{shown} === arguments[0]", json.dumps(titles, separators=(",", ":")))
    assert page.text("#conversations") == "Nothing found."


def test_a_name_that_is_typed_outlives_a_new_list(page: Browser, fake: FakeServer) -> None:
    """Such as that of an answer that begins, or that of a search."""
    page.say("first")
    page.wait_for_answer()
    field = page.driver.execute_async_script(
        """
        const done = arguments[0];
        document.querySelector("#conversations .open [title=Rename]").click();
        document.getElementById("search").dispatchEvent(new Event("input"));
        import("/page/store.js").then(async ({ conversations }) => {
          for (let i = 0; i < 5; i++) await conversations();
          done(document.activeElement.getAttribute("aria-label"));
        });
        """
    )
    assert field == "Name of the conversation"


def test_it_fits_a_narrow_screen_and_any_direction(page: Browser, fake: FakeServer) -> None:
    fake.script = lambda body: iter(["```\n", "wide " * 99, "\n```\n\n", "سلام"])
    page.driver.set_window_size(400, 700)
    try:
        page.say("مرحبا")
        page.wait_for_answer()
        for selector in (".user .plain", ".assistant .prose > .block:last-child p"):
            script = "return getComputedStyle(document.querySelector(arguments[0])).direction"
            assert page.run(script, selector) == "rtl", selector
        for _ in range(2):  # without and with the panel
            assert page.run("return document.scrollingElement.scrollWidth <= innerWidth")
            page.click("#insight-button")
        page.click("#open-sidebar")
        assert page.find("#sidebar").is_displayed()
    finally:
        page.driver.set_window_size(1280, 800)


def test_of_several_models_one_is_chosen(page: Browser, fake: FakeServer) -> None:
    fake.names = ["one", "two"]
    page.driver.refresh()
    page.until("return document.querySelectorAll('#models option').length === 2")
    page.find("#models").send_keys("two")
    page.say("hi")
    page.wait_for_answer()
    assert fake.bodies[0]["model"] == "two"
    page.driver.refresh()
    page.until("return document.querySelector('#models').value === 'two'")


def test_the_key_is_asked_for(page: Browser, fake: FakeServer) -> None:
    fake.key = "secret"
    page.driver.refresh()
    page.until("return document.querySelector('#key-dialog').open")
    page.find("#asked-key").send_keys("secret\n")
    page.until("return document.querySelector('h1').innerText === '<i>fake</i>'")
    assert page.run("return localStorage.getItem('offspec.key')") is None


def test_conversations_are_exported_and_imported(page: Browser, fake: FakeServer) -> None:
    page.say("hi")
    page.wait_for_answer()
    script = "import('/page/store.js').then(async s => arguments[0](await s.imported(await s.exported())))"
    assert page.driver.execute_async_script(script) == 1
    page.driver.refresh()
    page.until("return document.querySelectorAll('#conversations li').length === 2")
    page.keys("\ue00a" + "\ue015")  # Alt+Down: the copy
    page.until("return document.querySelectorAll('.message').length === 2")
    refused = "import('/page/store.js').then(s => s.imported('{}')).catch(e => arguments[0](e.message))"
    assert "no conversations" in page.driver.execute_async_script(refused)


def test_axe_finds_no_serious_fault(page: Browser, fake: FakeServer) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is missing: scripts/fetch_axe")
    fake.script = lambda body: iter(["# Title\n\n- a\n\n```\ncode\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n", passed()])
    page.say("hi")
    page.wait_for_answer()
    page.click("#insight-button")
    page.run(AXE.read_text(encoding="utf-8"))
    for theme in ("light", "dark"):
        page.run("document.documentElement.dataset.theme = arguments[0]", theme)
        found = page.driver.execute_async_script(FAULTS)
        assert [fault for fault in found if fault[0] in ("serious", "critical")] == [], theme
    page.errors()  # axe tries what the policy forbids


# ------------------------------------------------------------------------------------------------ a real server


@pytest.fixture(scope="module")
def engine() -> Generator[Engine, None, None]:
    with Engine.load("builtin", device="cpu", context=512) as found:
        yield found


def test_a_real_answer_has_a_tree(browsers: Browser, engine: Engine) -> None:
    with served(engine, has_page=True) as (client, _):
        browsers.open(f"http://127.0.0.1:{client.port}/")
        browsers.until("return document.querySelector('h1').innerText === 'builtin'")
        browsers.say("def area(")
        assert browsers.wait_for_answer()
        browsers.click("#insight-button")
        assert browsers.run("return document.querySelectorAll('#insight .node').length") > 1
        browsers.press("Continue", ".assistant")
        browsers.until("return document.querySelector('.assistant .foot').innerText.startsWith('Regenerate\\nCopy')")
        _, answer = browsers.driver.execute_async_script(STORED)
        assert answer == engine.complete([{"role": "user", "content": "def area("}], SamplingParams(32))
        assert browsers.errors() == []
        with closing(client.open("GET", "/")) as connection:
            headers = connection.getresponse().headers
        assert all(headers[name] == value for name, value in HEADERS.items())


def test_the_page_can_be_left_out(client: Client) -> None:
    assert client.ask("GET", "/").status == 404
