"""The page in a real Chromium: how soon it is there, opens a loom of many nodes, and follows a key.

    python -m benchmarks.page [--nodes 10000] [--rounds 5] [--chromium PATH]

Times are measured in the page, from a key to the frame that shows what came of it. The server is a
process of its own and competes for the cores, as it does on a user's machine. Needs playwright.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx2 as httpx

from .common import median, report
from .server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Checks a condition in every frame, and returns the time when that frame has been painted.
WATCH = """
window.weftUntil = (isSo, began) => new Promise((done, fail) => {
  setTimeout(() => fail(new Error(`never: ${isSo}`)), 30000)
  const look = () => isSo()
    ? setTimeout(() => done(performance.now() - began))
    : requestAnimationFrame(look)
  look()
})
for (const name of ["keydown", "click"])
  addEventListener(name, (event) => { window.weftKey = event.timeStamp }, true)
"""
CURRENT = "document.querySelector('[role=treeitem][aria-current=true]')?.dataset.node"
ROWS = "document.querySelectorAll('[role=treeitem]').length"


def main() -> None:
    """Measure all, and print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keys", type=int, default=40)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with Server("tiny") as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=args.chromium, args=["--no-sandbox", "--enable-precise-memory-info"]
        )
        large = brought(server.url, args.nodes)
        results: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for name, value in measured(browser, server.url, large, args):
                results.setdefault(name, []).append(value)
        version = browser.version
        browser.close()
    rows = [
        {"what": name, "median": median(values), "worst": max(values), "bound": BOUNDS.get(name)}
        for name, values in results.items()
    ]
    report("page", rows, nodes=args.nodes, rounds=args.rounds, chromium=version)


BOUNDS = {
    "first paint, ms": 1000,
    "open, first rows, ms": 1000,
    "open, all nodes, ms": 2000,
    "arrow key, median ms": 50,
    "arrow key, 95th ms": 50,
    "search, ms": 200,
    "map frame, median ms": 34,
    "remove a third, ms": 200,
    "lanes after the key, ms": 100,
    "rows in the page": 200,
    "script heap, MB": 200,
}


def brought(url: str, n_nodes: int) -> dict[str, Any]:
    """Bring the server a loom of so many nodes, three children at each; return the loom."""
    empty = {"tokens": [5, 7], "logprobs": [], "entropies": [], "params": None, "lineage": []}
    ended = {"finish_reason": None, "stop_string": None, "terminal": False, "score": None}
    file = {
        "format": "weft.loom",
        "version": 1,
        "created": "2026-01-01T00:00:00+00:00",
        "model": {"name": "written", "fingerprint": "f", "n_vocab": 64},
        "prompt": {"user_prompt": "many", "chat_template_used": False},
        "nodes": [
            {
                "id": f"n{at}",
                "parent": None if at == 0 else (at - 1) // 3,
                "text": f"node {at} of many ",
                "meta": {},
                **empty,
                **ended,
            }
            for at in range(n_nodes)
        ],
    }
    with httpx.Client(base_url=url, timeout=120) as client:
        answer = client.post("/api/v1/import", content=json.dumps(file).encode())
        answer.raise_for_status()
        (loom,) = answer.json()["looms"]
        return dict(loom)


def measured(
    browser: Browser, url: str, large: dict[str, Any], args: argparse.Namespace
) -> list[tuple[str, float]]:
    """Open the page twice, and return what was measured."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.add_init_script(WATCH)
    page = context.new_page()
    page.goto(url)
    page.get_by_role("button", name="Grow").first.wait_for()
    results = [("first paint, ms", painted(page))]
    results.append(("lanes after the key, ms", lanes(page, url)))
    context.close()
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.add_init_script(WATCH)
    page = context.new_page()
    page.goto(f"{url}/#{large['name']}")
    results.append(("open, first rows, ms", when(page, f"{ROWS} > 10")))
    all_rows = f"document.querySelector('[role=tree]')?.scrollHeight > {0.9 * 28 * args.nodes}"
    results.append(("open, all nodes, ms", when(page, all_rows)))
    keys = sorted(arrow_keys(page, args.keys))
    results.append(("arrow key, median ms", median(keys)))
    results.append(("arrow key, 95th ms", keys[int(0.95 * len(keys))]))
    results.append(("rows in the page", page.evaluate(ROWS)))
    results.append(("search, ms", searched(page, args.nodes)))
    results.append(("remove a third, ms", removed(page, args.nodes)))
    results.append(("map frame, median ms", map_frame(page)))
    results.append(("script heap, MB", page.evaluate("performance.memory.usedJSHeapSize") / 1e6))
    context.close()
    return results


def painted(page: Page) -> float:
    return float(
        page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    )


def when(page: Page, is_so: str) -> float:
    """Wait for something from the page's beginning on."""
    return float(page.evaluate(f"weftUntil(() => {is_so}, 0)"))


