"""The table of engines says what is so: each cell is tried on the engine that says it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from contract.conftest import NewEngine
from weft.engines import engine_names, plugins
from weft.engines.base import Capabilities, Row
from weft.engines.capabilities import BASE, OWN, ROWS
from weft.errors import Unsupported


def test_every_engine_of_weft_has_its_row() -> None:
    assert set(OWN) == set(engine_names()) - set(plugins())
    assert set(OWN) >= BASE
    assert all(each.takes and each.packages for each in OWN.values())


def test_every_field_is_a_row_of_the_table() -> None:
    fields = set(Capabilities.__slots__) - {"takes", "packages"}
    assert {field for _, field in ROWS} == fields


def test_capabilities_equal_the_table(new_engine: NewEngine) -> None:
    engine = new_engine()
    text_out = engine.info.capabilities
    assert text_out == replace(OWN.get(engine.info.name, text_out))


def test_capabilities_are_true(new_engine: NewEngine) -> None:
    engine = new_engine()
    text_out = engine.info.capabilities
    assert text_out.native_runs == (engine.native is not None)
    assert text_out.steps or engine.native is not None
    row = Row((), [1, 2, 3], 0, None, (2,))
    if text_out.steps:
        logits = engine.forward([row]).logits(0)
        assert logits.shape == (engine.info.n_vocab,)
        assert np.isfinite(logits).all()
    else:
        with pytest.raises(Unsupported):
            engine.forward([row])
    if text_out.embed:
        (states,) = engine.hidden_states([row])
        assert states.shape == (3, engine.info.n_embd)
    else:
        with pytest.raises(Unsupported):
            engine.hidden_states([row])
    if not text_out.lora:
        with pytest.raises(Unsupported):
            engine.add_adapter("a", "folder")


def test_saved_kv_is_loaded(new_engine: NewEngine) -> None:
    engine = new_engine()
    text_out = engine.info.capabilities
    assert text_out.offload <= text_out.save_kv
    if engine.fragments is None:
        assert not text_out.save_kv
        return
    fragment = engine.fragments.new(None)
    engine.forward([Row((), [1, 2, 3], 0, fragment, (2,))])
    if not text_out.save_kv:
        with pytest.raises(Unsupported):
            engine.fragments.export(fragment)
    else:
        repeated = engine.fragments.load(engine.fragments.export(fragment), None)
        assert repeated.length == 3
        engine.fragments.free(repeated)
    engine.fragments.free(fragment)
