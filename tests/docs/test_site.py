"""The site builds without a warning and loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import browsing
from tools.outside import requests
from tools.site import EXAMPLES, JOINED, in_site, web_address

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "markdown", "want"),
    [
        ("README.md", "[a](loom.md#growing)", "[a](loom.md#growing)"),
        ("README.md", "[a](../CONTRIBUTING.md)", "[a](contributing.md)"),
        ("design/tree.md", "[a](../../CHANGELOG.md)", "[a](../changelog.md)"),
        ("design/tree.md", "[a](../concepts.md)", "[a](../concepts.md)"),
        ("changelog.md", "[a](docs/loom.md)", "[a](loom.md)"),
        ("tiny.md", "[a](../../../../recipe/README.md)", "[a](recipe.md)"),
        ("README.md", "[a](../Makefile)", "a"),
        ("cookbook/README.md", "[a](../../examples)", "[a](../examples.md)"),
        ("search.md", "[a](../examples/chat/main.py)", "[a](examples/chat.md)"),
        ("examples/chat.md", "[a](../../docs/loom.md)", "[a](../loom.md)"),
        ("README.md", "[a](https://example.org/x.md) [b](#here)", None),
    ],
)
def test_links_lead_on_in_the_site(name: str, markdown: str, want: str | None) -> None:
    assert in_site(markdown, name) == (markdown if want is None else want)


def test_file_that_is_no_page_is_linked_in_the_repository() -> None:
    linked = in_site("[a](../Makefile)", "loom.md", "https://example.org/weft")
    assert linked == "[a](https://example.org/weft/blob/main/Makefile)"


@pytest.mark.parametrize(
    ("origin", "want"),
    [
        ("https://example.org/o/weft.git", "https://example.org/o/weft"),
        ("git@example.org:o/weft.git", "https://example.org/o/weft"),
        ("/home/one/weft", ""),
    ],
)
def test_repository_is_the_web_address_of_origin(origin: str, want: str) -> None:
    assert web_address(origin) == want


def test_examples_page_links_every_example() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(\.\./(examples/\w+/README\.md)\)", page)) == set(EXAMPLES)


def test_addresses_that_a_page_would_load_are_listed(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        """<a href="https://followed.example">not loaded</a>
        <link rel="canonical" href="https://canonical.example">
        <link rel="stylesheet" href="https://a.example/x.css">
        <script src="//b.example/y.js"></script>
        <img src="own.png"><p style="background: url(https://c.example/z.png)">
        <style>@import "https://d.example/w.css";</style>""",
        encoding="utf-8",
    )
    (tmp_path / "own.css").write_text("p { background: url('https://e.example/v.woff') }", "utf-8")
    hosts = [address.split("/")[2] for _, address in requests(tmp_path)]
    assert hosts == [f"{name}.example" for name in "abcde"]


# What the theme puts behind code, and what it is coloured with.
CODE = {"default": "#f5f5f5", "slate": "#272a35"}
COLOURED = ("comment", "constant", "generic", "number", "operator", "punctuation", "variable")


@pytest.mark.parametrize("scheme", CODE)
def test_code_in_the_site_can_be_read(scheme: str) -> None:
    """WCAG AA: a contrast of 4.5 or more, where the theme's own colours have less."""
    css = (ROOT / "docs" / "site.css").read_text(encoding="utf-8")
    rules = re.findall(rf'\[data-md-color-scheme="{scheme}"\] \{{(.*?)\}}', css, re.DOTALL)
    colours = dict(re.findall(r"--md-code-hl-(\w+)-color: (#\w{6});", "".join(rules)))
    assert set(colours) == set(COLOURED)
    for name, colour in colours.items():
        assert contrast(colour, CODE[scheme]) >= 4.5, name


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f'{package} is not installed; pip install -e ".[docs]", or run make docs')
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_site_loads_nothing_from_elsewhere(site: Path) -> None:
    assert list(requests(site)) == []


def test_joined_pages_and_api_pages_are_in_the_site(site: Path) -> None:
    for name in (*JOINED.values(), *EXAMPLES.values()):
        assert (site / name).with_suffix(".html").is_file()
    api = (site / "api" / "loom.html").read_text("utf-8")
    for name in ("weft.Loom", "weft.Heddle.grow", "weft.Heddle.clip", "weft.Heddle.ramify"):
        assert f'id="{name}"' in api
    assert "<svg" in (site / "concepts.html").read_text("utf-8")


def test_pages_have_no_horizontal_overflow_at_390_px(site: Path) -> None:
    if reason := browsing.why_no_browser():
        pytest.skip(reason)
    with browsing.browsing() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        for name in ("index", "compare", "command", "file-formats", "benchmarks", "api/loom"):
            page.goto((site / f"{name}.html").as_uri(), wait_until="domcontentloaded")
            assert page.evaluate("document.documentElement.scrollWidth") == 390, name


def test_group_of_arguments_is_taken_apart() -> None:
    pytest.importorskip("griffe", reason="griffe is not installed")
    from tools.docstrings import ungrouped

    before = (
        "Does.\n\nArgs:\n    a, b: one\n        or two.\n    c: three.\n\nReturns:\n    x, y: z"
    )
    after = (
        "Does.\n\nArgs:\n    a: one\n        or two.\n    b: see `a`.\n    c: three.\n\n"
        "Returns:\n    x, y: z"
    )
    assert ungrouped(before) == after
