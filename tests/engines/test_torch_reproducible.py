"""`reproducible=True` on torch: a row has the same bits in any company, or the load raises."""

from __future__ import annotations

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cases import one_in  # noqa: E402
from shallow import shallow  # noqa: E402
from weft.engines.base import Row, Span  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch import batch_invariance as alone_module  # noqa: E402
from weft.errors import ConfigError, Unsupported  # noqa: E402

pytestmark = pytest.mark.torch
IDS = [(7 * i + 3) % 900 + 5 for i in range(40)]


def load(dtype: str) -> TorchEngine:
    try:
        engine = TorchEngine.load(shallow(), dtype=dtype, reproducible=True)
    except Unsupported as error:
        pytest.skip(f"this CPU's products depend on row counts: {error}")
    assert isinstance(engine, TorchEngine)
    return engine


def grow(engine: TorchEngine, size: int, company: int, seed: int) -> list[bytes]:
    """Return the bits of a path's logits, run `size` tokens at a time in a batch of paths."""
    rng = random.Random(seed)
    prompt = engine.fragments.new(None)
    engine.forward([Row((), IDS[:10], 0, prompt, ())])
    own = engine.fragments.new(prompt)
    others = [engine.fragments.new(None) for _ in range(company)]
    bits = []
    for at in range(10, len(IDS), size):
        n = min(size, len(IDS) - at)
        row = Row((Span(prompt, 10),), IDS[at : at + n], at, own, tuple(range(n)))
        rows = []
        for other in others:
            tokens = [rng.randrange(5, 900) for _ in range(rng.choice((1, 1, 9)))]
            if other.length < 150:
                rows.append(Row((), tokens, other.length, other, ()))
        place = rng.randrange(len(rows) + 1)
        output = engine.forward([*rows[:place], row, *rows[place:]])
        bits += [output.logits(i).tobytes() for i in range(n)]
    for fragment in (own, prompt, *others):
        engine.fragments.free(fragment)
    return bits


@pytest.mark.parametrize("dtype", one_in(2, ["float32", "bfloat16"]))
def test_path_has_the_same_bits_in_any_batch(dtype: str) -> None:
    engine = load(dtype)
    alone = grow(engine, 1, 0, 0)
    for seed, (size, company) in enumerate([(30, 0), (1, 3), (9, 8), (20, 12)]):
        assert grow(engine, size, company, seed) == alone, (size, company)
    usual = TorchEngine.load(shallow(), dtype=dtype)
    near, far = (np.frombuffer(grow(e, 30, 0, 0)[-1], np.float32) for e in (engine, usual))
    assert np.abs(near - far).max() < 1.0
    engine.close()
    usual.close()


def test_false_claim_of_reproducibility_raises_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))
    monkeypatch.setattr(alone_module, "_run", lambda *_: np.full((3, 5), float(next(calls))))
    with pytest.raises(Unsupported, match="does not hold"):
        TorchEngine.load(shallow(), dtype="bfloat16", reproducible=True)


def test_paged_kv_raises() -> None:
    with pytest.raises(ConfigError, match="needs padded KV"):
        TorchEngine.load(shallow(), kv="paged", reproducible=True)
