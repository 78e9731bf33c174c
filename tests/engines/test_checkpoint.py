"""Broken model folders raise at once, with the file and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_reference import CONFIG, random_tensors, write_folder, write_safetensors
from weft.engines.checkpoint import (
    check_tokenizer,
    fingerprint,
    open_checkpoint,
    read_config,
    sample_positions,
)
from weft.errors import ModelLoadError, Unsupported

INDEX = "model.safetensors.index.json"
ConnectionLost = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def shards(folder: Path) -> Path:
    """The same folder in two shards."""
    tensors = list(random_tensors(CONFIG).items())
    weight_map = {}
    for number, part in enumerate((tensors[:7], tensors[7:])):
        name = f"model-{number}.safetensors"
        write_safetensors(folder / name, dict(part))
        weight_map |= {key: name for key, _ in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return folder


def cut(name: str, n_bytes: int) -> ConnectionLost:
    def break_it(folder: Path) -> None:
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw[:n_bytes] if n_bytes >= 0 else raw[: len(raw) + n_bytes])

    return break_it


def write(name: str, text: str) -> ConnectionLost:
    return lambda folder: (folder / name).write_text(text)


def remove(name: str) -> ConnectionLost:
    return lambda folder: (folder / name).unlink()


def put_header(header: str) -> ConnectionLost:
    raw = len(header).to_bytes(8, "little") + header.encode()
    return lambda folder: (folder / "model.safetensors").write_bytes(raw)


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (shutil.rmtree, "no folder"),
        (remove("config.json"), r"no config\.json"),
        (write("config.json", "{"), r"config\.json is not JSON"),
        (write("config.json", "[]"), "not a JSON object"),
        (remove("model.safetensors"), r"no \*\.safetensors"),
        (cut("model.safetensors", 0), "truncated"),
        (cut("model.safetensors", 5), "truncated"),
        (cut("model.safetensors", 300), "truncated"),
        (cut("model.safetensors", -1), "truncated"),
        (put_header("not json"), "not a safetensors file"),
        (put_header("[1]"), "not a safetensors file"),
        (put_header('{"a": {"dtype": "F32"}}'), "not a safetensors file"),
    ],
)
def test_broken_folder_raises(folder: Path, break_it: ConnectionLost, named: str) -> None:
    break_it(folder)
    with pytest.raises(ModelLoadError, match=named):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (remove("model-1.safetensors"), r"has no model-1\.safetensors"),
        (cut("model-1.safetensors", -1), "truncated"),
        (
            lambda f: write_safetensors(f / "model-1.safetensors", {}),
            "tensors that no shard contains",
        ),
        (write(INDEX, "{}"), "weight_map"),
    ],
)
def test_broken_shards_raise(shards: Path, break_it: ConnectionLost, named: str) -> None:
    break_it(shards)
    with pytest.raises(ModelLoadError, match=named):
        open_checkpoint(shards)


def test_sharded_checkpoint_equals_single_file(shards: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "whole")
    one, other = open_checkpoint(shards), open_checkpoint(tmp_path / "whole")
    assert one.fingerprint() == other.fingerprint()
    for name, value in random_tensors(CONFIG).items():
        np.testing.assert_array_equal(one.read(name, value.shape), value)
        assert name in other


@pytest.mark.parametrize(("dtype", "bits"), [("F32", 23), ("F64", 23), ("F16", 10), ("BF16", 7)])
def test_every_float_format_is_read_as_float32(tmp_path: Path, dtype: str, bits: int) -> None:
    (tmp_path / "config.json").write_text("{}")
    values = np.array([[0.0, -1.5, 3.25], [1e-3, 100.0, -7e-2]], np.float32)
    write_safetensors(tmp_path / "model.safetensors", {"a": values, "none": values[:0]}, dtype)
    checkpoint = open_checkpoint(tmp_path)
    read = checkpoint.read("a", (2, 3))
    assert read.dtype == np.float32
    np.testing.assert_allclose(read, values, rtol=2.0**-bits)
    assert checkpoint.read("none").shape == (0, 3)


def test_other_formats_are_unsupported_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    header = {"a": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}
    put_header(json.dumps(header))(tmp_path)
    with (tmp_path / "model.safetensors").open("ab") as stream:
        stream.write(b"\0\0")
    with pytest.raises(Unsupported, match="F8_E4M3"):
        open_checkpoint(tmp_path).read("a")


def test_tensor_that_is_missing_or_of_another_shape_is_named(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    with pytest.raises(ModelLoadError, match="lm_head"):
        checkpoint.read("lm_head.weight")
    with pytest.raises(ModelLoadError, match=r"\[24\].*\[25\]"):
        checkpoint.read("model.norm.weight", (25,))


def test_size_and_shape_that_disagree_raise(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    header = {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}
    put_header(json.dumps(header))(tmp_path)
    with (tmp_path / "model.safetensors").open("ab") as stream:
        stream.write(b"\0" * 4)
    with pytest.raises(ModelLoadError, match="do not agree"):
        open_checkpoint(tmp_path).read("a")


def test_fingerprint_follows_the_weights_not_the_place(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert open_checkpoint(copy).fingerprint() == open_checkpoint(folder).fingerprint()
    tensors = random_tensors(CONFIG)
    tensors["model.norm.weight"][3] += 0.5
    write_folder(tmp_path / "other", tensors=tensors)
    assert (
        open_checkpoint(tmp_path / "other").fingerprint() != open_checkpoint(folder).fingerprint()
    )


def test_fingerprint_follows_shape_name_and_config_but_not_order() -> None:
    one = ("a", (2,), np.ones(2, np.float32))
    two = ("b", (1, 2), np.ones(2, np.float32))
    prints = {
        fingerprint({}, [one, two]),
        fingerprint({}, [one]),
        fingerprint({}, [one, ("b", (2, 1), two[2])]),
        fingerprint({}, [one, ("c", (1, 2), two[2])]),
        fingerprint({"vocab_size": 9}, [one, two]),
    }
    assert len(prints) == 5
    assert fingerprint({"_name_or_path": "x"}, [two, one]) in prints


@pytest.mark.parametrize("size", [0, 1, 95, 96, 97, 1000])
def test_sample_positions_are_distinct_and_inside(size: int) -> None:
    positions = sample_positions(size)
    assert len(set(positions.tolist())) == len(positions) == min(size, 96)
    assert all(0 <= at < size for at in positions)


def tokenizer_json(*ids: int, added: tuple[int, ...] = ()) -> str:
    return json.dumps(
        {
            "model": {"vocab": {f"t{i}": i for i in ids}},
            "added_tokens": [{"id": i, "content": f"<{i}>"} for i in added],
        }
    )


def test_missing_tokenizer_is_named(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        check_tokenizer(folder, 61)


@pytest.mark.parametrize(
    "text", [tokenizer_json(0, 60), tokenizer_json(0, added=(60,)), tokenizer_json(0, added=(70,))]
)
def test_tokenizer_with_added_tokens_beyond_the_vocabulary_passes(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    check_tokenizer(folder, 61)


def test_tokenizer_of_another_kind_of_file_is_left_to_its_reader(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"")
    check_tokenizer(folder, 61)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (tokenizer_json(0, 61), "wrong tokenizer.*61"),
        (json.dumps({"model": {"vocab": [["a", 0.0]] * 62}}), "wrong tokenizer.*61"),
        ('{"model": {"vocab": 5}}', "5 as its vocabulary"),
        ("{}", "has no tokens"),
        ("{", "not JSON"),
    ],
)
def test_tokenizer_that_does_not_fit_raises(folder: Path, text: str, named: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelLoadError, match=named):
        check_tokenizer(folder, 61)


def test_read_config_returns_the_full_object(folder: Path) -> None:
    config: dict[str, Any] = read_config(folder)
    assert config == CONFIG
