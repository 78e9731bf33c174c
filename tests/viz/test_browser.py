"""The exported page in a real browser."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

from weft.loom import Loom
from weft.viz.html import LARGE
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


def driven(page: Path, script: str, *flags: str) -> Any:
    """Return what an async function body returns in the page.

    The page is opened without its policy: that would forbid the script, which is not its own.
    """
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    run = (
        "(async () => {" + script + "})().catch((error) => ({ error: String(error) }))"
        ".then((value) => { const output = document.createElement('pre'); output.id = 'output';"
        " output.textContent = JSON.stringify(value); document.body.append(output); });"
    )
    opened = page.with_name("driven.html")
    opened.write_text(text.replace("</body>", f"<script>{run}</script></body>"), encoding="utf-8")
    observed = chromium(opened, "--virtual-time-budget=20000", *flags, "--dump-dom")
    result = re.search(r'<pre id="output">(.*?)</pre>', observed, re.DOTALL)
    assert result is not None, observed[-2000:]
    return json.loads(html.unescape(result[1]))


# Helpers for tests in the page: keys as a keyboard sends them, and the visible nodes.
TOOLS = """
const $ = (what) => document.querySelector(what);
const all = (what) => [...document.querySelectorAll(what)];
const press = (key) =>
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const visible = () => all(".node").filter((node) => node.checkVisibility()).map((node) => node.id);
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const stops = () => all(".tree summary").filter((each) => each.tabIndex === 0);
"""


@pytest.fixture
def bush(tmp_path: Path) -> Path:
    """120 nodes: three branches at each, four deep; the path to the last leaf is marked."""
    parents: list[int | None] = [None]
    for parent in range(40):
        parents += [parent] * 3
    loom: Loom = open_written(tmp_path / "bush.loom.json", parents)
    assert loom.count_children() - 1 == 120 > LARGE
    loom.leaves[-1]._text = "the last leaf"
    loom.leaves[20].logprobs = [-0.5, -0.7]
    loom.to_html(tmp_path / "bush.html", mark=loom.leaves[-1])
    return tmp_path / "bush.html"


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


def test_browser_reads_the_page_and_runs_nothing_of_its_texts(page: Path) -> None:
    observed = chromium(page, "--dump-dom")
    assert "<title>hacked" not in observed
    assert "<img" not in observed
    # Nothing was nested too deep: each list is still inside its fold.
    observed = observed.partition("<script>")[0]
    written = page.read_text(encoding="utf-8").partition("<script>")[0]
    assert observed.count('<details class="fold"') == written.count('<details class="fold"') > 100
    assert observed.count("</ul></details></li>") == observed.count('<details class="fold"')


def test_policy_allows_the_pages_own_script_and_no_other(page: Path) -> None:
    assert '<div class="tools">' in chromium(page, "--dump-dom")
    text = page.read_text(encoding="utf-8")
    other = page.with_name("other.html")
    other.write_text(text.replace('"use strict";', '"use strict"; '), encoding="utf-8")
    assert '<div class="tools" hidden="">' in chromium(other, "--dump-dom")


def test_tree_is_folded_unfolded_and_restored(bush: Path) -> None:
    result = driven(
        bush,
        TOOLS
        + """
        const first = visible();
        $("#open").click(); const open = visible().length;
        $("#fold").click(); const folded = visible().length;
        $("#path").click();
        return { first: first.length, open, folded, again: String(first) === String(visible()) };
        """,
    )
    assert result == {"first": 12, "open": 120, "folded": 3, "again": True}


def test_tree_is_one_tab_stop_and_arrow_keys_move_in_it(bush: Path) -> None:
    result = driven(
        bush,
        TOOLS
        + """
        const result = [stops().length];
        stops()[0].focus();
        const keys = "Down Right Right Left Left Left";
        for (const key of [...keys.split(" ").map((key) => `Arrow${key}`), "End", "Home"]) {
          press(key);
          const at = document.activeElement;
          const number = all(".tree summary").indexOf(at);
          result.push(`${key} ${number} ${at.parentElement.open} ${stops().length}`);
        }
        // What is folded away cannot keep the stop.
        press("End"); $("#fold").click(); await wait(50);
        result.push(stops().length, stops()[0].checkVisibility());
        return result;
        """,
    )
    assert result == [
        1,
        "ArrowDown 1 false 1",
        "ArrowRight 1 true 1",
        "ArrowRight 2 false 1",
        "ArrowLeft 1 true 1",
        "ArrowLeft 1 false 1",
        "ArrowLeft 0 true 1",
        "End 39 true 1",
        "Home 0 true 1",
        1,
        True,
    ]


def test_search_finds_texts_and_numbers_and_shows_them(bush: Path) -> None:
    result = driven(
        bush,
        TOOLS
        + """
        const result = [];
        const hits = () => $(".hits output").textContent;
        const search = async (words) => {
          $("#find").value = words;
          $("#find").dispatchEvent(new Event("input"));
          await wait(300);
          const at = $(".node.at");
          result.push([hits(), at?.querySelector(".no").textContent, at?.checkVisibility()]);
        };
        await search("LAST  leaf"); await search("30"); await search("t1"); await search("nowhere");
        await search("#14"); await search("t1");
        $("#find").focus(); press("Enter"); result.push(hits(), all("rect.hit").length);
        $("#back").click(); $("#back").click(); result.push(hits());
        await search(""); result.push(all("rect.hit").length);
        return result;
        """,
    )
    text, number, several, none, hashed, _, after_enter, n_bars, after_back, cleared, left = result
    assert text == ["1 of 1", "120", True]
    assert number == ["1 of 2", "30", True]
    n = int(several[0].split()[-1])
    assert n > 20
    assert several[0] == f"1 of {n}"
    assert none[0] == "none"
    assert hashed == ["1 of 1", "14", True]
    assert [after_enter, n_bars, after_back] == [f"2 of {n}", n, f"{n} of {n}"]
    assert [cleared[0], left] == ["", 0]


def test_address_with_a_number_opens_the_page_there(bush: Path) -> None:
    result = driven(
        bush,
        TOOLS
        + """
        location.hash = "#6"; await wait(100);
        const deep = all(".node").find((node) => !node.checkVisibility());
        location.hash = `#${deep.querySelector(".no").id}`; await wait(100);
        return [deep.checkVisibility(), deep === $(".node.at"), scrollY > 0];
        """,
        "--window-size=800,400",
    )
    assert result == [True, True, True]


def test_click_in_the_picture_selects_the_node(bush: Path) -> None:
    result = driven(
        bush,
        TOOLS
        + """
        const bar = all("rect")[30];
        const about = $("figcaption").textContent;
        bar.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
        const no = $("figcaption").textContent.split(" ")[0];
        bar.dispatchEvent(new MouseEvent("click", { bubbles: true }));
        $("svg").dispatchEvent(new PointerEvent("pointerleave"));
        const at = $(".node.at");
        return [at.id === bar.dataset.n, at.checkVisibility(), no === at.querySelector(".no").id,
                $("figcaption").textContent === about];
        """,
    )
    assert result == [True, True, True, True]


@pytest.mark.parametrize("scheme", [0, 1])
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("state", ["", "open", "fold"])
def test_axe_finds_nothing(bush: Path, scheme: int, width: int, state: str) -> None:
    """Of the rules of WCAG and of best practice."""
    result = importlib.util.find_spec("axe_playwright_python")
    if result is None or result.origin is None:
        pytest.skip("axe is not installed (pip install --no-deps axe-playwright-python)")
    axe = (Path(result.origin).parent / "axe.min.js").read_text(encoding="utf-8")
    every = "document.querySelectorAll('details').forEach((each) => { each.open = true; });"
    violations = driven(
        bush,
        ("" if not state else f"document.getElementById('{state}').click();")
        + every * (state == "open")
        + axe
        + """
        const result = await axe.run(document);
        return result.violations.map(({ id, nodes: [{ html }] }) => [id, html]);
        """,
        f"--window-size={width},900",
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    assert violations == []


def test_page_is_light_and_dark(page: Path) -> None:
    light, dark = page.parent / "light.png", page.parent / "dark.png"
    chromium(page, "--blink-settings=preferredColorScheme=1", f"--screenshot={light}")
    chromium(page, "--blink-settings=preferredColorScheme=0", f"--screenshot={dark}")
    assert min(corner(light)) > 230
    assert max(corner(dark)) < 40
