"""The page of a server in a real browser: what is watched there, and what people do in it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from serving import Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request

Json = dict[str, Any]
WIDE = {"width": 1440, "height": 900}
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
# Names of other machines lead nowhere, so that a page which asked one would notice.
FLAGS = (
    "--no-sandbox",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--disable-background-networking",
    "--disable-component-update",
    "--font-render-hinting=none",
    "--disable-lcd-text",
    "--force-color-profile=srgb",
)


def why_no_browser() -> str:
    """Return why the page cannot be opened here; "" where it can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (make test-page installs it)"
    return "" if CHROMIUM else "no Chromium is installed (on Debian: apt install chromium)"


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


class Watch:
    """Notes what must not happen in a page: errors, forbidden requests, broken policies.

    `allow` what a test brings about itself.
    """

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.faults: list[str] = []
        self.asked: list[str] = []
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
        # A policy that is broken says so here, too.
        if message.type in ("error", "warning"):
            where = message.location.get("url", "")
            self.faults.append(f"console {message.type}: {message.text} ({where})")

    def _on_request(self, request: Request) -> None:
        self.asked.append(request.url)
        if not request.url.startswith((f"{self.url}/", "data:", f"blob:{self.url}/")):
            self.faults.append(f"request beyond the server: {request.url}")


@contextmanager
def watched(browser: Browser, url: str, **context: Any) -> Iterator[tuple[Page, Watch]]:
    """Open a page of its own, whose faults are an error at the end of the block."""
    options = {"viewport": WIDE, "base_url": url, "reduced_motion": "reduce", **context}
    opened = browser.new_context(**options)
    opened.set_default_timeout(10_000)
    watch = Watch(opened, url)
    try:
        yield opened.new_page(), watch
    finally:
        opened.close()
    watch.check()


class Desk:
    """A server and a page of it: looms are made over the API, and opened as people open them."""

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

    def of(self, path: str = "") -> str:
        return f"/looms/{self.loom['id']}{path}"

    def make(self, prompt: str = "Tell me a story about a fox.", **more: Any) -> Json:
        """Make a loom; what is asked and grown from now on is of it."""
        self.loom = self.ask("POST", "/looms", json={"prompt": prompt, **more})
        return self.loom

    def grow(self, node: int = 0, **body: Any) -> list[int]:
        """Grow children to their end, and return them. n 3, 12 tokens, seed 1 unless said."""
        asked = {"n": 3, "max_tokens": 12, "seed": 1, "force": True, "wait": True, **body}
        told = self.ask("POST", self.of(f"/nodes/{node}/generate"), json=asked)
        return [each["node"] for each in told.get("nodes") or told["branches"]]

    def nodes(self) -> dict[int, Json]:
        """All nodes as the server has them."""
        found: dict[int, Json] = {}
        after = None
        while True:
            query = {"limit": 1000, **({} if after is None else {"after": after})}
            told = self.ask("GET", self.of("/nodes"), params=query)
            found |= {each["node"]: each for each in told["data"]}
            after = told.get("next")
            if after is None:
                return found

    def endless(self) -> Json:
        """Sampling that no end token ends."""
        ends = self.served.service.models.lm().text.stop_ids
        return {"max_tokens": 1500, "logit_bias": {str(token): -1e6 for token in ends}}

    def wait_grown(self, timeout_s: float = 60) -> None:
        """Wait until nothing grows in the loom, on the server and on the page."""
        until = time.monotonic() + timeout_s
        while any(
            job["status"] in ("running", "queued") and job.get("loom") == self.loom["id"]
            for job in self.ask("GET", "/jobs")["data"]
        ):
            assert time.monotonic() < until, "it still grows"
            time.sleep(0.02)

    # In the page

    def visit(self, node: int | None = None) -> Page:
        """Open the page at the loom, and at a node of it."""
        at = "" if node is None else f"/{node}"
        self.page.goto(f"{self.served.url}/#{quote(self.loom['name'], safe='')}{at}")
        self.page.locator("footer.status, [role=contentinfo]").first.wait_for()
        self.page.locator("[role=treeitem]").first.wait_for()
        return self.page

    def open_loom(self, prompt: str = "Tell me a story about a fox.", **grow: Any) -> list[int]:
        """Make a loom, grow its first children as `grow` says, and open it in the page."""
        chat = grow.pop("template", True)
        self.make(prompt, template=chat)
        grown = self.grow(**grow) if grow else []
        self.visit()
        return grown

    @property
    def current(self) -> int:
        """The node that the tree shows as the current one."""
        row = self.page.locator("[role=treeitem][aria-current=true]")
        return int(row.get_attribute("data-node") or -1)

    def press(self, *keys: str) -> None:
        """Press keys as the page gets them while nobody types."""
        for key in keys:
            self.page.keyboard.press(key)

    def until(self, is_so: Callable[[], bool], what: str, timeout_s: float = 10) -> None:
        """Wait for something that the page or the server comes to."""
        end = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < end, f"in {timeout_s} s: {what}"
            self.page.wait_for_timeout(20)

    def shot(self, path: Path, masks: Sequence[str] = ("[data-varies]",)) -> bytes:
        """Take a picture; what changes by itself is masked."""
        self.page.evaluate("document.fonts.ready.then(() => true)")
        return self.page.screenshot(
            path=path,
            animations="disabled",
            caret="hide",
            mask=[self.page.locator(mask) for mask in masks],
            mask_color="#888888",
        )


class Gate:
    """Holds a served model between two of its steps, so that what grows stands still.

    A stand-in for a slow model: tokens, events and the page are the real ones.
    """

    def __init__(self, served: Served) -> None:
        self._engine = served.service.models.lm().engine
        self._forward = self._engine.forward
        self._turn = threading.Condition()
        self._left: int | None = None
        self._engine.forward = self._step  # type: ignore[method-assign]

    def hold(self, after: int = 0) -> None:
        """Let so many steps pass from now on, then none."""
        with self._turn:
            self._left = after
            self._turn.notify_all()

    def open(self) -> None:
        with self._turn:
            self._left = None
            self._turn.notify_all()

    def close(self) -> None:
        """Let the model be as it was."""
        self.open()
        del self._engine.forward

    def _step(self, rows: Any) -> Any:
        with self._turn:
            # Nobody waits for ever, should a test have failed meanwhile.
            self._turn.wait_for(lambda: self._left is None or self._left > 0, timeout=60)
            if self._left is not None:
                self._left -= 1
        return self._forward(rows)


@cache
def _axe() -> str:
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("axe is not installed (pip install --no-deps axe-playwright-python)")
    return (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")


def assert_accessible(page: Page) -> None:
    """Check that axe finds nothing: of the rules of WCAG and of best practice."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(_axe())
    found = page.evaluate("axe.run(document).then(({ violations }) => violations)")
    said = [
        f"{each['id']}: {each['help']}\n    {node['html']:.200}\n    {node['failureSummary']}"
        for each in found
        for node in each["nodes"][:4]
    ]
    assert not said, "axe:\n" + "\n".join(said)
