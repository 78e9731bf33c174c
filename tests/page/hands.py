"""Keys, clicks and touches in the page; counts of a job are compared with docs/page-keys.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

DOCS = Path(__file__).parents[2] / "docs" / "page-keys.md"


class Hands:
    """Keyboard and mouse of a page, which count every use.

    A key, a chord and a typed text count as one key. A click and a double click count as one
    click. A choice in a list counts as two clicks. Moving the mouse counts as nothing.
    """

    def __init__(self, page: Page, *, writes: bool = False) -> None:
        self._page = page
        self._writes = writes
        self.n_keys = 0
        self.n_clicks = 0

    def press(self, *keys: str) -> None:
        for key in keys:
            self._page.keyboard.press(key)
            self.n_keys += 1

    def type(self, text: str) -> None:
        self._page.keyboard.type(text)
        self.n_keys += 1

    def click(self, target: Locator) -> None:
        target.click()
        self.n_clicks += 1

    def click_at(self, x: float, y: float, *, times: int = 1) -> None:
        self._page.mouse.click(x, y, click_count=times)
        self.n_clicks += 1

    def choose(self, select: Locator, value: str) -> None:
        select.select_option(value)
        self.n_clicks += 2

    def choose_files(self, button: Locator, files: Sequence[Path]) -> None:
        """Click a button, and choose files in the dialog that it opens."""
        with self._page.expect_file_chooser() as chooser:
            button.click()
        chooser.value.set_files(files)
        self.n_clicks += 2

    def finish(self, job: str, limit: int | None = None) -> None:
        """Check the count of a job against its limit and its row in docs/page-keys.md."""
        count = self.n_keys + self.n_clicks
        assert limit is None or count <= limit, f"{job}: {count}, the limit is {limit}"
        row = re.compile(rf"^(\| {re.escape(job)} \| )([^|]*)( \|)", re.MULTILINE)
        text = DOCS.read_text("utf-8")
        line = row.search(text)
        assert line, f"docs/page-keys.md has no row for {job!r}"
        if self._writes:
            text = row.sub(lambda match: match[1] + self.counted() + match[3], text)
            DOCS.write_text(text, "utf-8")
        else:
            assert line[2] == self.counted(), "pytest --write-jobs tests/page/test_jobs.py"

    def counted(self) -> str:
        parts = ((self.n_keys, "key"), (self.n_clicks, "click"))
        return ", ".join(f"{n} {noun}{'' if n == 1 else 's'}" for n, noun in parts if n)


class Fingers:
    """Touches of a page, as a touch screen sends them."""

    def __init__(self, page: Page) -> None:
        self._session = page.context.new_cdp_session(page)

    def send(self, kind: str, *points: tuple[float, float]) -> None:
        touches = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)]
        self._session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touches})
