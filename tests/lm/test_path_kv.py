"""`lm.kv`: KV by hand, never more than a cache of the path's tokens."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from fakes import HiddenFake, SequenceFake
from shallow import shallow
from weft._core.sampling.params import SamplingParams
from weft._core.sampling.sampler import Sampler
from weft._core.sched.work import Extend, Logits, Run
from weft._core.tokens.tokenizer import Tokenizer
from weft.branch import Branch
from weft.engines.base import Engine, Output
from weft.engines.numpy import NumpyEngine
from weft.errors import ConfigError, FormatError, KVFull, ModelMismatch, StoreError, Unsupported
from weft.lm.lm import LM
from weft.loom import Loom

IDS = list(range(300, 330))


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return Tokenizer.from_folder(shallow())


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = NumpyEngine.load(shallow())
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=["numpy", "torch"])
def real(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Engine]:
    if request.param == "numpy":
        yield engine
        return
    pytest.importorskip("torch", reason="torch is not installed")
    from weft.engines.torch import TorchEngine

    loaded = TorchEngine.load(shallow(), dtype="bfloat16")
    yield loaded
    loaded.close()


@pytest.fixture
def lm(engine: Engine, text: Tokenizer) -> Iterator[LM]:
    yield from opened(LM(engine, text))


@pytest.fixture
def real_lm(real: Engine, text: Tokenizer) -> Iterator[LM]:
    yield from opened(LM(real, text))


def opened(lm: LM) -> Iterator[LM]:
    yield lm
    lm.tree.check()
    lm.clear_cache()
    lm.driver.close()
    assert lm.tree.budget.unevictable == 0


def logits(lm: LM, ids: list[int]) -> np.ndarray:
    lm.drive(tickets := lm.submit([Extend(lm.place(ids), wants=(Logits(len(ids)),))]))
    row: np.ndarray = tickets[0].result()[0]
    return row


def test_size_is_the_resident_part_of_the_path(lm: LM) -> None:
    assert lm.kv.size(IDS) == 0
    logits(lm, IDS[:20])
    assert lm.kv.size(IDS) == lm.kv.size(IDS[:20]) == 20
    assert lm.kv.size(IDS[:7]) == 7
    assert lm.kv.size([]) == 0
    assert lm.kv.size([*IDS[:5], 9, 9]) == 5


def test_every_kind_of_path_is_accepted(lm: LM) -> None:
    loom = Loom(lm, IDS)
    child = loom.add([400, 401])
    lm.kv.export(child)
    assert lm.kv.size(child) == lm.kv.size(child.place) == lm.kv.size(child.get_prefix_tokens())
    assert lm.kv.size(child) == child.place.depth
    with Branch.create(lm) as branch:
        branch.prefill(IDS[:9])
        assert lm.kv.size(branch) == 9


def test_size_is_reported_while_a_step_runs(
    engine: Engine, text: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = LM(engine, text)
    logits(lm, IDS[:20])
    inside, proceed, forward = threading.Event(), threading.Event(), engine.forward

    def blocked(rows: Any) -> Output:
        inside.set()
        proceed.wait()
        return forward(rows)

    monkeypatch.setattr(engine, "forward", blocked)
    computing = threading.Thread(target=logits, args=(lm, IDS))
    computing.start()
    assert inside.wait()
    message: list[int] = []
    asking = threading.Thread(target=lambda: message.append(lm.kv.size(IDS)))
    asking.start()
    asking.join()
    proceed.set()
    computing.join()
    asking.join()
    assert message == [20], "what the step computes is not there yet"
    assert lm.kv.size(IDS) == 30
    lm.driver.close()


@pytest.mark.parametrize("wrong", ["text", b"bytes", 7, None])
def test_invalid_path_raises(lm: LM, wrong: object) -> None:
    with pytest.raises(ConfigError, match="is no path; allowed are token ids"):
        lm.kv.size(wrong)  # type: ignore[arg-type]


def test_path_of_another_lm_raises(lm: LM, engine: Engine, text: Tokenizer) -> None:
    other = LM(engine, text)
    with pytest.raises(ConfigError, match="belongs to another LM"):
        lm.kv.size(other.place(IDS))


def test_copy_pins_the_path_and_computes_nothing(lm: LM) -> None:
    place = lm.place(IDS)
    lm.kv.export(place)
    before = lm.stats()
    second = lm.kv.copy(place)
    del place
    assert second.ids() == IDS
    assert lm.kv.size(second) == len(IDS)
    assert (lm.stats().prefilled, lm.stats().kv_tokens) == (before.prefilled, before.kv_tokens)


def test_trim_drops_the_rest_and_recompute_agrees(lm: LM) -> None:
    want = logits(lm, IDS)
    place = lm.place(IDS)
    short = lm.kv.trim(place, 12)
    assert short.ids() == IDS[:12]
    assert lm.kv.size(place) == 12
    lm.scheduler.logits_cache.clear()
    np.testing.assert_allclose(logits(lm, IDS), want, atol=1e-4)
    for length in (-1, 31, True, 1.5):
        with pytest.raises(ConfigError, match="length is"):
            lm.kv.trim(place, length)  # type: ignore[arg-type]


def test_trim_keeps_kv_that_others_continue(lm: LM) -> None:
    logits(lm, IDS)
    logits(lm, [*IDS[:20], 500, 501])
    lm.kv.trim(IDS, 10)
    assert lm.kv.size(IDS) == 20
    assert lm.kv.size([*IDS[:20], 500, 501]) == 22


def test_save_clear_load_changes_nothing(real_lm: LM, tmp_path: Path) -> None:
    lm = real_lm
    lm.clear_cache()
    logits(lm, IDS)  # so that both times one token runs after kept KV: rounding is the same
    want = logits(lm, [*IDS, 44])
    lm.kv.save(IDS, tmp_path / "path.safetensors")
    data = lm.kv.to_bytes(IDS)
    assert len((tmp_path / "path.safetensors").read_bytes()) == len(data)
    assert [file.name for file in tmp_path.iterdir()] == ["path.safetensors"]
    for source in (data, tmp_path / "path.safetensors"):
        lm.clear_cache()
        place = lm.kv.load(source)
        assert place.ids() == IDS
        assert lm.kv.size(place) == len(IDS)
        before = lm.stats().prefilled
        np.testing.assert_allclose(logits(lm, [*IDS, 44]), want, atol=1e-3)
        assert lm.stats().prefilled == before + 1
    lm.clear_cache()


def changed(data: bytes, **metadata: str) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] |= metadata
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data[8 + length :]


def test_damaged_and_foreign_files_raise(lm: LM, tmp_path: Path) -> None:
    from safetensors.numpy import save

    data = lm.kv.to_bytes(IDS)
    lm.clear_cache()
    flipped = bytearray(data)
    flipped[-5] ^= 64
    foreign = save({"k.0": np.zeros((1, 3, 4), np.float32)})
    broken = [b"", b"weft", data[:40], data[:-1], data[: len(data) // 2], data + b"x", foreign]
    broken += [bytes(flipped), changed(data, version="2"), changed(data, version="x")]
    broken += [changed(data, format="other"), changed(data, token_ids="[1, 2]")]
    broken += [changed(data, token_ids='["a"]'), changed(data, crc32="no")]
    for bad in broken:
        with pytest.raises(FormatError):
            lm.kv.load(bad)
    with pytest.raises(ModelMismatch, match="other weights"):
        lm.kv.load(changed(data, fingerprint="another"))
    assert lm.stats().kv_tokens == 0
    with pytest.raises(StoreError, match="cannot read"):
        lm.kv.load(tmp_path / "nothing")
    with pytest.raises(StoreError, match="cannot write"):
        lm.kv.save(IDS, tmp_path / "no" / "folder")


def test_save_of_the_empty_path_raises(lm: LM) -> None:
    with pytest.raises(ConfigError, match="path is empty"):
        lm.kv.to_bytes([])


def test_insert_queues_while_running_work_has_the_room(engine: Engine, text: Tokenizer) -> None:
    slot = engine.info.kv_bytes_per_token
    wide = LM(engine, text)
    data = wide.kv.to_bytes(IDS)
    wide.clear_cache()
    lm = LM(engine, text, kv_bytes=72 * slot)
    sampler = Sampler(SamplingParams(temperature=0), 1)
    [run] = lm.submit([Run(lm.place(list(range(400, 430))), sampler, max_tokens=20)])
    lm.scheduler.step()
    place = lm.kv.load(data)
    assert place.ids() == IDS
    lm.drive([run])
    assert len(run.result().tokens) == 20
    assert lm.kv.export(place)["k.0"].shape[1] == len(IDS)
    small = LM(engine, text, kv_bytes=16 * slot)
    with pytest.raises(KVFull, match="do not fit"):
        small.kv.load(data)
    lm.clear_cache()


def test_kv_calls_of_a_hidden_engine_raise(engine: Engine, text: Tokenizer, lm: LM) -> None:
    hidden = LM(HiddenFake(engine), text)
    data = lm.kv.to_bytes(IDS)
    arrays = lm.kv.export(IDS)
    kv = hidden.kv
    calls = [lambda: kv.size(IDS), lambda: kv.copy(IDS), lambda: kv.trim(IDS, 1)]
    calls += [lambda: kv.to_bytes(IDS), lambda: kv.load(data), lambda: kv.insert(IDS, arrays)]
    for call in calls:
        with pytest.raises(Unsupported, match="keeps its KV to itself"):
            call()


def test_sequence_engine_with_all_tags_in_use_still_loads(
    engine: Engine, text: Tokenizer, lm: LM
) -> None:
    data = lm.kv.to_bytes(IDS)
    lm.clear_cache()
    few = LM(SequenceFake(engine, 2), text)
    used = [logits(few, [400 + i, 3, 4]) for i in range(2)]
    assert few.kv.size(few.kv.load(data)) == len(IDS)
    assert len(used) == 2
    few.clear_cache()


def test_kv_of_another_dtype_raises_with_both_dtypes() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    dtypes = ("float32", "bfloat16", "float16")
    by_dtype = {dtype: weft.load(shallow(), engine="torch", dtype=dtype) for dtype in dtypes}
    try:
        assert len({lm.fingerprint() for lm in by_dtype.values()}) == 1  # the weights are the same
        saved = {name: lm.kv.to_bytes(IDS) for name, lm in by_dtype.items()}
        for here, lm in by_dtype.items():
            lm.clear_cache()
            for dtype in saved.keys() - {here}:
                with pytest.raises(ModelMismatch, match=f"KV is {dtype}, and .* is {here} here"):
                    lm.kv.load(saved[dtype])
            assert lm.kv.size(lm.kv.load(saved[here])) == len(IDS)
    finally:
        for lm in by_dtype.values():
            lm.close()


def test_kv_of_one_engine_is_that_of_another_in_the_same_dtype(lm: LM, text: Tokenizer) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    with weft.load(shallow(), engine="torch", dtype="float32") as other:
        assert other.fingerprint() == lm.fingerprint()
        there = other.kv.load(lm.kv.to_bytes(IDS))
        assert other.kv.size(there) == len(IDS)
        lm.clear_cache()
        assert lm.kv.size(lm.kv.load(other.kv.to_bytes(IDS))) == len(IDS)
