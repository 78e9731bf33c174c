"""Draw the pictures of the page for README and docs: python -m tools.page_picture [FOLDER].

`page-light.png`: a story of the embedded model grows sentence by sentence. Its tokens are coloured
by probability, and the card of a token shows how the story could end instead. `page-dark.png`: a
search solves the Game of 24. Seeds are fixed. It needs `make .venv/.browsing`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
STORY = "Tell me a story about a fox."
GAME = "Use 4 9 10 13 to make 24."
SEED = 6


def _browser() -> str | None:
    """Return the path of Debian's Chromium; None for Playwright's own."""
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")


@contextmanager
def served() -> Iterator[str]:
    """Run `weft serve` with looms of its own; yield its address."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as home:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "weft", "serve", "--port", str(port), "--no-browser"]
        process = subprocess.Popen(command, env={**os.environ, "WEFT_HOME": home})
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url)
            yield url
        finally:
            process.terminate()
            process.wait(30)


def wait_until_ready(url: str) -> None:
    for _ in range(120):
        try:
            urllib.request.urlopen(f"{url}/readyz", timeout=2)
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("the server did not become ready within a minute")


def post(url: str, path: str, **body: Any) -> Any:
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/api/v1{path}", data, headers)
    return json.load(urllib.request.urlopen(request, timeout=60))


def grow(url: str, loom: str, node: int, **options: Any) -> list[int]:
    """Grow four branches below a node. Return their numbers."""
    path = f"/looms/{loom}/nodes/{node}/generate"
    grown = post(url, path, n=4, max_tokens=200, seed=SEED, wait=True, **options)
    return [each["node"] for each in grown["nodes"]]


def draw_story(page: Page, url: str) -> None:
    loom = post(url, "/looms", prompt=STORY)["name"]
    opening = grow(url, loom, 0, stop=["."])[0]
    event = grow(url, loom, opening, stop=["."])[0]
    ending = grow(url, loom, event)[1]  # the card of its last sentence covers no text
    page.goto(f"{url}/#{loom}/{ending}")
    text = page.locator(f'.path [data-node="{ending}"]')
    text.wait_for()
    page.keyboard.press("p")
    page.wait_for_timeout(1000)
    page.mouse.move(*text.evaluate(LAST_SENTENCE))
    page.get_by_role("region", name="Token").wait_for()


# The middle of the first two characters of the last sentence.
LAST_SENTENCE = """(node) => {
  const texts = document.createTreeWalker(node, NodeFilter.SHOW_TEXT)
  const parts = []
  while (texts.nextNode()) parts.push(texts.currentNode)
  let start = parts.map((part) => part.data).join("").lastIndexOf(". ") + 2
  for (const part of parts) {
    if (start < part.length) {
      const range = new Range()
      range.setStart(part, start)
      range.setEnd(part, Math.min(start + 2, part.length))
      const box = range.getBoundingClientRect()
      return [box.x + box.width / 2, box.y + box.height / 2]
    }
    start -= part.length
  }
}"""


def draw_search(page: Page, url: str) -> None:
    loom = post(url, "/looms", prompt=GAME)["name"]
    page.goto(f"{url}/#{loom}")
    page.get_by_text(GAME).first.wait_for()
    page.keyboard.press("Shift+R")
    page.get_by_role("radio", name="Tree of thoughts").first.check()
    page.locator("#run-budget_tokens").fill("")
    page.locator("#run-seed").fill(str(SEED))
    page.get_by_role("button", name="Start").click()
    page.get_by_text("Checked: correct.").wait_for(timeout=120_000)
    page.get_by_role("button", name="Go to the answer").click()
    page.get_by_role("button", name="Do not show this again").click()


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    pictures: dict[Literal["light", "dark"], Any] = {"light": draw_story, "dark": draw_search}
    with served() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_browser())
        for scheme, draw in pictures.items():
            page = browser.new_page(
                viewport={"width": 1280, "height": 720},
                device_scale_factor=1.5,
                color_scheme=scheme,
            )
            draw(page, url)
            page.wait_for_timeout(1500)
            page.screenshot(path=folder / f"page-{scheme}.png")


if __name__ == "__main__":
    main()