def after(page: Page, press: Callable[[], object], is_so: str) -> float:
    """Return the time from a key to the frame in which something is so."""
    page.evaluate(
        f"window.weftKey = 0; window.weftSeen = weftUntil(() => weftKey && ({is_so}), 0)"
        ".then((now) => now - weftKey); null"
    )
    press()
    return float(page.evaluate("weftSeen"))


def arrow_keys(page: Page, n_keys: int) -> list[float]:
    """Go through the tree: down the sides, along siblings, and up again."""
    times = []
    page.keyboard.press("r")
    page.wait_for_timeout(100)
    keys = ["ArrowRight", "ArrowDown", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowRight",
            "ArrowLeft", "ArrowLeft"]  # fmt: skip
    for at in range(n_keys):
        key = keys[at % len(keys)]
        now = page.evaluate(CURRENT)
        times.append(
            after(page, lambda key=key: page.keyboard.press(key), f"{CURRENT} !== '{now}'")
        )
    return times


def searched(page: Page, n_nodes: int) -> float:
    page.keyboard.press("/")
    page.keyboard.type(f"node {n_nodes - 2} o")
    time = after(page, lambda: page.keyboard.press("f"), f"{ROWS} < 20")
    page.keyboard.press("Escape")
    when(page, f"{ROWS} > 20")
    return time


def removed(page: Page, n_nodes: int) -> float:
    """Remove a third of all nodes, and bring them back."""
    tall = "document.querySelector('[role=tree]').scrollHeight"
    page.keyboard.press("r")
    page.keyboard.press("1")
    before = page.evaluate(tall)
    page.keyboard.press("Delete")
    yes = page.get_by_role("dialog").get_by_role("button", name="Remove", exact=True)
    time = after(page, yes.click, f"{tall} < {0.8 * before}")
    page.keyboard.press("u")
    when(page, f"{tall} >= {before}")
    return time


def map_frame(page: Page) -> float:
    """Turn the wheel over the tree's full map, and return the time from a turn to its frame."""
    page.get_by_role("tab", name="Map").click()
    page.keyboard.press("9")
    page.wait_for_timeout(500)
    took = page.evaluate(
        """async () => {
          const canvas = document.querySelector('.map-canvas')
          const { left, top } = canvas.getBoundingClientRect()
          const took = []
          for (let i = 0; i < 30; i++) {
            canvas.dispatchEvent(new WheelEvent('wheel', { deltaY: i % 2 ? 60 : -60,
              clientX: left + 200, clientY: top + 300, bubbles: true, cancelable: true }))
            const began = performance.now()
            await new Promise(requestAnimationFrame)
            took.push(performance.now() - began)
          }
          return took
        }"""
    )
    return float(median(took))


def lanes(page: Page, url: str) -> float:
    """Grow eight branches by a key, and return when they stood there."""
    with httpx.Client(base_url=url) as client:
        loom = client.post("/api/v1/looms", json={"prompt": "Tell me a story about a fox."}).json()
    page.evaluate("localStorage.setItem('weft.settings', JSON.stringify({ n: 8, max_tokens: 32 }))")
    page.goto(f"{url}/#{loom['name']}")
    page.reload()
    page.get_by_role("treeitem").first.wait_for()
    time = after(
        page,
        lambda: page.keyboard.press("g"),
        "document.querySelectorAll('article[data-lane]').length === 8",
    )
    page.wait_for_timeout(1000)
    return time


if __name__ == "__main__":
    main()
