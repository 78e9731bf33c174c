"""Exports of looms in every format."""

from __future__ import annotations

import csv
import io
import json
import math
from functools import cache
from pathlib import Path

import pytest

import weft
from shallow import shallow
from weft import LM, Loom
from weft.errors import ConfigError
from weft.service.interchange import EXPORTERS, Scope, export, write

TEXT = "Once upon"


@cache
def model() -> LM:
    return weft.load(shallow(), engine="numpy")


@pytest.fixture(scope="module")
def grown() -> Loom:
    """root → a b; a → a1 a2 a3; scored and bookmarked."""
    loom = Loom(model(), TEXT, template=False)
    a, b = loom.grow(n=2, max_tokens=4, seed=1)
    for node, score in zip(a.grow(n=3, max_tokens=4, seed=2), (0.2, 0.9, None), strict=True):
        node.score = score
    b.meta["bookmark"] = "good"
    a.meta["note"] = {"ü": [1, None]}
    return loom


def exported(node, format: str, **options) -> str:
    return "".join(export(node, format, **options))


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.mark.parametrize("format", EXPORTERS)
def test_export_leaves_the_loom_unchanged(grown: Loom, format: str, tmp_path: Path) -> None:
    grown.save(tmp_path / "before.loom.json")
    for scope in Scope:
        if scope not in EXPORTERS[format].refused:
            assert exported(grown.children[0], format, scope=scope)
    grown.save(tmp_path / "after.loom.json")
    before, after = ((tmp_path / f"{name}.loom.json").read_bytes() for name in ("before", "after"))
    assert before == after


@pytest.mark.parametrize("format", ["text", "markdown"])
def test_export_of_a_loom_with_branches_defaults_to_the_tree(grown: Loom, format: str) -> None:
    assert exported(grown, format) == exported(grown, format, scope="tree")
    assert exported(grown.children[0], format) == exported(grown.children[0], format, scope="path")
    alone = Loom(model(), TEXT, template=False)
    assert exported(alone, format) == exported(alone, format, scope="path")


@pytest.mark.parametrize(("scope", "n_nodes"), [("path", 2), ("subtree", 5), ("tree", 6)])
def test_json_export_of_a_part_opens_and_grows(
    grown: Loom, scope: str, n_nodes: int, tmp_path: Path
) -> None:
    file, node = tmp_path / "part.loom.json", grown.children[0]
    write(node, file, scope=scope)
    part = Loom.open(file, grown.lm)
    assert part.count_children() == n_nodes
    second = part.find(node.id)
    assert (second.tokens, second.logprobs, second.meta) == (node.tokens, node.logprobs, node.meta)
    assert second.params == node.params
    assert second.grow(n=1, max_tokens=2)[0].tokens


def test_json_export_of_the_tree_equals_loom_save(grown: Loom, tmp_path: Path) -> None:
    grown.save(tmp_path / "a.loom.json")
    order = {node.id: number for number, node in enumerate(grown.walk())}
    saved = (tmp_path / "a.loom.json").read_text(encoding="utf-8")
    assert exported(grown, "json", numbers=order) == saved


def test_export_excludes_nodes_added_after_the_call(grown: Loom) -> None:
    loom = Loom(None, "a")
    loom.add("b")
    pieces = export(loom, "csv")
    loom.add("c")
    assert len(rows("".join(pieces))) == 2


def test_text_export_is_the_text_of_the_path(grown: Loom) -> None:
    node = grown.children[0].children[1]
    assert exported(node, "text") == f"{TEXT}{node.crown()}".rstrip("\n") + "\n"


def test_csv_rows_have_text_height_and_probabilities(grown: Loom) -> None:
    result = rows(exported(grown, "csv"))
    nodes = {node.id: node for node in grown.walk()}
    assert [row["node"] for row in result] == ["0", "1", "2", "3", "4", "5"]
    for row in result:
        node = nodes[row["id"]]
        assert row["text"] == node.text
        assert int(row["height"]) == len(node.path) - 1
        if node.logprobs:
            assert math.isclose(float(row["mean_logprob"]), node.mean_logprob)
            assert math.isclose(float(row["mean_p"]), node.mean_p)
        else:
            assert not row["mean_logprob"]
    assert {row["bookmark"] for row in result} == {"", "good"}
    assert result[1]["branch"] == "1"


