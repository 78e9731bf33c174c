"""Laws of the page: self-contained, escaped, complete, and honest about what it leaves out."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import weft
from weft import Loom, samples
from weft.errors import ConfigError, StoreError
from weft.viz.color_scale import ENTROPY, PROBABILITY
from weft.viz.html import LARGE
from weft.viz.outline import MAX_FORKS, best_path
from weft.viz.tokens import percent
from written_looms import file_of, node_record, open_written

NASTY = (
    "<script>alert(1)</script> \"q\" 'a' </style> & \x00\x1b[2J\u202e\ud800 <img src=x onerror=y>"
)
VOID = {"meta", "input", "br"}
VIZ = Path(weft.__file__).parent / "viz"


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


def scripts(page: str) -> list[str]:
    return re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)


def test_page_loads_nothing_and_runs_its_own_script_only(grown: Loom) -> None:
    grown.add(NASTY.replace("\ud800", ""))
    page = grown.to_html(top=3)
    reader = read(page)
    assert not {"link", "img", "iframe", "object", "base", "form"} & {t for t, _ in reader.tags}
    for _, attrs in reader.tags:
        assert not {"src", "srcset"} & set(attrs)
        assert (attrs.get("href") or "#").startswith("#")
        assert not [name for name in attrs if name.startswith("on")]
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page
    own = (VIZ / "page.js").read_text(encoding="utf-8")
    assert scripts(page) == [own]
    assert not re.search(r"fetch|XMLHttp|import\b|innerHTML|eval|document\.write|localStorage", own)
    allowed = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    assert f"script-src 'sha256-{allowed}';" in page


@pytest.mark.parametrize("field", ["_text", "id", "prompt", "name"])
def test_any_text_of_a_file_is_escaped(written: Loom, field: str) -> None:
    if field == "prompt":
        written.user_prompt = NASTY
    elif field == "name":
        written.saved_by = written.saved_by._replace(name=NASTY)
    else:
        setattr(written.find("n3"), field, NASTY)
    for html in (written.to_html(), written._repr_html_()):
        reader = read(html)
        assert "img" not in {tag for tag, _ in reader.tags}
        assert len(scripts(html)) == (html.startswith("<!doctype"))
        assert not {"\x00", "\x1b", "\u202e", "\ud800"} & set(html)
        html.encode("utf-8")
    assert read(written.to_html(node=lambda n: NASTY)).text.count("<script>alert(1)") >= 5


def test_page_has_all_texts_and_the_scores_of_every_token(grown: Loom) -> None:
    page = grown.to_html()
    text = read(page).text
    for node in grown.walk():
        assert node.text.strip() in text or node is grown
    sampled = sum(len(node.logprobs) for node in grown.walk())
    assert page.count("data-tip=") == sampled
    assert page.count('class="t p') == sampled


def test_alternatives_are_those_of_next(grown: Loom) -> None:
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


def test_alternatives_without_a_model_raise(written: Loom) -> None:
    written.find("n2").logprobs = [-0.1, -0.2]
    with pytest.raises(ConfigError, match="without a model"):
        written.to_html(top=3)
    with pytest.raises(ConfigError, match="top"):
        written.to_html(top=-1)


def test_node_without_a_model_is_tinted_by_its_mean(written: Loom) -> None:
    written.find("n2").logprobs = [-0.5, -1.5]
    page = written.to_html()
    assert page.count("data-tip=") == 1
    assert "mean logprob −1.000" in page


@pytest.mark.parametrize(("tint", "key"), [("probability", "p"), ("entropy", "h"), ("none", "n")])
def test_tint_is_chosen_by_radio_buttons(written: Loom, tint: str, key: str) -> None:
    radios = [a for t, a in read(written.to_html(tint=tint)).tags if t == "input"]
    assert [a["id"] for a in radios if "checked" in a] == [f"tint-{key}"]


def test_invalid_tint_raises(written: Loom) -> None:
    with pytest.raises(ConfigError, match="allowed: probability, entropy, none"):
        written.to_html(tint="rainbow")


def test_limit_counts_omitted_nodes_where_they_are(written: Loom) -> None:
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


def test_path_to_a_node_is_marked(written: Loom) -> None:
    page = written.to_html(mark=written.find("n3"))
    assert re.findall(r'class="node on" id="n-(\w+)"', page) == ["n1", "n3"]


def test_to_html_with_a_path_returns_none_and_raises_if_not_writable(
    written: Loom, tmp_path: Path
) -> None:
    assert written.to_html(tmp_path / "x.html") is None
    assert (tmp_path / "x.html").read_text(encoding="utf-8") == written.to_html()
    with pytest.raises(StoreError, match="cannot write"):
        written.to_html(tmp_path / "no" / "x.html")


def test_overridden_display_text_is_shown(lm: weft.LM) -> None:
    class Loud(weft.Heddle):
        def display_text(self) -> str:
            return self.text.upper()

    loom = Loom(lm, samples.story, heddle_class=Loud)
    node = loom.grow(max_tokens=8, seed=1)[0]
    assert node.text.upper() in read(loom.to_html()).text


# Large trees


def bush(tmp_path: Path, *, n: int = 4, deep: int = 4, score: bool = True) -> Loom:
    """A tree of `n` branches at each node; with `score`, the last leaf is the best."""
    parents: list[int | None] = [None]
    row = [0]
    for _ in range(deep):
        above, row = row, []
        for parent in above:
            for _ in range(n):
                row.append(len(parents))
                parents.append(parent)
    nodes = [node_record(at, parent) for at, parent in enumerate(parents)]
    for at, leaf in enumerate(row):
        nodes[leaf]["score"] = at / len(row) if score else None
    path = tmp_path / "bush.loom.json"
    path.write_text(json.dumps(file_of(nodes)), encoding="utf-8")
    return Loom.open(path)


class Folds(Reader):
    """Collects what is folded away when the page is opened, and what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.closed: list[bool] = []
        self.nodes: dict[str, bool] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        given = dict(attrs)
        if tag == "details":
            self.closed.append("open" not in given)
        if "node" in (given.get("class") or "").split():
            self.nodes[str(given["id"])[2:]] = not any(self.closed)

    def handle_endtag(self, tag: str) -> None:
        super().handle_endtag(tag)
        if tag == "details":
            self.closed.pop()


