"""Laws of the page: self-contained, escaped, complete, and honest about what it leaves out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import weft
from weft import Loom, samples
from weft.errors import ConfigError, StoreError
from weft.viz.outline import MAX_FORKS
from weft.viz.tints import ENTROPY, PROBABILITY, percent
from written_looms import open_written

NASTY = (
    "<script>alert(1)</script> \"q\" 'a' </style> & \x00\x1b[2J\u202e\ud800 <img src=x onerror=y>"
)
VOID = {"meta", "input", "br"}


class Reader(HTMLParser):
    """Collects elements and text; fails on elements that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.deepest = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.deepest = max(self.deepest, len(self.open))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def lm() -> Iterator[weft.LM]:
    with weft.load("tiny") as lm:
        yield lm


@pytest.fixture
def grown(lm: weft.LM) -> Loom:
    loom = Loom(lm, samples.game24)
    steps = loom.grow(n=3, max_tokens=24, stop="\n", seed=1)
    steps[0].grow(n=2, max_tokens=12, seed=2)
    return loom


@pytest.fixture
def written(tmp_path: Path) -> Loom:
    return open_written(tmp_path / "x.loom.json", [None, 0, 1, 1, 0, 4])


def test_the_page_loads_nothing_and_runs_nothing(grown: Loom) -> None:
    grown.add(NASTY.replace("\ud800", ""))
    page = grown.to_html(top=3)
    reader = read(page)
    assert not {"script", "link", "img", "iframe", "object", "base"} & {t for t, _ in reader.tags}
    for _, attrs in reader.tags:
        assert not {"src", "href", "srcset"} & set(attrs)
        assert not [name for name in attrs if name.startswith("on")]
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


@pytest.mark.parametrize("field", ["_text", "id", "prompt", "name"])
def test_whatever_a_file_says_is_escaped(written: Loom, field: str) -> None:
    if field == "prompt":
        written.user_prompt = NASTY
    elif field == "name":
        written.saved_by = written.saved_by._replace(name=NASTY)
    else:
        setattr(written.find("n3"), field, NASTY)
    for html in (written.to_html(), written._repr_html_()):
        reader = read(html)
        assert not {"script", "img"} & {tag for tag, _ in reader.tags}
        assert not {"\x00", "\x1b", "\u202e", "\ud800"} & set(html)
        html.encode("utf-8")
    assert read(written.to_html(node=lambda n: NASTY)).text.count("<script>alert(1)") >= 5


def test_all_text_is_there_and_every_token_has_its_figures(grown: Loom) -> None:
    page = grown.to_html()
    text = read(page).text
    for node in grown.walk():
        assert node.text.strip() in text or node is grown
    sampled = sum(len(node.logprobs) for node in grown.walk())
    assert page.count("data-tip=") == sampled
    assert page.count('class="t p') == sampled


def test_alternatives_come_from_the_model_and_agree_with_next(grown: Loom) -> None:
    step = grown.children[1]
    before = grown.count_children()
    page = grown.to_html(top=3)
    assert grown.count_children() == before
    expected = grown.next(3)
    tip = next(a["data-tip"] for t, a in read(page).tags if t == "span" and "data-tip" in a)
    assert tip is not None
    assert [f"“{each.text}”" in tip for each in expected] == [True] * 3
    assert "◂ chosen" in tip
    first = next(e for e in expected if e.id == step.tokens[0])
    assert f"p {percent(first.p)}" in page


def test_alternatives_without_a_model_are_refused(written: Loom) -> None:
    written.find("n2").logprobs = [-0.1, -0.2]
    with pytest.raises(ConfigError, match="without a model"):
        written.to_html(top=3)
    with pytest.raises(ConfigError, match="top"):
        written.to_html(top=-1)


def test_without_a_model_a_node_is_tinted_by_its_mean(written: Loom) -> None:
    written.find("n2").logprobs = [-0.5, -1.5]
    page = written.to_html()
    assert page.count("data-tip=") == 1
    assert "mean logprob −1.000" in page


