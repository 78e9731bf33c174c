"""Take the picture of the page for README and docs: python -m tools.page_picture [FILE].

It serves the embedded model, grows a story twice, colours tokens by probability, and opens the card
of an unlikely token. It needs `make .venv/.browsing`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "page-light.png"
PROMPT = "Tell me a story about a fox."
GROWTH = {"n": 4, "max_tokens": 48, "wait": True}


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


def take(page: Page, url: str, path: Path) -> None:
    loom = post(url, "/looms", prompt=PROMPT)["name"]
    post(url, f"/looms/{loom}/nodes/0/generate", **GROWTH, seed=3)
    post(url, f"/looms/{loom}/nodes/1/generate", **GROWTH, seed=3)
    page.goto(f"{url}/#{loom}")
    page.get_by_text(PROMPT).first.wait_for()
    for key in ("ArrowRight", "ArrowRight", "p"):
        page.keyboard.press(key)
        page.wait_for_timeout(500)
    page.get_by_text("blanket", exact=False).first.hover()
    page.wait_for_timeout(1500)
    page.screenshot(path=path)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    with served() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium")
        page = browser.new_page(viewport={"width": 1280, "height": 720}, device_scale_factor=1.5)
        take(page, url, path)


if __name__ == "__main__":
    main()