def folds(page: str) -> dict[str, bool]:
    """Return for each node id if it is visible when the page is opened."""
    reader = Folds()
    reader.feed(page)
    reader.close()
    return reader.nodes


def test_large_tree_is_folded_below_the_best_path_and_a_small_one_is_not(tmp_path: Path) -> None:
    loom = bush(tmp_path)
    observed = folds(loom.to_html())
    assert len(observed) == loom.count_children() - 1 > LARGE
    best = max(loom.leaves, key=lambda leaf: leaf.score or 0)
    expected = {child.id for node in best.path[:-1] for child in node.children}
    assert {node for node, is_visible in observed.items() if is_visible} == expected
    small = bush(tmp_path, n=3, deep=3)
    assert small.count_children() < LARGE
    assert all(folds(small.to_html()).values())
    assert "<svg" not in small.to_html()
    for n, is_large in ((LARGE, False), (LARGE + 1, True)):
        row = open_written(tmp_path / "row.loom.json", [None, *[0] * n])
        assert ("<svg" in row.to_html()) is is_large


def test_marked_path_is_the_open_one(tmp_path: Path) -> None:
    loom = bush(tmp_path)
    mark = loom.leaves[5]
    page = loom.to_html(mark=mark)
    expected = {child.id for node in mark.path[:-1] for child in node.children}
    assert {node for node, is_visible in folds(page).items() if is_visible} == expected
    assert re.findall(r'class="node on" id="n-(\w+)"', page) == [node.id for node in mark.path[1:]]
    # With the mark at the prompt, or outside the drawn part, the best path is shown.
    for elsewhere in (loom, loom.children[1]):
        assert "<h2>Best path</h2>" in loom.children[0].to_html(mark=elsewhere)


