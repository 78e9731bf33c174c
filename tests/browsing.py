"""The page of a server in a real browser: checks of the page, and actions of its users."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import pytest

from serving import Served

if TYPE_CHECKING:
    from playwright.sync_api import (
        Browser,
        BrowserContext,
        ConsoleMessage,
        Locator,
        Page,
        Request,
    )

Json = dict[str, Any]
WAIT_MS = 30_000  # for what a page comes to, on a slow and busy machine
WAIT_S = WAIT_MS / 1000
WIDE = {"width": 1440, "height": 900}
# The first one draws the same pages with a third less CPU time: it has no window to draw.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
# Names of other hosts do not resolve, so requests to them fail.
FLAGS = (
    "--no-sandbox",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--disable-background-networking",
    "--disable-component-update",
    "--font-render-hinting=none",
    "--disable-lcd-text",
    "--force-color-profile=srgb",
)


# Scripts that delay messages to the page. All messages arrive, and in order.
LATE = {
    "news": """(() => {
      const listen = EventSource.prototype.addEventListener
      EventSource.prototype.addEventListener = function (name, heard, ...more) {
        const late = (event) => setTimeout(() => heard.call(this, event), 400)
        const take = (event) => (event instanceof MessageEvent ? late : heard.bind(this))(event)
        return listen.call(this, name, take, ...more)
      }
    })()""",
    "answers": """(() => {
      const ask = window.fetch
      window.fetch = async (...asked) => {
        const answer = await ask(...asked)
        await new Promise((go) => setTimeout(go, 400))
        return answer
      }
    })()""",
}
# Keys of LATE that apply to every page: `pytest --late`.
always_late: set[str] = set()


def why_no_browser() -> str:
    """Return the reason why no browser can be started; "" if one can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (make test-page installs it)"
    package = "chromium-headless-shell"
    return "" if CHROMIUM else f"no Chromium is installed (on Debian: apt install {package})"


@contextmanager
def browsing() -> Iterator[Browser]:
    """Have a Chromium until the end of the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def expect(what: Any) -> Any:
    """Playwright's `expect` with a timeout for slow machines; it is imported on first use."""
    from playwright.sync_api import expect

    expect.set_options(timeout=WAIT_MS)
    return expect(what)


class Watch:
    """Records the faults of a page: errors, forbidden requests, policy violations.

    `allow` permits faults that the test causes itself.
    """

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.faults: list[str] = []
        self.requested: list[str] = []
        self._allowed: list[re.Pattern[str]] = []
        context.on("console", self._on_console)
        context.on("weberror", lambda error: self.faults.append(f"error: {error.error}"))
        context.on("request", self._on_request)

    def allow(self, pattern: str) -> None:
        self._allowed.append(re.compile(pattern))

    def check(self) -> None:
        left = [
            fault for fault in self.faults if not any(each.search(fault) for each in self._allowed)
        ]
        assert not left, "the page had faults:\n" + "\n".join(left)

    def _on_console(self, message: ConsoleMessage) -> None:
        # Policy violations are logged here, too.
        if message.type in ("error", "warning"):
            where = message.location.get("url", "")
            self.faults.append(f"console {message.type}: {message.text} ({where})")

    def _on_request(self, request: Request) -> None:
        self.requested.append(request.url)
        if not request.url.startswith((f"{self.url}/", "data:", f"blob:{self.url}/")):
            self.faults.append(f"request beyond the server: {request.url}")


@contextmanager
def watched(
    browser: Browser, url: str, late: Collection[str] = (), **context: Any
) -> Iterator[tuple[Page, Watch]]:
    """Open a page in a context of its own, and raise its faults at the end of the block.

    late: keys of LATE. context: options of the browser context.
    """
    options = {"viewport": WIDE, "base_url": url, "reduced_motion": "reduce", **context}
    opened = browser.new_context(**options)
    opened.set_default_timeout(WAIT_MS)
    for kind in always_late.union(late):
        opened.add_init_script(LATE[kind])
    watch = Watch(opened, url)
    try:
        yield opened.new_page(), watch
    finally:
        opened.close()
    watch.check()


