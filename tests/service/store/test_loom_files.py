"""Saved looms, tested without a model."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from weft.errors import ConfigError, FormatError, StoreError
from weft.loom import Loom
from written_looms import file_of, node_record, open_written


def rich_nodes() -> list[dict[str, Any]]:
    return [
        node_record(0, None, meta={"k": [1, {"ü": None}]}),
        node_record(
            1,
            0,
            logprobs=[-0.1, "-inf"],
            entropies=[1.5, 0.0],
            params={
                "n": 2,
                "temperature": 0.25,
                "stop": ["\n"],
                "seed": 7,
                "logit_bias": {"3": "-inf"},
            },
            lineage=[3],
            finish_reason="stop",
            stop_string="\n",
            score="nan",
        ),
        node_record(2, 1, terminal=True, finish_reason="stop", score=-1e-300),
    ]


def test_saved_file_is_identical_after_reopening(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{name}.loom.json" for name in "abc")
    first.write_text(json.dumps(file_of(rich_nodes())), encoding="utf-8")
    loom = Loom.open(first)
    loom.save(second)
    Loom.open(second).save(third)
    assert second.read_bytes() == third.read_bytes()
    node = Loom.open(third).find("n1")
    assert node.logprobs == [-0.1, -math.inf]
    assert node.entropies == [1.5, 0.0]
    assert node.params is not None
    assert (node.params.seed, node.params.temperature, node.params.stop) == (7, 0.25, ("\n",))
    assert node.params.logit_bias == ((3, -math.inf),)
    assert node.lineage == (3,)
    assert (node.finish_reason, node.stop_string) == ("stop", "\n")
    assert math.isnan(node.score or 0)
    assert node.children[0].score == -1e-300
    assert node.children[0].terminal
    assert Loom.open(third).meta == {"k": [1, {"ü": None}]}


def test_failed_save_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.loom.json"
    loom = open_written(path, [None, 0])
    before = path.read_bytes()
    for bad in (object(), float("nan"), {1, 2}):
        loom.children[0].meta = {"bad": bad}
        with pytest.raises(ConfigError, match="meta of node n1"):
            loom.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.loom.json"]


def test_save_to_missing_folder_raises_store_error(tmp_path: Path) -> None:
    loom = open_written(tmp_path / "x.loom.json", [None])
    with pytest.raises(StoreError, match="cannot write"):
        loom.save(tmp_path / "no" / "x.loom.json")
    with pytest.raises(StoreError, match="cannot read"):
        Loom.open(tmp_path / "nothing.loom.json")


def test_lone_surrogate_round_trips(tmp_path: Path) -> None:
    loom = open_written(tmp_path / "x.loom.json", [None])
    loom.meta = {"x": "\udc80"}
    loom.save(tmp_path / "y.loom.json")
    assert Loom.open(tmp_path / "y.loom.json").meta == {"x": "\udc80"}


BROKEN: list[tuple[str, Any]] = [
    ("no saved loom", []),
    ("no saved loom", {"format": "other"}),
    ("version 2; this Weft reads up to 1", file_of([], version=2)),
    ("version 0", file_of([], version=0)),
    ("'version'", file_of([], version="1")),
    ("no nodes", file_of([])),
    (
        "n_vocab",
        file_of([node_record(0, None)], model={"name": "", "fingerprint": "", "n_vocab": 0}),
    ),
    ("fingerprint", file_of([node_record(0, None)], model={"name": "", "n_vocab": 9})),
    ("parent must be null", file_of([node_record(0, 0)])),
    ("parent of node 1", file_of([node_record(0, None), node_record(1, 1)])),
    ("parent of node 1", file_of([node_record(0, None), node_record(1, None)])),
    (
        "same id",
        file_of([node_record(0, None), node_record(0, 0)][:1] + [node_record(1, 0, id="n0")]),
    ),
    ("token of node 0", file_of([node_record(0, None, tokens=[64])])),
    ("token of node 0", file_of([node_record(0, None, tokens=[-1])])),
    ("token of node 0", file_of([node_record(0, None, tokens=[True])])),
    ("token of node 0", file_of([node_record(0, None, tokens=["a"])])),
    ("logprobs of node 0", file_of([node_record(0, None, logprobs=["x", "y"])])),
    ("'terminal'", file_of([node_record(0, None, terminal=1)])),
    ("finish_reason", file_of([node_record(0, None, finish_reason="done")])),
    ("params", file_of([node_record(0, None, params={"temperature": -1})])),
    ("params", file_of([node_record(0, None, params={"heat": 1})])),
    ("score", file_of([node_record(0, None, score="high")])),
    ("score of node 0", file_of([node_record(0, None, score=10**400)])),
    ("logprobs of node 0", file_of([node_record(0, None, logprobs=[10**400, 0])])),
    ("params", file_of([node_record(0, None, params={"temperature": 10**400})])),
    ("params", file_of([node_record(0, None, params={"constraint": {"regex": 5}})])),
    ("params", file_of([node_record(0, None, params={"constraint": {"lazy": 5}})])),
    ("meta of node 0", file_of([node_record(0, None, meta={"x": math.inf})])),
    ("has no 'meta'", file_of([{k: v for k, v in node_record(0, None).items() if k != "meta"}])),
    ("node 1", file_of([node_record(0, None), 5])),
    ("'prompt'", file_of([node_record(0, None)], prompt=None)),
]


@pytest.mark.parametrize(("message", "data"), BROKEN)
def test_broken_file_raises_format_error_with_place(
    tmp_path: Path, message: str, data: Any
) -> None:
    path = tmp_path / "x.loom.json"
    path.write_text(json.dumps(data).replace("Infinity", "1e999"), encoding="utf-8")
    with pytest.raises(FormatError, match=message) as caught:
        Loom.open(path)
    assert str(caught.value).startswith(str(path))


def test_logprobs_of_wrong_length_are_dropped_with_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.loom.json"
    torn = node_record(1, 0, tokens=[1, 2, 3], logprobs=[-1.0, -2.0, -3.0], entropies=[0.5])
    path.write_text(json.dumps(file_of([node_record(0, None), torn, node_record(2, 1)])))
    loom = Loom.open(path)
    node = loom.find("n1")
    assert (node.tokens, node.logprobs, node.entropies) == ([1, 2, 3], [-1.0, -2.0, -3.0], [])
    assert [each.id for each in loom.walk()] == ["n0", "n1", "n2"]
    assert loom.dropped == ("node 1 has 3 tokens and 1 entropies: these are left out",)
    assert loom.dropped[0] in caplog.text
    loom.save(path)
    assert Loom.open(path).dropped == ()


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_nan_literals_raise_format_error(tmp_path: Path, word: str) -> None:
    path = tmp_path / "x.loom.json"
    text = json.dumps(file_of([node_record(0, None, meta={"x": "?"})]))
    path.write_text(text.replace('"?"', word))
    with pytest.raises(FormatError, match=f"{word} is no JSON"):
        Loom.open(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 200_000, b"loom"])
def test_invalid_json_raises_format_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.loom.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match="no saved loom"):
        Loom.open(path)
