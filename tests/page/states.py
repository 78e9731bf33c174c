"""Every state of the page, and how to reach it.

Each state is on a server of its own. If it would pass too quickly, a stand-in for a slow or a
broken model keeps it, and its docstring describes the stand-in.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from browsing import Desk, Gate, watched
from serving import Served, serving
from weft.service.server import ServerConfig, models

if TYPE_CHECKING:
    from playwright.sync_api import Browser


class Stage:
    """The servers, pages and deliberate faults of a state."""

    def __init__(self, browser: Browser, stack: ExitStack) -> None:
        self._browser = browser
        self.stack = stack
        self.desk: Desk

    def serve(self, *, wait: bool = True, **config: Any) -> Desk:
        """Start a server and open a page of it."""
        served = self.stack.enter_context(serving(ServerConfig(port=0, **config), wait=wait))
        return self.open(served)

    def open(self, served: Served) -> Desk:
        """Open a page of a server that the caller stops."""
        page, watch = self.stack.enter_context(watched(self._browser, served.url))
        page.clock.set_fixed_time(datetime.now())  # what is "just now" stays that
        self.desk = Desk(served, page, watch)
        self.desk.sets(n=4, max_tokens=48, seed=1)
        return self.desk

    def gate(self) -> Gate:
        gate = Gate(self.desk.served)
        self.stack.callback(gate.close)
        return gate


@dataclass(frozen=True)
class State:
    """make: brings the page there. pane: what a narrow screen shows of it; "" under a dialog."""

    name: str
    make: Callable[[Stage], None]
    pane: str = "Text"


STATES: dict[str, State] = {}
ANSWER = """Foxes eat **small animals** and fruit.

| season | food |
|:-------|-----:|
| winter | mice |
| summer | $\\frac{1}{2}$ berries |

