"""Every model family through all layers, against plain forwards of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.helpers import TOLERANCE, ask, logits_at, run_all, run_item
from weft._core.sched.work import Extend, Logits, Scores
from weft._core.tokens.tokenizer import Tokenizer
from weft.lm.lm import LM

torch = pytest.importorskip("torch", reason="torch is not installed")
from families import FAMILIES, N_CTX, build, cases, plain_logits  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402

pytestmark = pytest.mark.torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPT = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47]

Plain = Callable[[Sequence[int]], NDArray[np.float32]]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=cases(FAMILIES))
def family(
    request: pytest.FixtureRequest, device: str, text: Tokenizer
) -> Iterator[tuple[LM, Plain]]:
    name = request.param
    model = build(name).to(device)
    engine = TorchEngine.adopt(model, n_ctx=N_CTX.get(name))
    lm = LM(engine, text)
    yield lm, lambda ids: plain_logits(model, ids).numpy()
    lm.tree.check()
    lm.close()
    assert engine.fragments.usage() == (0, 0)


def assert_close(
    got: NDArray[np.float32], want: NDArray[np.float32], dtype: str = "float32"
) -> None:
    np.testing.assert_allclose(got, want, atol=TOLERANCE[dtype], rtol=0)


def test_tree_of_paths_agrees_with_plain_forwards(family: tuple[LM, Plain]) -> None:
    """Laws 1 to 4, 6 and 8: shared prefixes, companions of other lengths, splits, clips."""
    lm, plain = family
    paths = [
        PROMPT,
        [*PROMPT, 50, 51, 52, 53, 54, 55, 56, 57],
        [*PROMPT, 50, 60],
        [*PROMPT[:5], 61, 62],
        [80, *PROMPT[1:]],
        PROMPT[:1],
    ]
    tickets = lm.submit([Extend(lm.place(p), (), (Logits(len(p)),)) for p in paths])
    lm.drive(tickets)
    for path, ticket in zip(paths, tickets, strict=True):
        assert_close(ticket.result()[0], plain(path)[-1])
    lm.scheduler.logits_cache.clear()
    place = lm.place(paths[1])
    for depth in (15, 13, 6, 1):
        clipped = [*paths[1][:depth], 70, 71]
        assert_close(
            ask(lm, place.at(depth), Logits(depth + 2), tokens=[70, 71])[0], plain(clipped)[-1]
        )
        assert_close(logits_at(lm, paths[1][:depth]), plain(paths[1])[depth - 1])


def test_export_import_drop_and_recompute_agree(family: tuple[LM, Plain]) -> None:
    """Law 5."""
    lm, plain = family
    logits_at(lm, [*PROMPT[:4], 99])
    arrays = lm.kv.export(lm.place(PROMPT))
    lm.clear_cache()
    repeated = lm.kv.insert(PROMPT, arrays)
    assert_close(ask(lm, repeated, Logits(14), tokens=[50, 51])[0], plain([*PROMPT, 50, 51])[-1])
    lm.clear_cache()
    assert_close(logits_at(lm, PROMPT), plain(PROMPT)[-1])


def test_greedy_runs_and_scores_follow_the_plain_model(family: tuple[LM, Plain]) -> None:
    """Decoding one token at a time in tails, and scoring the full path afterwards."""
    lm, plain = family
    starts = [PROMPT, [*PROMPT[:6], 90], [33]]
    options = {"temperature": 0, "max_tokens": 12, "stop_ids": frozenset()}
    results = run_all(lm, [run_item(lm, lm.place(start), 1, **options) for start in starts])
    for start, result in zip(starts, results, strict=True):
        rows = plain([*start, *result.tokens]).astype(np.float64)
        logprobs = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
        own = logprobs[range(len(start) - 1, len(start) + 11), result.tokens]
        best = logprobs[len(start) - 1 : -1].max(-1)
        np.testing.assert_allclose(own, best, atol=1e-4)
        np.testing.assert_allclose(result.logprobs, own, atol=1e-4)
        first, last = 1, len(start) + 12
        score = ask(lm, result.end, Scores(first, last))[0]
        tokens = [*start, *result.tokens][1:]
        want = logprobs[range(last - 1), tokens]
        np.testing.assert_allclose(score.logprobs, want, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_half_precision_agrees_within_its_tolerance(
    name: str, dtype: str, device: str, text: Tokenizer
) -> None:
    model = build(name, dtype=getattr(torch, dtype)).to(device)
    with LM(TorchEngine.adopt(model), text) as lm:
        for path in (PROMPT, [*PROMPT[:5], 61, 62]):
            assert_close(logits_at(lm, path), plain_logits(model, path).numpy()[-1], dtype)