def test_large_tree_starts_with_a_picture_and_the_path_in_words(tmp_path: Path) -> None:
    loom = bush(tmp_path)
    reader = read(loom.to_html())
    bars = [attrs for tag, attrs in reader.tags if tag == "rect"]
    assert len(bars) == loom.count_children() - 1
    for row in range(4):
        at = [bar for bar in bars if bar["y"] == f"{row * 22:.1f}"]
        assert len(at) == 4 ** (row + 1)
        assert sum(float(str(bar["width"])) for bar in at) == pytest.approx(1000, rel=0.15)
        assert float(str(at[-1]["x"])) == pytest.approx(1000 * (1 - 4 ** -(row + 1)), abs=0.1)
    assert sum(bar["class"] == "on" for bar in bars) == 4
    # What a bar or a link names is in the page.
    ids = {attrs["id"] for _, attrs in reader.tags if "id" in attrs}
    assert {bar["data-n"] for bar in bars} <= ids
    links = [str(attrs["href"]) for tag, attrs in reader.tags if tag == "a"]
    assert len(links) == 4
    assert {link[1:] for link in links} <= ids


@pytest.mark.parametrize("score", [math.inf, -math.inf, math.nan, 1e308, -1e308])
def test_score_without_measure_is_the_best_or_the_worst(tmp_path: Path, score: float) -> None:
    loom = bush(tmp_path)
    try:
        loom.leaves[0].score = score
    except ConfigError:
        pytest.skip("no score")
    bars = re.findall(r'<rect class="(\w+)"', loom.to_html(mark=loom.leaves[-1]))
    first_leaf = bars[3]
    assert first_leaf == ("s5" if score > 0 else "s0")


def test_ids_of_a_page_are_unique(tmp_path: Path) -> None:
    ids = [attrs["id"] for _, attrs in read(bush(tmp_path).to_html()).tags if "id" in attrs]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("on", [3, 40, 99])
def test_long_rows_of_siblings_are_folded_around_the_path(tmp_path: Path, on: int) -> None:
    loom = open_written(tmp_path / "x.loom.json", [None, *[0] * 100])
    mark = loom.children[on]
    page = loom.to_html(mark=mark)
    observed = folds(page)
    assert list(observed) == [child.id for child in loom.children]
    first = {child.id for child in loom.children[:24]}
    assert {node for node, is_visible in observed.items() if is_visible} == first | {mark.id}
    counted = [int(n) for n in re.findall(r"(\d+) more branch", page)]
    assert sum(counted) == 100 - len(first | {mark.id})
    read(page)


def test_long_runs_are_folded_in_the_middle(tmp_path: Path) -> None:
    loom = open_written(tmp_path / "x.loom.json", [None, *range(1000)])
    page = loom.to_html(mark=loom.leaves[0])
    observed = folds(page)
    assert len(observed) == 1000
    assert [at for at, is_visible in enumerate(observed.values()) if is_visible] == [
        *range(12),
        *range(988, 1000),
    ]
    assert "976 more nodes" in page
    assert "… 988 more nodes" in page  # in the list of the path


def test_run_next_to_the_path_is_folded_after_its_first_node(tmp_path: Path) -> None:
    loom = open_written(tmp_path / "x.loom.json", [None, 0, *range(1, 80), 0])
    page = loom.to_html(mark=loom.children[1])
    observed = folds(page)
    assert [node for node, is_visible in observed.items() if is_visible] == ["n1", "n81"]
    assert "79 nodes further" in page


@pytest.mark.parametrize("n_siblings", [2, 30])
def test_folded_page_is_never_nested_too_deep(tmp_path: Path, n_siblings: int) -> None:
    """A comb: the last of some siblings goes on."""
    parents: list[int | None] = [None]
    for _ in range(MAX_FORKS + 10):
        parents += [len(parents) - 1] * n_siblings
    loom = open_written(tmp_path / "comb.loom.json", parents)
    assert read(loom.to_html()).deepest < 512


