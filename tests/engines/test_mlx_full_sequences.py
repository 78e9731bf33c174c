"""Models of mlx-lm without KV of single tokens run full paths, and equal their own forward."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import weft
from mlx_families import build, plain_logits
from shallow import shallow
from weft._core.sampling.metrics import log_softmax
from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.base import Fragment, Row
from weft.engines.mlx import MlxEngine
from weft.errors import ForwardError, Unsupported

pytestmark = pytest.mark.mlx

N_VOCAB = 2048  # of the small model's tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    return build("mamba", n_vocab=N_VOCAB)


def test_disabled_prefix_caching_is_logged_once(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = MlxEngine.adopt(model)
    assert [
        r.getMessage()
        for r in caplog.records
        if "prefix caching disabled for mamba" in r.msg % r.args
    ]
    assert len(caplog.records) == 1
    assert (engine.info.kv, engine.info.no_prefix_cache) == ("hidden", True)
    assert engine.fragments is None
    assert "ArraysCache" in engine.info.extra["no_prefix_caching"]
    assert not engine.info.capabilities.save_kv


def test_rows_of_any_length_are_their_own_plain_forward(model: Any) -> None:
    engine = MlxEngine.adopt(model)
    ids = [(i * 37) % 900 + 20 for i in range(40)]
    paths = [ids[:n] for n in (1, 17, 40, 5)] + [ids[5:11], ids[:17]]
    rows = [Row((), path, 0, None, tuple(range(len(path)))) for path in paths]
    output = engine.forward(rows)
    at = 0
    for path in paths:
        want = plain_logits(model, path)
        for row in want:
            assert np.abs(output.logits(at) - row).max() < 1e-4
            at += 1
    with pytest.raises(ForwardError, match="paths|no KV"):
        engine.forward([Row((), ids[:3], 0, Fragment())])


def test_loom_branch_and_asynclm_work_on_it(model: Any) -> None:
    with weft.LM(MlxEngine.adopt(model), Tokenizer.from_folder(shallow())) as lm:
        loom = weft.Loom(lm, [20, 21, 22], template=False)
        (node,) = loom.grow(temperature=0, max_tokens=5, stop=[])
        known = [20, 21, 22]
        for token in node.tokens:
            assert token == int(plain_logits(model, known)[-1].argmax())
            known.append(token)
        assert len(loom.grow(n=3, max_tokens=4, temperature=1.0, seed=1)) == 3
        branch = weft.Branch.create(lm, seed=1)
        branch.prefill([20, 21, 22])
        branch.fork().commit(branch.produce().token)
        row = asyncio.run(weft.AsyncLM(lm).next_token_logprobs([20, 21, 22]))
        want = log_softmax(plain_logits(model, [20, 21, 22])[-1:])[0]
        assert np.abs(np.asarray(row) - want).max() < 1e-4
        with pytest.raises(Unsupported):
            lm.kv.export([20, 21])
