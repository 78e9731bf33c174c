"""In every state the page is accessible, and looks as it did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from browsing import assert_accessible
from tests.page.screens import (
    BUILT,
    KEPT,
    SHARE,
    SIZES,
    THEMES,
    difference,
    drawn,
    fingerprint,
    halved,
    looks,
)
from tests.page.states import STATES, Stage, State

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.page
Staged = tuple[Stage, State]
OTHER_SIZES = ((1920, 1080), (720, 450))  # the last one is 1440 by 900 at 200 % zoom


@pytest.fixture(scope="module", params=STATES)
def staged(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Staged]:
    state = STATES[request.param]
    with ExitStack() as stack:
        stage = Stage(browser, stack)
        state.make(stage)
        yield stage, state


def test_state_is_accessible(staged: Staged) -> None:
    for _ in looks(*staged, sizes=(SIZES[0], SIZES[-1])):
        assert_accessible(staged[0].desk.page)


def test_state_fits_the_width_of_the_screen(staged: Staged) -> None:
    for width, _ in looks(*staged, sizes=(*SIZES, *OTHER_SIZES), themes=THEMES[:1]):
        wide = staged[0].desk.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width


def test_state_looks_like_its_saved_picture(staged: Staged, browser: Browser) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed; make test-page")
    by = KEPT / "drawn-by.json"
    if not by.exists():
        pytest.skip("no pictures are kept; make screens ACCEPT=1 draws them")
    if (here := fingerprint(browser)) != (there := json.loads(by.read_text("utf-8"))):
        pytest.skip(f"the pictures were drawn by {there}, this is {here}")
    other = []
    for name, png in drawn(*staged):
        now, kept = halved(png), KEPT / f"{name}.webp"
        share = difference(now, image.open(kept).convert("RGB")) if kept.exists() else 1.0
        if share > SHARE:
            BUILT.mkdir(parents=True, exist_ok=True)
            (BUILT / f"{name}.png").write_bytes(png)
            other.append(f"{name}: {share:.2%} of it" if kept.exists() else f"{name}: is new")
    assert not other, (
        "the page looks otherwise than before:\n  "
        + "\n  ".join(other)
        + f"\n{BUILT} has how it looks now, {KEPT} how it looked.\n"
        + "If that is meant: make screens ACCEPT=1, and commit the pictures."
    )