@pytest.mark.parametrize(("tint", "key"), [("probability", "p"), ("entropy", "h"), ("none", "n")])
def test_the_tint_is_chosen_by_radio_buttons(written: Loom, tint: str, key: str) -> None:
    radios = [a for t, a in read(written.to_html(tint=tint)).tags if t == "input"]
    assert [a["id"] for a in radios if "checked" in a] == [f"tint-{key}"]


def test_a_wrong_tint_is_refused(written: Loom) -> None:
    with pytest.raises(ConfigError, match="allowed: probability, entropy, none"):
        written.to_html(tint="rainbow")


def test_limit_counts_what_is_left_out_where_it_is(written: Loom) -> None:
    page = written.to_html(limit=3)
    assert page.count('class="node"') == 2
    assert "… 2 more nodes below" in page
    assert "… 1 more node below" in page


def test_forks_nest_no_deeper_than_browsers_do(tmp_path: Path) -> None:
    parents: list[int | None] = [None]
    for _ in range(400):
        parents += [len(parents) - 1, len(parents) - 1]
    loom = open_written(tmp_path / "comb.loom.json", parents)
    reader = read(loom.to_html())
    assert reader.deepest < 512
    shown = sum("node" in (a.get("class") or "").split() for _, a in reader.tags)
    assert shown == 2 * MAX_FORKS
    assert f"… {2 * (400 - MAX_FORKS)} more nodes below" in reader.text


def test_the_path_to_a_node_is_marked(written: Loom) -> None:
    page = written.to_html(mark=written.find("n3"))
    assert re.findall(r'class="node on" id="n-(\w+)"', page) == ["n1", "n3"]


def test_writing_returns_nothing_and_says_why_it_cannot(written: Loom, tmp_path: Path) -> None:
    assert written.to_html(tmp_path / "x.html") is None
    assert (tmp_path / "x.html").read_text(encoding="utf-8") == written.to_html()
    with pytest.raises(StoreError, match="cannot write"):
        written.to_html(tmp_path / "no" / "x.html")


def test_a_display_text_of_ones_own_is_what_is_shown(lm: weft.LM) -> None:
    class Loud(weft.Heddle):
        def display_text(self) -> str:
            return self.text.upper()

    loom = Loom(lm, samples.story, heddle_class=Loud)
    node = loom.grow(max_tokens=8, seed=1)[0]
    assert node.text.upper() in read(loom.to_html()).text


def test_ramps_rise_with_surprise() -> None:
    assert [PROBABILITY.level(p) for p in (1, 0.9, 0.7, 0.4, 0.2, 0.05, 0)] == [0, 0, 1, 2, 3, 4, 5]
    assert [ENTROPY.level(h) for h in (0, 0.1, 0.5, 1, 2, 3, 9)] == [0, 1, 2, 3, 4, 5, 5]
    assert PROBABILITY.level(float("nan")) == ENTROPY.level(float("nan")) == 5


def test_every_tint_can_be_read_in_light_and_dark() -> None:
    """WCAG AA: text on every tint, and soft text on the page, has a contrast of 4.5 or more."""
    css = (Path(weft.__file__).parent / "viz" / "page.css").read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in halves(css))
    for colours in (light, dark):
        for name in ("p1", "p2", "p3", "p4", "p5", "h1", "h2", "h3", "h4", "h5", "paper"):
            assert contrast(colours["ink"], colours[name]) >= 4.5, name
        for name in ("paper", "card"):
            assert contrast(colours["soft"], colours[name]) >= 4.5
        assert contrast(colours["accent"], colours["paper"]) >= 4.5
        assert contrast(colours["tip-ink"], colours["tip"]) >= 4.5
        for key in "ph":
            steps = [luminance(colours[f"{key}{step}"]) for step in range(1, 6)]
            assert steps in (sorted(steps), sorted(steps, reverse=True))


def halves(css: str) -> tuple[str, str]:
    first, _, rest = css.partition("@media (prefers-color-scheme: dark)")
    return first, rest.partition("\n}\n")[0]


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
