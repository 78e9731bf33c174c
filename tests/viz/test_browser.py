"""The exported page in a real browser."""

from __future__ import annotations

import shutil
import subprocess
import zlib
from pathlib import Path

import pytest

from weft.loom import Loom
from written_looms import open_written

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --hide-scrollbars"
).split()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed"),
]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    parents: list[int | None] = [None]
    for _ in range(200):
        parents += [len(parents) - 1, len(parents) - 1]
    loom: Loom = open_written(tmp_path / "x.loom.json", parents)
    loom.find("n1")._text = "<script>document.title='hacked'</script><img src=x>"
    loom.to_html(tmp_path / "page.html")
    return tmp_path / "page.html"


def chromium(page: Path, *flags: str) -> str:
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={page.parent / 'profile'}", *flags, page.as_uri()],
        capture_output=True,
        encoding="utf-8",
        check=True,
        timeout=120,
    )
    return done.stdout


def corner(png: Path) -> tuple[int, ...]:
    """Return the first pixel: nothing stands before it, so whatever the filter, it is itself."""
    data = png.read_bytes()
    parts, at = b"", 8
    while at < len(data):
        size = int.from_bytes(data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            parts += data[at + 8 : at + 8 + size]
        at += size + 12
    return tuple(zlib.decompress(parts)[1:4])


def test_the_browser_reads_what_was_written_and_runs_nothing(page: Path) -> None:
    seen = chromium(page, "--dump-dom")
    assert "<title>hacked" not in seen
    assert "<img" not in seen
    # Nothing was nested too deep: each list is still inside its fold.
    assert seen.count('<details class="fold"') == page.read_text(encoding="utf-8").count(
        '<details class="fold"'
    )
    assert seen.count("</ul></details></li>") == seen.count('<details class="fold"')


def test_the_page_is_light_and_dark(page: Path) -> None:
    light, dark = page.parent / "light.png", page.parent / "dark.png"
    chromium(page, "--blink-settings=preferredColorScheme=1", f"--screenshot={light}")
    chromium(page, "--blink-settings=preferredColorScheme=0", f"--screenshot={dark}")
    assert min(corner(light)) > 230
    assert max(corner(dark)) < 40
