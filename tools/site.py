"""Hooks of the documentation site; mkdocs calls the `on_…` functions.

Pages and examples outside docs/ join the site, links follow them, and drawings are inlined. Links
to other files lead to the repository, if its address is known: WEFT_REPOSITORY, or git's origin.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Names in the site of pages outside docs/.
JOINED = {
    "ACKNOWLEDGEMENTS.md": "acknowledgements.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "recipe/README.md": "recipe.md",
    "src/weft/data/tiny/README.md": "tiny.md",
}
EXAMPLES = {
    page.relative_to(ROOT).as_posix(): f"examples/{page.parent.name}.md"
    for page in sorted(ROOT.glob("examples/*/README.md"))
}
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s]+)\)")
_DRAWING = re.compile(r'<img alt="([^"]*)" src="([^"]+\.svg)"\s*/?>')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the repository to the navigation."""
    config.extra["repository"] = address = repository()
    if address:
        config.nav.append({"Repository": address})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of JOINED and EXAMPLES."""
    from mkdocs.structure.files import File

    contents = {name: (ROOT / source).read_text("utf-8") for source, name in JOINED.items()}
    contents |= {name: example_page(ROOT / source) for source, name in EXAMPLES.items()}
    for name, content in contents.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links for the place of the page in the site."""
    return in_site(markdown, page.file.src_uri, config.extra["repository"])


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Inline drawings."""
    return _DRAWING.sub(lambda match: _drawing(match[1], match[2]), html)


def repository() -> str:
    """Return the web address of the repository, or "" if it is unknown."""
    if "WEFT_REPOSITORY" in os.environ:
        return os.environ["WEFT_REPOSITORY"].rstrip("/")
    command = ["git", "-C", str(ROOT), "config", "--get", "remote.origin.url"]
    try:
        origin = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
    return web_address(origin)


def web_address(origin: str) -> str:
    """Return the https address of a git remote, or "" if the remote is no public host."""
    address = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", origin).removesuffix(".git")
    return address if re.match(r"https://[^@/]+/", address) else ""


def example_page(readme: Path) -> str:
    """Return the README of an example, followed by its program."""
    program = (readme.parent / "main.py").read_text("utf-8")
    return f"{readme.read_text('utf-8')}\n## The program\n\n```python\n{program}```\n"


def in_site(markdown: str, name: str, repository: str = "") -> str:
    """Return a page with its links as they must read at `name` in the site."""
    sources = {new: ROOT / old for old, new in {**JOINED, **EXAMPLES}.items()}
    home = sources.get(name, DOCS / name)

    def rewritten(match: re.Match[str]) -> str:
        text, (target, hash_, anchor) = match[1], match[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = Path(os.path.normpath(home.parent / target))
        if page := _page_in_site(path):
            here = os.path.dirname(name) or "."
            return f"[{text}]({os.path.relpath(page, here)}{hash_}{anchor})"
        if repository:
            return f"[{text}]({repository}/blob/main/{path.relative_to(ROOT).as_posix()})"
        return text

    return _LINK.sub(rewritten, markdown)


def _page_in_site(path: Path) -> str:
    """Return the name of a file or folder in the site, or "" if the site lacks it."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    source = path.relative_to(ROOT)
    if source.parts[0] == "examples" and path.suffix != ".ipynb":
        return f"examples/{source.parts[1]}.md" if source.parts[1:] else "examples.md"
    return JOINED.get(source.as_posix(), "")


def _drawing(alt: str, src: str) -> str:
    svg = (DOCS / "images" / Path(src).name).read_text("utf-8").strip()
    return f'<figure class="drawing" role="img" aria-label="{alt}">{svg}</figure>'