class Desk:
    """A server and its page: looms are created by the API and opened as users open them."""

    def __init__(self, served: Served, page: Page, watch: Watch) -> None:
        self.served = served
        self.page = page
        self.watch = watch
        self.loom: Json = {}

    # Over the API

    def ask(self, method: str, path: str, **more: Any) -> Any:
        answer = self.served.client.request(method, f"/api/v1{path}", **more)
        assert answer.status_code < 300, answer.text
        return answer.json()

    def add_model(self, name: str) -> None:
        """Load the embedded model under another name, unless the server has it already."""
        if name not in {each["id"] for each in self.ask("GET", "/models")["data"]}:
            self.ask("POST", "/models", json={"source": "tiny", "id": name, "wait": True})

    def of(self, path: str = "") -> str:
        return f"/looms/{self.loom['id']}{path}"

    def make(self, prompt: str = "Tell me a story about a fox.", **more: Any) -> Json:
        """Create a loom, which later calls use."""
        self.loom = self.ask("POST", "/looms", json={"prompt": prompt, **more})
        return self.loom

    def grow(self, node: int = 0, **body: Any) -> list[int]:
        """Grow children to their end and return them; by default 3 of 12 tokens with seed 1."""
        body = {"n": 3, "max_tokens": 12, "seed": 1, "force": True, "wait": True, **body}
        reply = self.ask("POST", self.of(f"/nodes/{node}/generate"), json=body)
        return [each["node"] for each in reply.get("nodes") or reply["branches"]]

    def nodes(self) -> dict[int, Json]:
        """All nodes as the server has them."""
        rows: dict[int, Json] = {}
        after = None
        while True:
            query = {"limit": 1000, **({} if after is None else {"after": after})}
            reply = self.ask("GET", self.of("/nodes"), params=query)
            rows |= {each["node"]: each for each in reply["data"]}
            after = reply.get("next")
            if after is None:
                return rows

    def endless(self) -> Json:
        """Sampling that no end token ends."""
        ends = self.served.service.models.lm().text.stop_ids
        return {"max_tokens": 1500, "logit_bias": {str(token): -1e6 for token in ends}}

    def wait_grown(self, timeout_s: float = 240) -> None:
        """Wait until nothing grows in the loom."""
        until = time.monotonic() + timeout_s
        while self.ask("GET", self.of())["growing"]:
            assert time.monotonic() < until, "it still grows"
            time.sleep(0.02)

    def wait_known(self) -> None:
        """Wait until the page knows all nodes that the server has, and that none grows."""
        foot = self.page.get_by_role("contentinfo")
        self.wait_grown()
        expect(foot.locator(".n-nodes")).to_have_text(
            re.compile(rf"^{len(self.nodes()):,} nodes?$")
        )
        expect(foot.locator(".growing")).to_have_count(0)

    @property
    def address(self) -> tuple[str, str]:
        """The names of the loom and of the node in the page's address."""
        name, _, node = self.page.url.partition("#")[2].partition("/")
        return unquote(name), node

    def reload(self) -> None:
        """Reload the page once its address names the current node."""
        self.until(lambda: self.address[1] == str(self.current), "the address of the node")
        self.page.reload()

    def open_named(self) -> Json:
        """Use the loom that the page shows and its address names."""
        self.until(lambda: "#" in self.page.url, "a loom is open")
        name, _ = self.address
        self.loom = self.ask("GET", f"/looms/{quote(name, safe='')}")
        return self.loom

    # In the page

    def sets(self, **values: Any) -> None:
        """Store sampling settings in the browser before the page is opened."""
        for name in ("settings", "settings.chat"):
            self.remembers(name, {"temperature": 0.8, **values})

    def remembers(self, name: str, value: Any) -> None:
        """Store a value in the browser, unless it has one of this name."""
        name = json.dumps(f"weft.{name}")
        self.page.add_init_script(
            f"localStorage.getItem({name}) ?? "
            f"localStorage.setItem({name}, {json.dumps(json.dumps(value))})"
        )

    def visit(self, node: int | None = None) -> Page:
        """Open the page at the loom, or at one of its nodes."""
        at = "" if node is None else f"/{node}"
        self.page.goto(f"{self.served.url}/#{quote(self.loom['name'], safe='')}{at}")
        self.page.get_by_role("contentinfo").wait_for()
        self.tree.get_by_role("treeitem").first.wait_for()
        return self.page

    def open_loom(self, prompt: str = "Tell me a story about a fox.", **grow: Any) -> list[int]:
        """Create a loom, grow its first children with the options `grow`, and open its page."""
        chat = grow.pop("template", True)
        self.make(prompt, template=chat)
        grown = self.grow(**grow) if grow else []
        self.visit()
        return grown

    @property
    def tree(self) -> Locator:
        return self.page.get_by_role("tree", name="Tree", exact=True)

    @property
    def text(self) -> Locator:
        """The text of the path."""
        return self.page.locator("article[aria-label='Text of the path']")

    def row(self, node: int) -> Locator:
        """The row of a node in the tree."""
        return self.tree.locator(f"[role=treeitem][data-node='{node}']")

    def part(self, node: int) -> Locator:
        """The part of the path's text that is a node's."""
        return self.text.locator(f"[data-node='{node}']")

    def lane(self, node: int) -> Locator:
        return self.page.locator(f"section[aria-label=Growing] article[data-lane='{node}']")

    @property
    def lanes(self) -> list[int]:
        """The nodes that have a lane."""
        articles = self.page.locator("section[aria-label=Growing] article[data-lane]")
        return [
            int(each) for each in articles.evaluate_all("all => all.map((e) => e.dataset.lane)")
        ]

    @property
    def current(self) -> int:
        """The node that the tree shows as the current one."""
        row = self.tree.locator("[role=treeitem][aria-current=true]")
        return int(row.get_attribute("data-node") or -1)

    def press(self, *keys: str) -> None:
        """Press keys while no text field has the focus."""
        for key in keys:
            self.page.keyboard.press(key)

    def until(self, is_so: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        """Wait for a state of the page or the server."""
        end = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < end, f"in {timeout_s} s: {what}"
            self.page.wait_for_timeout(20)

    def painted(self) -> None:
        """Wait until the page has painted its current state in its own fonts."""
        self.page.evaluate(_PAINTED)

    def shot(self, path: Path | None = None) -> bytes:
        """Take a picture without motion and without elements that vary between runs."""
        self.page.evaluate(_FREEZE)
        try:
            return self.page.screenshot(path=path, animations="disabled", caret="hide")
        finally:
            self.page.evaluate(_RESUME)


# Work that waits for a frame runs in the first; after the second it is visible.
_PAINTED = """async () => {
  await document.fonts.ready
  for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame)
}"""
# Texts that vary are replaced by a dash for the picture, because a mask would vary in width.
# Drawings that vary are hidden.
_FREEZE = """async () => {
  await document.fonts.ready
  window.weftVaried = []
  for (const each of document.querySelectorAll("[data-varies=drawn]")) {
    each.style.visibility = "hidden"
  }
  for (const each of document.querySelectorAll("[data-varies]")) {
    const walker = document.createTreeWalker(each, NodeFilter.SHOW_TEXT)
    for (let text = walker.nextNode(), i = 0; text; text = walker.nextNode(), i++) {
      window.weftVaried.push([text, text.data])
      text.data = i ? "" : "\u2013"
    }
  }
  for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame)
}"""
_RESUME = """() => {
  for (const [text, data] of window.weftVaried) text.data = data
  for (const each of document.querySelectorAll("[data-varies=drawn]")) {
    each.style.visibility = ""
  }
  delete window.weftVaried
}"""


class Gate:
    """Stops a served model between two of its steps.

    A stand-in for a slow model: tokens, events and the page are the real ones.
    """

    def __init__(self, served: Served) -> None:
        self._engine = served.service.models.lm().engine
        self._forward = self._engine.forward
        self._turn = threading.Condition()
        self._left: int | None = None
        self._n_waiting = 0
        self._broken = ""
        self._engine.forward = self._step  # type: ignore[method-assign]

    def fail(self, message: str) -> None:
        """Let the next step fail like a broken device."""
        with self._turn:
            self._broken = message
            self._turn.notify_all()

    def hold(self, after: int = 0) -> None:
        """Let `after` more steps run, then stop the model."""
        with self._turn:
            self._left = after
            self._turn.notify_all()

    def open(self) -> None:
        with self._turn:
            self._left = None
            self._turn.notify_all()

    def wait_stopped(self, timeout_s: float = 60) -> None:
        """Wait until the model has run all permitted steps and waits before the next."""
        with self._turn:
            is_stopped = self._turn.wait_for(
                lambda: self._left == 0 and self._n_waiting > 0, timeout_s
            )
        assert is_stopped, "the model has no step to take"

    def close(self) -> None:
        """Remove the gate from the model."""
        self.open()
        del self._engine.forward

    def _step(self, rows: Any) -> Any:
        with self._turn:
            self._n_waiting += 1
            self._turn.notify_all()
            # The wait has a limit, in case the test has failed.
            self._turn.wait_for(
                lambda: self._left is None or self._left > 0 or self._broken, timeout=120
            )
            self._n_waiting -= 1
            if self._broken:
                message, self._broken = self._broken, ""
                raise RuntimeError(message)
            if self._left is not None:
                self._left -= 1
        return self._forward(rows)


@cache
def _axe() -> str:
    spec = importlib.util.find_spec("axe_playwright_python")
    if spec is None or spec.origin is None:
        pytest.skip("axe is not installed (pip install --no-deps axe-playwright-python)")
    return (Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8")


def assert_accessible(page: Page) -> None:
    """Check that axe reports no violation of WCAG or of best practice."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(_axe())
    violations = page.evaluate("axe.run(document).then(({ violations }) => violations)")
    lines = [
        f"{each['id']}: {each['help']}\n    {node['html']:.200}\n    {node['failureSummary']}"
        for each in violations
        for node in each["nodes"][:4]
    ]
    assert not lines, "axe:\n" + "\n".join(lines)
