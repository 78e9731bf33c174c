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
# Numbers all controls that Tab stops at; radio buttons of one name share a number.
# Returns the highest number.
MARK_CONTROLS = """() => {
  const within = [...document.querySelectorAll('dialog[open]')].at(-1) ?? document.body
  const tags = 'a[href], button, input, select, textarea, summary, [tabindex]'
  const groups = new Set()
  const isStop = (each) => {
    if (each.disabled || each.tabIndex < 0 || !each.checkVisibility({ visibilityProperty: true }))
      return false
    if (each.type !== 'radio') return true
    const isFirst = !groups.has(each.name)
    groups.add(each.name)
    return isFirst
  }
  const controls = [...within.querySelectorAll(tags)].filter(isStop)
  controls.forEach((each, i) => {
    const group = each.type === 'radio' ? document.getElementsByName(each.name) : [each]
    for (const one of group) one.dataset.stop = i + 1
  })
  return controls.length
}"""
# Returns the number of the focused control.
# Throws if the control has neither an outline nor a caret, or is out of view.
FOCUSED = """() => {
  const focused = document.activeElement
  if (!focused?.dataset.stop) return 0
  const current = focused.querySelector('[aria-current=true]')
  const near = [focused, current, focused.nextElementSibling, focused.closest('label')]
  const shown = near.filter(Boolean)
  const hasCaret = focused.selectionStart !== undefined && focused.selectionStart !== null
  const isArea = focused.matches('dialog > * > .body')
  if (!hasCaret && !isArea && !shown.some((each) => getComputedStyle(each).outlineStyle !== 'none'))
    throw new Error('no outline: ' + focused.outerHTML.slice(0, 200))
  const inView = (each) => {
    const box = each.getBoundingClientRect()
    return box.bottom > 0 && box.right > 0 && box.top < innerHeight && box.left < innerWidth
  }
  if (!shown.some(inView)) throw new Error('out of view: ' + focused.outerHTML.slice(0, 200))
  return Number(focused.dataset.stop)
}"""
NAME = "(number) => document.querySelector(`[data-stop='${number}']`).outerHTML.slice(0, 200)"
OTHER_SIZES = ((1920, 1080), (720, 450))  # the last one is 1440 by 900 at 200 % zoom


@pytest.fixture(scope="module", params=STATES)
def staged(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Staged]:
    state = STATES[request.param]
    with ExitStack() as stack:
        stage = Stage(browser, stack)
        state.make(stage)
        yield stage, state


# The first test of a state: the others move the focus and scroll.
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


def test_state_is_accessible(staged: Staged) -> None:
    for _ in looks(*staged, sizes=(SIZES[0], SIZES[-1])):
        assert_accessible(staged[0].desk.page)
    for _ in looks(*staged, sizes=OTHER_SIZES, themes=THEMES[:1]):
        assert_accessible(staged[0].desk.page)


def test_tab_reaches_all_controls_of_a_state_and_marks_them(staged: Staged) -> None:
    page = staged[0].desk.page
    for _ in looks(*staged, sizes=SIZES[:1], themes=THEMES[1:]):
        n_controls = page.evaluate(MARK_CONTROLS)
        reached = set()
        # The focus also leaves the page once, and starts at any control.
        for _ in range(n_controls + 2):
            page.keyboard.press("Tab")
            if number := page.evaluate(FOCUSED):
                reached.add(number)
        missing = set(range(1, n_controls + 1)) - reached
        assert not missing, [page.evaluate(NAME, number) for number in sorted(missing)]


def test_state_fits_the_width_of_the_screen(staged: Staged) -> None:
    for width, _ in looks(*staged, sizes=(*SIZES, *OTHER_SIZES), themes=THEMES[:1]):
        wide = staged[0].desk.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width
