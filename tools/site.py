"""Hooks of the documentation site; mkdocs calls the `on_…` functions.

Pages that lie elsewhere in the repository join the site, links between the two lead on, and
drawings stand in the page itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Where files from outside docs/ stand in the site.
JOINED = {
    "ACKNOWLEDGEMENTS.md": "acknowledgements.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "recipe/README.md": "recipe.md",
    "src/weft/data/tiny/README.md": "tiny.md",
}
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s]+)\)")
_DRAWING = re.compile(r'<img alt="([^"]*)" src="([^"]+\.svg)"\s*/?>')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of JOINED."""
    from mkdocs.structure.files import File

    for source, name in JOINED.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the pages stand in the site."""
    return in_site(markdown, page.file.src_uri)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put drawings into the page."""
    return _DRAWING.sub(lambda match: _drawing(match[1], match[2]), html)


def in_site(markdown: str, name: str) -> str:
    """Return a page with its links as they must read at `name` in the site."""
    home = {new: ROOT / old for old, new in JOINED.items()}.get(name, DOCS / name)

    def led(match: re.Match[str]) -> str:
        text, (target, hash_, anchor) = match[1], match[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        aim = Path(os.path.normpath(home.parent / target))
        if aim.is_relative_to(DOCS):
            there = aim.relative_to(DOCS).as_posix()
        else:
            there = JOINED.get(aim.relative_to(ROOT).as_posix(), "")
        if not there:  # a file of the repository that is no page: there is nothing to lead to
            return text
        here = os.path.dirname(name) or "."
        return f"[{text}]({os.path.relpath(there, here)}{hash_}{anchor})"

    return _LINK.sub(led, markdown)


def _drawing(alt: str, src: str) -> str:
    svg = (DOCS / "images" / Path(src).name).read_text("utf-8").strip()
    return f'<figure class="drawing" role="img" aria-label="{alt}">{svg}</figure>'