```python
print("fox" * 3)
```
"""


def state(pane: str = "Text") -> Callable[[Callable[[Stage], None]], Callable[[Stage], None]]:
    def note(make: Callable[[Stage], None]) -> Callable[[Stage], None]:
        name = make.__name__.replace("_", "-")
        STATES[name] = State(name, make, pane)
        return make

    return note


@state()
def first_run(stage: Stage) -> None:
    desk = stage.serve()
    desk.page.goto("/")
    desk.page.get_by_role("button", name="Grow 4 branches").wait_for()


@state()
def model_loading(stage: Stage) -> None:
    """A stand-in loads, because the test models load too quickly."""
    loads = models.load
    done = threading.Event()

    def slow(*source: Any, progress: Callable[..., object] | None = None, **more: Any) -> Any:
        if progress is not None:
            progress("download", 812_000_000, 1_243_000_000, "")
        done.wait(60)
        return loads(*source, **more)

    models.load = slow
    stage.stack.callback(setattr, models, "load", loads)
    stage.stack.callback(done.set)
    desk = stage.serve(wait=False)
    desk.page.goto("/")
    desk.page.get_by_role("button", name="Cancel").wait_for()


@state()
def streaming(stage: Stage) -> None:
    growing(stage, n=4, tokens=34)


@state()
def heat(stage: Stage) -> None:
    a_story(stage.serve())
    stage.desk.remembers("heat", "probability")
    stage.desk.page.reload()
    stage.desk.page.locator("[data-token]").first.wait_for()


@state()
def token_card(stage: Stage) -> None:
    heat(stage)
    for _ in range(5):
        stage.desk.press(".")
    stage.desk.page.locator("[data-token][data-cursor]").wait_for()


@state(pane="Tree")
def tree_map(stage: Stage) -> None:
    a_story(stage.serve())
    stage.desk.press("v")
    stage.desk.page.get_by_role("img", name="Map of").wait_for()


@state(pane="Inspector")
def reasoning_run(stage: Stage) -> None:
    desk = stage.serve()
    desk.make("Use 4 9 10 13 to make 24.")
    desk.visit()
    body = {"strategy": "tot", "seed": 1, "breadth": 3, "wait": True}
    desk.ask("POST", desk.of("/runs"), json=body)
    desk.page.get_by_role("tab", name="Solve").click()
    settled(desk)


@state(pane="Tree")
def no_results(stage: Stage) -> None:
    a_story(stage.serve())
    stage.desk.press("/")
    stage.desk.page.keyboard.type("zebra")


@state()
def lane_failed(stage: Stage) -> None:
    """A stand-in fails: the embedded model never does."""
    desk, gate = growing(stage, n=3, tokens=20)
    desk.watch.allow("")
    gate.fail("the device was lost")
    desk.page.get_by_role("button", name="Retry").first.wait_for()


@state()
def all_stopped(stage: Stage) -> None:
    desk, gate = growing(stage, n=4, tokens=20)
    desk.press("Escape", "Escape")
    gate.open()
    desk.wait_grown()


@state()
def context_full(stage: Stage) -> None:
    desk = stage.serve(n_ctx=64)
    desk.watch.allow("400")
    desk.make()
    (leaf,) = desk.grow(n=1, **desk.endless())
    desk.visit(leaf)
    desk.press("g")
    desk.page.get_by_text("The context is full.").wait_for()
    settled(desk)


@state()
def memory_full(stage: Stage) -> None:
    desk = stage.serve(kv_budget="400KB")
    desk.watch.allow("503")
    desk.make()
    desk.visit()
    desk.press("g")
    desk.page.get_by_text("Memory is full.").wait_for()
    desk.wait_grown()
    settled(desk)
    # How far the text has been scrolled to the branches depends on when their errors arrive.
    desk.text.evaluate(
        "each => { for (let at = each; at; at = at.parentElement) at.scrollTop = 0 }"
    )


@state()
def reconnecting(stage: Stage) -> None:
    with ExitStack() as soon:
        served = soon.enter_context(serving())
        desk = stage.open(served)
        desk.watch.allow("")
        a_story(desk)
    desk.page.get_by_text("Reconnecting. Nothing is lost.").wait_for()


@state()
def read_only(stage: Stage) -> None:
    desk = stage.serve()
    desk.make()
    desk.grow(n=3, max_tokens=40)
    desk.served.client.delete("/api/v1/models/tiny").raise_for_status()
    desk.visit(2)
    desk.page.get_by_text("Read-only").first.wait_for()


@state()
def import_report(stage: Stage) -> None:
    desk = stage.serve()
    desk.page.goto("/")
    nodes = {
        "a": {"text": "The lighthouse keeper", "parentId": None},
        "b": {"text": " had not spoken for days.", "parentId": "a", "unread": True},
        "c": {"text": " slept.", "parentId": "a", "bookmarked": True},
        "d": {"text": " of an orphan", "parentId": "x"},
    }
    note = {"current": "b", "hoisted": ["a"], "nodes": nodes}
    file = {"settings": {"theme": "none"}, "state": {"note.md": note, "other.md": note}}
    desk.page.get_by_role("button", name="Import").click()
    desk.page.locator("input[type=file]").set_input_files(
        {"name": "data.json", "mimeType": "application/json", "buffer": json.dumps(file).encode()}
    )
    desk.page.locator(".came a").first.wait_for()
    settled(desk)


@state(pane="")
def compared(stage: Stage) -> None:
    a_story(stage.serve())
    stage.desk.press("r", "=")
    stage.desk.page.locator(".compared > li").nth(2).wait_for()
    settled(stage.desk)


@state(pane="")
def grow_with(stage: Stage) -> None:
    desk = stage.serve()
    desk.add_model("org/Second-Instruct")
    desk.open_loom(n=2)
    desk.press("w")
    desk.page.locator("dialog .model-checks li").nth(1).wait_for()
    settled(desk)


@state(pane="Inspector")
def more_samplers(stage: Stage) -> None:
    desk = stage.serve()
    desk.sets(presence_penalty=0.5, typical_p=0.9)
    desk.open_loom(template=False)
    desk.page.locator("#inspector-panel summary").first.click()
    desk.page.locator("#inspector-panel details[open]").wait_for()
    settled(desk)


@state()
def markdown(stage: Stage) -> None:
    desk = stage.serve()
    desk.open_loom("What do foxes eat?")
    write(desk, 0, ANSWER)
    desk.visit(1)
    desk.text.locator("table").wait_for()
    settled(desk)


@state(pane="Inspector")
def author_note(stage: Stage) -> None:
    desk = stage.serve()
    desk.make("One\nTwo\nThree", template=False)
    note = {"text": "It rains in every scene.", "depth": 2}
    desk.ask("PATCH", desk.of(), json={"meta": {"author_note": note}})
    desk.visit()
    desk.page.locator("#tab-loom").click()
    desk.page.locator("[data-author-note]").wait_for(state="attached")
    settled(desk)


@state()
def rated_siblings(stage: Stage) -> None:
    desk = stage.serve()
    desk.open_loom("The fox", template=False, n=4, max_tokens=16, temperature=2.0)
    for node, rating in ((1, 2), (3, 5)):
        desk.ask("PATCH", desk.of(f"/nodes/{node}"), json={"rating": rating})
    desk.page.locator(".sort-siblings select").select_option("rating")
    desk.page.locator("[data-child]").first.wait_for()
    settled(desk)


@state(pane="")
def import_dialog(stage: Stage) -> None:
    desk = stage.serve()
    desk.open_loom()
    desk.press("i")
    desk.page.locator(".import-target").wait_for()
    settled(desk)


@state()
def equal_branches(stage: Stage) -> None:
    desk = stage.serve()
    desk.make()
    desk.grow(n=4, max_tokens=24, temperature=0)
    desk.grow(n=2, max_tokens=24)
    desk.visit()


@state()
def ended_at_once(stage: Stage) -> None:
    desk = stage.serve()
    ends = desk.served.service.models.lm().text.stop_ids
    desk.open_loom()
    desk.grow(n=2, wait=False, logit_bias={str(each): 100 for each in ends})
    desk.wait_grown()
    settled(desk)


@state()
def long_word(stage: Stage) -> None:
    desk = stage.serve()
    desk.make(template=False, prompt="A word of four hundred characters:")
    write(desk, 0, " " + "antidisestablishmentarianism" * 14 + "abcdefgh and then no more")
    write(desk, 0, " another")
    desk.visit(1)


@state()
def scripts(stage: Stage) -> None:
    """Chinese, Japanese, Arabic, Hebrew, emoji."""
    desk = stage.serve()
    desk.make(template=False, prompt="The same in other scripts.")
    write(desk, 0, " 山の上に古い寺があった。雨が降っていた。")
    write(desk, 0, " كان هناك ثعلب صغير يعيش في الوادي.")
    write(desk, 0, " פעם אחת היה שועל קטן בעמק.")
    write(desk, 0, " \U0001f98a \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 ok")
    write(desk, 1, " 一只狐狸住在山谷里。 وقال הלך \U0001f44d\U0001f3fd")
    desk.visit(5)


@state()
def incomplete_utf8(stage: Stage) -> None:
    desk = stage.serve()
    desk.make(template=False, prompt="Half a character:")
    body = {"text": " \u6f22", "add_bos": False}  # each of its bytes is a token of its own
    ids = desk.ask("POST", "/tokenize", json=body)["token_ids"]
    desk.ask("POST", desk.of("/nodes"), json={"parent": 0, "token_ids": ids[:-1]})
    desk.ask("POST", desk.of("/nodes"), json={"parent": 1, "token_ids": ids[-1:]})
    desk.visit(1)
    desk.press(".", ".")
    desk.page.get_by_role("region", name="Token", exact=True).wait_for()
    settled(desk)


def a_story(desk: Desk) -> None:
    """Open a loom of some size at a node in its middle."""
    desk.make()
    first, second, _ = desk.grow(n=3, max_tokens=40)
    third, _ = desk.grow(first, n=2, max_tokens=24)
    desk.grow(second, n=2, max_tokens=24, seed=2)
    desk.grow(third, n=3, max_tokens=16, seed=3)
    desk.ask("PATCH", desk.of(f"/nodes/{second}"), json={"bookmark": "the owl"})
    desk.visit(third)


def write(desk: Desk, parent: int, text: str) -> None:
    desk.ask("POST", desk.of("/nodes"), json={"parent": parent, "text": text})


def growing(stage: Stage, n: int, tokens: int) -> tuple[Desk, Gate]:
    """Let branches grow until they have so many tokens, and hold them there."""
    desk = stage.serve()
    gate = stage.gate()
    desk.open_loom()
    gate.hold(tokens)
    grown = desk.grow(n=n, wait=False, **desk.endless())
    desk.until(lambda: desk.lanes == grown, "a lane for each branch")
    settled(desk)
    return desk, gate


def settled(desk: Desk) -> None:
    """Wait until the page shows the server's state; it requests memory usage twice a second."""
    before = None
    while (now := desk.page.locator("body").inner_text()) != before:
        before = now
        desk.page.wait_for_timeout(700)
