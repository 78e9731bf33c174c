"""The stub engine, and engines that say of themselves what is not so."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.base import EngineInfo
from weft.engines.stub import StubEngine
from weft.errors import ConfigError, ModelMismatch, Unsupported
from weft.lm.lm import LM


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return Tokenizer.from_folder(Path(str(files("weft") / "data" / "tiny")))


def saying(**info: Any) -> StubEngine:
    engine = StubEngine(n_vocab=2048)
    engine.info = replace(engine.info, **info)
    return engine


def test_path_is_saved_and_loaded(text: Tokenizer) -> None:
    with LM(StubEngine(n_vocab=2048), text) as lm, LM(StubEngine(n_vocab=2048), text) as other:
        place = other.kv.load(lm.kv.to_bytes([5, 6, 7]))
        assert (place.ids(), other.kv.size(place)) == ([5, 6, 7], 3)


def test_fragments_check_what_they_get() -> None:
    store = StubEngine().store
    store.write(fragment := store.new(None), 4)
    for cut in (0, 4, -1):
        with pytest.raises(ValueError, match="cannot cut"):
            store.split(fragment, cut)
    for length in (5, -1):
        with pytest.raises(ValueError, match="cannot trim"):
            store.trim(fragment, length)
    assert fragment.length == store.usage().slots == 4
    for name in ("k.0", "v.0"):
        data = store.export(fragment)
        for wrong in ({**data, name: np.zeros((1, 4, 3))}, {n: data[n] for n in data if n != name}):
            with pytest.raises(ModelMismatch):
                store.load(wrong, None)
    assert store.usage().slots == 4


def test_unloadable_kv_is_not_saved(text: Tokenizer, tmp_path: Path) -> None:
    """Otherwise the file would be written, and its reader would report it as broken."""
    file = tmp_path / "path.kv"
    for info in ({"n_layers": 2}, {"kv_bytes_per_token": 8}):
        with LM(saying(**info), text) as lm, pytest.raises(Unsupported, match="form of its own"):
            lm.kv.save([5, 6, 7], file)
    assert not file.exists()


def test_unknown_kind_of_kv_raises() -> None:
    with pytest.raises(ConfigError, match="'adressable'; allowed are 'addressable', 'sequence'"):
        saying(kv="adressable")
    kinds = {"addressable", "sequence", "hidden"}
    assert {saying(kv=kind).info.kv for kind in kinds} == kinds
    assert isinstance(saying().info, EngineInfo)


def test_engine_with_contradicting_info_raises(text: Tokenizer) -> None:
    without: Any = StubEngine(n_vocab=2048)
    without.fragments = None
    for engine, why in (
        (without, 'kv="addressable", but its fragments are None'),
        (saying(kv="hidden"), 'kv="hidden", but its fragments are set'),
        (saying(kv_bytes_per_token=0), "kv_bytes_per_token=0"),
    ):
        with pytest.raises(ConfigError, match=why):
            LM(engine, text)
