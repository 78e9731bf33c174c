"""KV sidecars: loaded KV is correct, and KV that cannot be loaded is computed again."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft
from fakes import HiddenFake
from shallow import shallow
from weft import LM, Loom
from weft.errors import ConfigError, StoreError, Unsupported
from weft.service.interchange import read, write
from weft.service.store import sidecar

FILE = "a.loom.json"


@pytest.fixture
def lm() -> Iterator[LM]:
    with fresh() as lm:
        yield lm
        lm.tree.check()


def fresh(**options) -> LM:
    return weft.load(shallow(), engine="numpy", **options)


def grown(lm: LM) -> Loom:
    """A prompt with 3 branches, each with 2."""
    loom = Loom(lm, "Once upon a time", template=False)
    for child in loom.grow(n=3, max_tokens=6, seed=1):
        child.grow(n=2, max_tokens=4, seed=2)
    return loom


def continuations(loom: Loom) -> list[list[int]]:
    return [node.tokens for node in loom.grow(at=loom.leaves, max_tokens=4, temperature=0)]


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], int]:
    folder = tmp_path_factory.mktemp("saved")
    with fresh() as lm:
        loom = grown(lm)
        loom.save(folder / FILE, kv=True)
        n_tokens = sum(len(node.tokens) for node in loom.walk())
        return folder, continuations(loom), n_tokens


@pytest.fixture
def saved(
    saved_once: tuple[Path, list[list[int]], int], tmp_path: Path
) -> tuple[Path, list[list[int]], int]:
    """Return the file of a loom with KV, its continuation, and its number of tokens."""
    folder, expected, n_tokens = saved_once
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path / FILE, expected, n_tokens


def test_open_with_kv_prefills_nothing(saved, lm: LM) -> None:
    file, expected, n_tokens = saved
    loom = Loom.open(file, lm)
    assert not loom.dropped
    assert lm.stats().kv_tokens == n_tokens
    assert continuations(loom) == expected
    stats = lm.stats()
    assert stats.prefilled == 0
    assert stats.recomputed == 6  # each leaf's last token, whose logits no file has


@pytest.mark.torch
def test_bfloat16_kv_round_trips_exactly(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    options = {"engine": "torch", "dtype": "bfloat16"}
    with weft.load(shallow(), **options) as lm:
        loom = grown(lm)
        loom.save(tmp_path / FILE, kv=True)
        expected = continuations(loom)
    with weft.load(shallow(), **options) as lm:
        reopened = Loom.open(tmp_path / FILE, lm)
        assert not reopened.dropped
        assert continuations(reopened) == expected
        assert lm.stats().prefilled == 0
    with weft.load(shallow(), engine="torch", dtype="float32") as lm:
        (notice,) = Loom.open(tmp_path / FILE, lm).dropped
        assert "bfloat16" in notice


def test_open_without_kv_computes_the_same(saved, lm: LM) -> None:
    file, expected, n_tokens = saved
    loom = Loom.open(file, lm, kv=False)
    assert lm.stats().kv_tokens == 0
    assert continuations(loom) == expected
    assert lm.stats().prefilled == n_tokens


def test_edited_nodes_are_recomputed_and_others_loaded(saved, lm: LM) -> None:
    file, _, n_tokens = saved
    with fresh() as other:
        loom = Loom.open(file, other)
        first, second, third = loom.children
        first.clip(2)
        second.split(3)
        third.add(" more")
        loom.save(file)  # the KV file is still of the old tree
        expected = continuations(loom)
        loom.save(file)
    reopened = Loom.open(file, lm)
    there = lm.stats().kv_tokens
    assert there == n_tokens - 6 - 8  # without the clipped branch and its descendants
    assert "computed again" in reopened.dropped[0]
    lm.tree.check()
    leaves = [
        node for node in reopened.walk() if node.finish_reason == "length" and not node.children
    ]
    assert [node.tokens for node in leaves] == expected
    plain = [node.next(3) for node in reopened.leaves]
    lm.clear_cache()
    assert [[t.id for t in node.next(3)] for node in reopened.leaves] == [
        [t.id for t in each] for each in plain
    ]


def broken(data: bytes, how: str) -> bytes:
    at = len(data) // 2
    if how == "torn":
        return data[:at]
    if how == "changed":
        return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    if how == "empty":
        return b""
    head = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + head])
    changes = {
        "of another model": {"fingerprint": "f"},
        "of another adapter": {"namespace": '"x"'},
        "newer": {"version": "99"},
        "of a path": {"format": "weft.kv"},
        "without blocks": {"blocks": "5"},
        "with wrong blocks": {"blocks": '[["k", 99999]]'},
        "in another dtype": {"marks": '{"dtype": "bfloat16"}'},
    }
    table["__metadata__"] |= changes[how]
    written = json.dumps(table).encode()
    return len(written).to_bytes(8, "little") + written + data[8 + head :]


@pytest.mark.parametrize(
    "how",
    [
        "torn", "changed", "empty", "of another model", "of another adapter", "newer", "of a path",
        "without blocks", "with wrong blocks", "in another dtype",
    ],
)  # fmt: skip
def test_wrong_kv_file_gives_notice(
    saved, lm: LM, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, expected, _ = saved
    kv_file = sidecar.path_for(file)
    kv_file.write_bytes(broken(kv_file.read_bytes(), how))
    with caplog.at_level(logging.WARNING, "weft"):
        loom = Loom.open(file, lm)
    (notice,) = loom.dropped
    assert "computed again" in notice
    assert str(kv_file) in notice
    assert notice in caplog.text
    assert lm.stats().kv_tokens == 0
    assert continuations(loom) == expected


def test_kv_file_with_changed_byte_is_ignored(saved, lm: LM) -> None:
    file, _, n_tokens = saved
    kv_file = sidecar.path_for(file)
    data, random_ = kv_file.read_bytes(), random.Random(1)
    loom = Loom.open(file, lm, kv=False)
    for _ in range(60):
        corrupt = bytearray(data)
        corrupt[random_.randrange(min(len(corrupt), 3000))] ^= 1 << random_.randrange(8)
        kv_file.write_bytes(bytes(corrupt))
        loaded = sidecar.load(loom, kv_file)
        assert loaded.n_tokens in range(n_tokens + 1)
    lm.clear_cache()


def test_blocks_longer_than_their_path_are_recomputed(saved, lm: LM) -> None:
    file, expected, _ = saved
    kv_file = sidecar.path_for(file)
    data = kv_file.read_bytes()
    head = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + head])
    blocks = json.loads(table["__metadata__"]["blocks"])
    n_all = sum(length for _, length in blocks)
    blocks = [[blocks[0][0], n_all - 1], [blocks[1][0], 1]]
    table["__metadata__"]["blocks"] = json.dumps(blocks)
    written = json.dumps(table).encode()
    kv_file.write_bytes(len(written).to_bytes(8, "little") + written + data[8 + head :])
    loaded = sidecar.load(Loom.open(file, lm, kv=False), kv_file)
    assert loaded.n_tokens <= 1
    assert "computed again" in loaded.notice
    lm.clear_cache()
    assert continuations(Loom.open(file, lm, kv=False)) == expected


def fitting(loom: Loom, n_ctx: int) -> int:
    """Return the tokens of nodes whose full paths fit into a context."""
    paths = [(node, sum(len(each.tokens) for each in node.path)) for node in loom.walk()]
    return sum(len(node.tokens) for node, depth in paths if depth <= n_ctx)


def test_small_kv_budget_loads_what_fits(saved) -> None:
    file, expected, n_tokens = saved
    per_token = 2048
    with fresh() as lm:
        per_token = lm.info.kv_bytes_per_token
    with fresh(kv_budget=per_token * (n_tokens - 8)) as lm:
        loom = Loom.open(file, lm)
        assert lm.stats().kv_tokens <= n_tokens - 8
        assert lm.stats().evicted == 0
        assert "no room" in loom.dropped[0]
        assert continuations(loom) == expected


def test_open_with_short_context_or_hidden_kv(saved, lm: LM) -> None:
    file, _, _ = saved
    with fresh(n_ctx=11) as short:
        loom = Loom.open(file, short)
        # The prompt and the branches' beginnings: what follows one that is too long, too.
        assert short.stats().kv_tokens == fitting(loom, 11) > fitting(loom, 8)
        assert "computed again" in loom.dropped[0]
    hidden = LM(HiddenFake(lm.engine), lm.text)
    loom = Loom.open(file, hidden)
    assert "keeps its KV to itself" in loom.dropped[0]
    assert loom.children[0].next(1)


def test_save_kv_of_path_and_subtree(lm: LM, tmp_path: Path) -> None:
    loom = grown(lm)
    node = loom.children[1]
    n_path = len(loom.tokens) + len(node.tokens)
    for scope, n_below in (("path", 0), ("subtree", sum(len(c.tokens) for c in node.children))):
        write(node, tmp_path / f"{scope}.json", scope=scope, kv=True)
        with fresh() as other:
            imported = read(tmp_path / f"{scope}.json", other)
            assert not imported.dropped
            assert other.stats().kv_tokens == n_path + n_below
            assert other.stats().prefilled == 0


def test_path_for_returns_sidecar_name(tmp_path: Path) -> None:
    for loom, kv in (
        ("a.loom.json", "a.kv.safetensors"),
        ("a.json", "a.kv.safetensors"),
        ("a.b.loom.json", "a.b.kv.safetensors"),
        ("a", "a.kv.safetensors"),
    ):
        assert sidecar.path_for(tmp_path / loom) == tmp_path / kv


def test_unsupported_kv_save_keeps_the_loom_file(lm: LM, tmp_path: Path) -> None:
    loom = Loom(lm, [300, 301])
    sidecar.path_for(tmp_path / FILE).mkdir()
    with pytest.raises(StoreError, match="cannot write"):
        loom.save(tmp_path / FILE, kv=True)
    assert Loom.open(tmp_path / FILE).tokens == [300, 301]
    with pytest.raises(ConfigError, match="kv needs the json format"):
        write(loom, tmp_path / "a.md", kv=True)
    hidden = LM(HiddenFake(lm.engine), lm.text)
    with pytest.raises(Unsupported):
        Loom(hidden, [30, 31]).save(tmp_path / "b.loom.json", kv=True)
    assert Loom.open(tmp_path / "b.loom.json").tokens == [30, 31]
