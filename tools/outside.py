"""Says what a built site would fetch from elsewhere: `python -m tools.outside site`.

Links that a reader may follow are no requests. Scripts, styles, fonts, pictures and frames are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_LOADS = {"src", "srcset", "data", "poster", "action", "background"}
# <link rel=…> that a browser acts on; "canonical", "next" and the like are not loaded.
_FETCHED = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "manifest"}
_ELSEWHERE = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
_IN_STYLE = re.compile(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)", re.IGNORECASE)


class _Page(HTMLParser):
    """Collects what a page loads from elsewhere in `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.addresses += _IN_STYLE.findall(given.get("style", ""))
        is_fetched = tag == "link" and not _FETCHED.isdisjoint(given.get("rel", "").split())
        for name, value in given.items():
            if (name in _LOADS or (is_fetched and name == "href")) and _ELSEWHERE.match(value):
                self.addresses.append(value)

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "style":
            self.addresses += _IN_STYLE.findall(data)


def requests(site: Path) -> Iterator[tuple[Path, str]]:
    """Yield (file, address) for each thing that a page or style loads from elsewhere."""
    for file in sorted(site.rglob("*")):
        if file.suffix == ".html":
            page = _Page()
            page.feed(file.read_text("utf-8"))
            page.close()
            yield from ((file, address) for address in page.addresses)
        elif file.suffix == ".css":
            yield from ((file, address) for address in _IN_STYLE.findall(file.read_text("utf-8")))


def main(arguments: list[str]) -> int:
    """Print what would be fetched; 1 if there is anything, 2 if there is no site."""
    if len(arguments) != 1 or not (Path(arguments[0]) / "index.html").is_file():
        print("give the folder of a built site: python -m tools.outside site", file=sys.stderr)
        return 2
    loads = list(requests(Path(arguments[0])))
    for file, address in loads:
        print(f"{file}: loads {address}", file=sys.stderr)
    return 1 if loads else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