def test_token_rows_have_position_and_rank(grown: Loom) -> None:
    node = grown.children[0].children[0]
    plain, ranked = (
        rows(exported(node, "tokens", scope="path", ranks=ranks)) for ranks in (False, True)
    )
    assert [int(row["token_id"]) for row in plain] == node.get_prefix_tokens()
    assert [int(row["position"]) for row in plain] == list(range(len(plain)))
    assert "".join(row["token"] for row in plain[1:]) == node.get_prefix_text().removeprefix(
        "<|bos|>"
    )
    assert not any(row["rank"] for row in plain)
    last, at = ranked[-1], node.path[-2]
    tokens = node.tokens
    before = at.add(tokens[:-1])
    likeliest = [each.id for each in before.next(top=grown.lm.info.n_vocab)]
    before.remove()
    assert likeliest.index(tokens[-1]) == int(last["rank"])
    assert math.isclose(float(last["logprob"]), node.logprobs[-1], rel_tol=1e-6)


def test_pairs_export_prefers_the_sibling_with_the_higher_score(grown: Loom) -> None:
    low, high, _ = grown.children[0].children
    (pair,) = map(json.loads, exported(grown, "pairs").splitlines())
    prompt = grown.children[0].get_prefix_text()
    assert pair == {"prompt": prompt, "chosen": high.text, "rejected": low.text}
    (marked,) = map(json.loads, exported(grown, "pairs", by="bookmark").splitlines())
    assert marked["chosen"] == grown.children[1].text
    last = grown.children[0].children[2].text
    for rating, node in enumerate(grown.children):
        node.meta["rating"] = rating
    (rated,) = map(json.loads, exported(grown, "pairs", by="rating").splitlines())
    assert rated["chosen"] == grown.children[-1].text
    mine = exported(grown.children[0], "pairs", scope="subtree", by=lambda n: float(n.text == last))
    assert {json.loads(line)["chosen"] for line in mine.splitlines()} == {last}


def test_chat_is_exported_as_its_messages() -> None:
    loom = Loom(model(), "Hello", system="Be kind.")
    first, second = loom.grow(n=2, max_tokens=3, seed=1)
    first.score, second.score = 1, 0
    requests = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    lines = [json.loads(line)["messages"] for line in exported(loom, "messages").splitlines()]
    assert lines == [[*requests, {"role": "assistant", "content": n.text}] for n in (first, second)]
    (pair,) = map(json.loads, exported(loom, "pairs").splitlines())
    assert pair["prompt"] == requests
    assert pair["chosen"] == [{"role": "assistant", "content": first.text}]


def test_raw_prompt_is_exported_as_a_user_message() -> None:
    loom = Loom(model(), TEXT, template=False)
    assert loom.text != TEXT  # it begins with the model's own token
    (line,) = exported(loom, "messages").splitlines()
    assert json.loads(line)["messages"] == [{"role": "user", "content": TEXT}]


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [
        ("pdf", {}, "allowed are json, text"),
        ("text", {"scope": "all"}, "path, subtree, tree"),
        ("pairs", {"scope": "path"}, "no siblings"),
        ("csv", {"tint": "none"}, "no option 'tint'; allowed are bookmark"),
        ("pairs", {"by": "love"}, "by is 'love'"),
        ("pairs", {"by": lambda node: None}, "no siblings differ"),
    ],
)
def test_unsupported_export_option_raises_config_error(
    grown: Loom, format, options, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        exported(grown, format, **options)


def test_loom_without_model_is_exported_in_all_formats_but_tokens() -> None:
    loom = Loom(None, 'A "quoted", <b>\nline')
    loom.add("x").score = 1
    loom.add("y").score = 0
    for format in EXPORTERS:
        if format == "tokens":
            with pytest.raises(ConfigError, match="loom has texts"):
                exported(loom, format)
        else:
            assert exported(loom, format)
    assert rows(exported(loom, "csv"))[0]["text"] == loom.text


def test_deep_chain_is_exported_without_recursion() -> None:
    loom = Loom(None, "0")
    at = loom
    for index in range(3000):
        at = at.add(f" {index}")
    for format in ("json", "text", "csv", "messages", "markdown"):
        assert exported(at, format)


def test_file_suffix_selects_the_format_and_unknown_suffix_raises(
    grown: Loom, tmp_path: Path
) -> None:
    for exporter in EXPORTERS.values():
        write(grown, tmp_path / f"a{exporter.suffix}", format=exporter.name)
        assert (tmp_path / f"a{exporter.suffix}").stat().st_size
    with pytest.raises(ConfigError, match="ends in none of .json .txt"):
        write(grown, tmp_path / "a.docx")
    assert not (tmp_path / "a.docx").exists()
