"""Pictures of every state of the page: `make screens` writes them into build/screens.

python -m tests.page.screens [STATE …] [--accept]

--accept makes them what `tests/page/test_states.py` compares with.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from browsing import browsing, why_no_browser
from tests.page.states import STATES, Stage, State

if TYPE_CHECKING:
    from PIL.Image import Image
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "screens"
KEPT = Path(__file__).with_name("screens")
THEMES = ("light", "dark")
SIZES = ((1440, 900), (1024, 768), (390, 844))
SCRIPTS = ("ar", "he", "hi", "ja", "ko", "th", "zh-cn")
NEAR = 40  # of 255, in any channel: what a pixel may differ by
SHARE = 0.005  # of pixels that may differ by more


def drawn(stage: Stage, state: State) -> Iterator[tuple[str, bytes]]:
    """Yield the names and pictures of a state."""
    for width, theme in looks(stage, state):
        yield f"{state.name}-{theme}-{width}", stage.desk.shot()


def looks(
    stage: Stage,
    state: State,
    sizes: Sequence[tuple[int, int]] = SIZES,
    themes: Sequence[str] = THEMES,
) -> Iterator[tuple[int, str]]:
    """Show a state in each width and theme."""
    page = stage.desk.page
    for width, height in sizes:
        page.set_viewport_size({"width": width, "height": height})
        tab = page.get_by_role("tab", name=state.pane)
        if width < 800 and state.pane and tab.is_visible():
            tab.click()
        page.mouse.move(0, 0)
        for theme in themes:
            page.emulate_media(color_scheme=theme, reduced_motion="reduce")
            page.wait_for_timeout(60)
            yield width, theme


def halved(png: bytes) -> Image:
    """Return a picture as it is kept: half as wide and high, without losses."""
    from PIL import Image

    return Image.open(io.BytesIO(png)).convert("RGB").reduce(2)


def difference(one: Image, other: Image) -> float:
    """Return the share of pixels that are not nearly the same."""
    from PIL import ImageChops

    if one.size != other.size:
        return 1.0
    bands = ImageChops.difference(one, other).split()
    largest = ImageChops.lighter(ImageChops.lighter(bands[0], bands[1]), bands[2])
    counts = largest.histogram()
    return sum(counts[NEAR + 1 :]) / (one.width * one.height)


def fingerprint(browser: Browser) -> dict[str, Any]:
    """Return the browser and the fallback fonts, on which pictures also depend."""
    fonts = []
    if shutil.which("fc-match"):
        for wanted in ("serif", *(f"serif:lang={each}" for each in SCRIPTS), "emoji"):
            match = subprocess.run(["fc-match", wanted], capture_output=True, check=True)
            fonts.append(match.stdout.decode("utf-8").partition(":")[0])
    return {"chromium": browser.version.partition(".")[0], "fonts": sorted(set(fonts))}


def sheet(names: set[str]) -> str:
    """Return a page with all pictures, named, a state a row."""
    rows = []
    for state in STATES:
        if f"{state}-{THEMES[0]}-{SIZES[0][0]}" not in names:
            continue
        cells = "".join(
            f'<figure><img loading="lazy" width="{width // 3}" src="{state}-{theme}-{width}.png" '
            f'alt=""><figcaption>{html.escape(state)} · {theme} · {width}</figcaption></figure>'
            for width, _ in SIZES
            for theme in THEMES
        )
        rows.append(f"<h2>{html.escape(state)}</h2><div>{cells}</div>")
    style = (
        "body{font:14px sans-serif;background:#bbb;margin:16px}div{display:flex;gap:12px;"
        "align-items:flex-start}figure{margin:0}img{display:block;border:1px solid #888}"
    )
    return f"<!doctype html><title>Screens of Weft</title><style>{style}</style>{''.join(rows)}"


def main(arguments: list[str]) -> int:
    """Draw states, all unless some are named. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("states", nargs="*", choices=[*STATES, []])
    parser.add_argument("--accept", action="store_true")
    options = parser.parse_args(arguments)
    if why := why_no_browser():
        print(f"no screens: {why}", file=sys.stderr)
        return 0
    BUILT.mkdir(parents=True, exist_ok=True)
    failed, names = [], []
    with browsing() as browser:
        for name in options.states or STATES:
            began = time.monotonic()
            try:
                with ExitStack() as stack:
                    stage = Stage(browser, stack)
                    STATES[name].make(stage)
                    for picture, png in drawn(stage, STATES[name]):
                        (BUILT / f"{picture}.png").write_bytes(png)
                        names.append(picture)
                        if options.accept:
                            KEPT.mkdir(exist_ok=True)
                            halved(png).save(KEPT / f"{picture}.webp", lossless=True, method=6)
            except Exception as error:  # the others are drawn all the same
                failed.append(name)
                print(f"{name}: {error}", file=sys.stderr)
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        if options.accept:
            (KEPT / "drawn-by.json").write_text(json.dumps(fingerprint(browser)) + "\n")
    there = {file.stem for file in BUILT.glob("*.png")}
    (BUILT / "index.html").write_text(sheet(there), encoding="utf-8")
    print(f"{len(names)} pictures; {BUILT / 'index.html'} shows them all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