def test_best_path_is_selected_by_score_then_by_mean_logprob(tmp_path: Path) -> None:
    loom = bush(tmp_path, n=2, deep=2, score=False)
    assert best_path(loom) == []
    assert all(bar != "on" for bar in re.findall(r'rect class="(\w+)"', loom.to_html()))
    for at, leaf in enumerate(loom.leaves):
        leaf.logprobs = [-1.0 - at % 3]
    assert best_path(loom) == loom.leaves[0].path
    loom.children[0].logprobs = [-9.0]
    assert best_path(loom) == loom.leaves[3].path
    assert best_path(loom.children[0]) == loom.leaves[0].path[1:]
    loom.leaves[1].score = 0.5
    assert best_path(loom) == loom.leaves[1].path
    loom.leaves[2].score = 0.5
    loom.leaves[2].terminal = True
    assert best_path(loom) == loom.leaves[2].path


# Numbers and tables


def numbers(page: str) -> dict[str, int]:
    result = re.findall(r'id="n-(\w+)"><span class="no" id="(\d+)">(\d+)</span>', page)
    assert all(anchor == shown for _, anchor, shown in result)
    return {node: int(shown) for node, _, shown in result}


def test_nodes_have_the_numbers_of_the_command(grown: Loom, tmp_path: Path) -> None:
    from weft.loom.node import preorder_by_call

    expected = {node.id: number for number, node in enumerate(preorder_by_call(grown))}
    assert numbers(grown.to_html()) == {id: n for id, n in expected.items() if n}
    # A part keeps the numbers of the full tree, and the order is that of the numbers.
    part = numbers(grown.children[0].to_html())
    assert part == {node.id: expected[node.id] for node in grown.children[0].walk()}
    shown = list(numbers(grown.to_html()).values())
    assert shown == sorted(shown)


def test_tables_leave_out_certain_tokens(lm: weft.LM) -> None:
    loom = Loom(lm, samples.game24)
    node = loom.grow(max_tokens=12, seed=1)[0]
    n = len(node.tokens)
    node.logprobs = [-0.0001] * (n - 2) + [-1.0, -0.5]
    page = loom.to_html()
    assert page.count("<tr><td>") == 2
    assert f"{n - 2} more tokens of 100.0 %" in page
    node.logprobs = [-0.0001] * n
    page = loom.to_html()
    assert "<table" not in page
    assert page.count("data-tip=") == n


def test_huge_tree_has_scores_of_surprising_tokens_only(
    lm: weft.LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.viz.html.MAX_TABLED", 10)
    loom = Loom(lm, samples.game24)
    node = loom.grow(max_tokens=20, seed=1)[0]
    page = loom.to_html()
    read(page)
    tinted = sum(
        bool(PROBABILITY.level(math.exp(lp)) or ENTROPY.level(h))
        for lp, h in zip(node.logprobs, node.entropies, strict=True)
    )
    assert page.count("data-tip=") == tinted < len(node.tokens)
    assert "<table" not in page
    assert "too many tokens" in page
    assert node.text.strip() in read(page).text


def test_text_on_every_tint_has_a_contrast_of_4_5_in_light_and_dark() -> None:
    """WCAG AA: text on every tint, and soft text on the page, has a contrast of 4.5 or more."""
    css = (VIZ / "page.css").read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in halves(css))
    for colours in (light, dark):
        for name in ("p1", "p2", "p3", "p4", "p5", "h1", "h2", "h3", "h4", "h5", "paper"):
            assert contrast(colours["ink"], colours[name]) >= 4.5, name
        for name in ("paper", "card", "spot"):
            assert contrast(colours["soft"], colours[name]) >= 4.5
            assert contrast(colours["accent"], colours[name]) >= 4.5
        # A control is visible by its edge.
        assert contrast(colours["field"], colours["paper"]) >= 3
        assert contrast(colours["tip-ink"], colours["tip"]) >= 4.5
        for key in "phs":
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
