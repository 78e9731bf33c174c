"""Notebook output: static HTML and text, and lanes updated ten times a second or less."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import weft
from weft import Loom, samples
from weft.viz import live
from weft.viz.notebook import LIMIT
from written_looms import open_written


@pytest.fixture(scope="module")
def lm() -> Iterator[weft.LM]:
    with weft.load("tiny") as lm:
        yield lm


class Clock:
    """Time as `live` asks for it, which goes on only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Kernel:
    """IPython in a kernel: records when each display was created and updated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_kernel: bool = True) -> None:
        self.n_displays = 0
        self.drawn: list[tuple[float, str, str]] = []
        self.fail: BaseException | None = None
        shell = SimpleNamespace(kernel=object()) if has_kernel else SimpleNamespace()
        ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
        ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
        display.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def display(self, shown: Any, *, display_id: bool) -> Kernel:
        assert display_id
        self.n_displays += 1
        self.update(shown)
        return self

    def update(self, shown: Any) -> None:
        self.drawn.append((live.time.monotonic(), shown._repr_html_(), repr(shown)))
        if self.fail is not None and len(self.drawn) > 1:
            error, self.fail = self.fail, None
            raise error


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


# Live lanes


def test_grow_updates_one_display_ten_times_a_second_or_less(
    lm: weft.LM, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, clock = lm.engine.forward, Clock()
    monkeypatch.setattr(live, "time", clock)

    def slow(rows: Any) -> Any:
        clock.sleep(0.01)
        return forward(rows)

    monkeypatch.setattr(lm.engine, "forward", slow)
    loom = Loom(lm, samples.story)
    new = loom.grow(n=3, max_tokens=60, seed=1)
    assert kernel.n_displays == 1
    assert len(kernel.drawn) >= 4
    times = [at for at, _, _ in kernel.drawn]
    assert all(
        after - before >= 0.1 - 1e-9 for before, after in zip(times, times[1:], strict=False)
    )
    _, html, text = kernel.drawn[-1]
    for node in new:
        assert " ".join(node.text.split())[:60] in text
    assert "3 branches · 180 tokens" in text
    assert html.count("display:flex") == 3


def test_lanes_do_not_change_the_result(lm: weft.LM, kernel: Kernel) -> None:
    options: dict[str, Any] = {"n": 4, "max_tokens": 24, "stop": "\n", "seed": 1}
    shown, quiet = Loom(lm, samples.game24), Loom(lm, samples.game24)
    one, other = shown.grow(**options), quiet.grow(**options, show=False)
    assert kernel.n_displays == 1
    for a, b in zip(one, other, strict=True):
        assert (a.tokens, a.finish_reason, a.stop_string) == (b.tokens, b.finish_reason, "\n")
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    assert shown.children == one


def test_stop_keeps_the_partial_branches(lm: weft.LM, kernel: Kernel) -> None:
    kernel.fail = KeyboardInterrupt()
    loom = Loom(lm, samples.story)
    with pytest.raises(KeyboardInterrupt):
        loom.grow(n=3, max_tokens=400, seed=1, temperature=2.0)
    assert len(loom.children) == 3
    assert {child.finish_reason for child in loom.children} <= {"interrupted", "stop"}
    assert all(child.tokens for child in loom.children)
    assert "stopped; its tokens are in the tree" in kernel.drawn[-1][2]
    loom.children[0].grow(max_tokens=2, force=True, show=False)


def test_display_that_fails_loses_no_branch(
    lm: weft.LM, kernel: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.fail = RuntimeError("the socket is gone")
    assert len(Loom(lm, samples.game24).grow(n=2, max_tokens=8)) == 2
    assert "the socket is gone" in caplog.text


def test_searches_show_no_lanes(lm: weft.LM, kernel: Kernel) -> None:
    weft.search.best_of_n(lm, samples.sum, n=2, max_tokens=8, seed=1)
    assert kernel.n_displays == 0


def test_without_ipython_nothing_is_shown(
    lm: weft.LM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    Loom(lm, samples.game24).grow(n=2, max_tokens=4)
    assert capsys.readouterr() == ("", "")
    assert "IPython" not in sys.modules


def test_imported_but_not_running_ipython_shows_nothing(
    lm: weft.LM, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: None)
    Loom(lm, samples.game24).grow(n=2, max_tokens=4)
    assert kernel.n_displays == 0


def test_ipython_in_a_terminal_gets_a_line_per_branch(
    lm: weft.LM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = Kernel(monkeypatch, has_kernel=False)
    new = Loom(lm, samples.game24).grow(n=2, max_tokens=24, stop="\n", seed=1)
    assert kernel.n_displays == 0
    out = capsys.readouterr().out
    assert sorted(out.splitlines()) == [
        f"[{at}] {node.text.strip()}  {len(node.tokens)} tok · stop" for at, node in enumerate(new)
    ]


def test_many_lanes_are_counted_and_model_text_is_escaped() -> None:
    lanes = live.LiveLanes(40)
    lanes.push(0, [("<script>\x1b", -3.0), ("x" * 5000, 0.0)], "stop")
    lanes.push(39, [], "length")
    html, text = lanes._repr_html_(), repr(lanes)
    assert "&lt;script&gt;\\x1b" in text.replace("<", "&lt;").replace(">", "&gt;")
    assert "<script>" not in html
    assert "\x1b" not in html + text
    assert "24 more branches, 1 ended" in html
    assert len(html) < 20_000


# Static


def test_loom_is_shown_as_text_and_as_html_without_style_sheet_or_script(
    lm: weft.LM,
) -> None:
    loom = Loom(lm, samples.game24)
    loom.grow(n=2, max_tokens=8, seed=1, show=False)
    shown = loom._repr_mimebundle_()
    assert shown["text/plain"] == str(loom)
    assert shown["text/html"] == loom._repr_html_()
    for word in ("<style", "<script", "class=", "href", "src="):
        assert word not in shown["text/html"]
    assert shown["text/html"].count("<details open>") == 1
    assert 'title="“' in shown["text/html"]


def test_large_trees_and_long_nodes_are_cut(tmp_path: Path) -> None:
    loom = open_written(tmp_path / "x.loom.json", [None, *[0] * 2000])
    loom.find("n5")._text = "word " * 10_000
    html = loom._repr_html_()
    assert f"… {2001 - LIMIT:,} more nodes below" in html
    assert len(html) < 100_000
    assert f"… {2001 - LIMIT} more nodes" in loom._repr_mimebundle_()["text/plain"]


def test_results_show_themselves(lm: weft.LM) -> None:
    loom = Loom(lm, samples.game24)
    new = loom.grow(n=25, max_tokens=4, seed=1, show=False)
    new[3].terminal = True
    second = loom.grow(at=new[:4], max_tokens=4, show=False)
    matches = weft.search.best_of_n(lm, samples.sum, n=2, max_tokens=8, seed=1)
    listed = loom.next(30)
    results = [new, second, matches, listed, listed[0], loom.measure("<b>" * 30), lm.stats()]
    for result in results:
        text, html = repr(result), result._repr_html_()
        assert text.count("\n") <= 24
        assert "<script" not in html
        assert html.count("<") == html.count(">")
    assert "… 5 more" in repr(new)
    assert "1 terminal node left alone" in second._repr_html_()
    assert "&lt;" in results[5]._repr_html_()
    assert "<b>" not in results[5]._repr_html_()
    assert "<details><summary" in matches._repr_html_()
    assert repr(lm.stats()).startswith("Stats(prefilled ")


def test_empty_result_is_shown_as_no_branches(lm: weft.LM) -> None:
    none = Loom(lm, samples.game24).grow(at=[])
    assert repr(none) == "no branches"
    assert "no branches" in none._repr_html_()
