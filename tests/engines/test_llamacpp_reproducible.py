"""`reproducible=True` on llama.cpp: a row has the same bits in any company."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

from recipe.export_gguf import export_gguf
from shallow import TINY, shallow_gguf
from small_gguf import windowed
from weft.engines.base import Row, Span
from weft.engines.llamacpp import LlamaCppEngine, batch_invariance
from weft.errors import ConfigError, Unsupported

pytestmark = pytest.mark.llamacpp


def load(file: Path, **options: object) -> LlamaCppEngine:
    options.setdefault("kv_bytes", 1 << 22)
    return LlamaCppEngine.load(file, n_threads=1, reproducible=True, **options)  # type: ignore[arg-type]


def grow(engine: LlamaCppEngine, ids: list[int], size: int, company: int, seed: int) -> list[bytes]:
    """Return the bits of a path's logits, run `size` tokens at a time in a batch of paths.

    Other paths start and end, so that cells of all ages are freed in between.
    """
    rng = random.Random(seed)
    own = engine.fragments.new(None)
    others: list = []
    bits = []
    at = 0
    while at < len(ids):
        n = min(size, len(ids) - at)
        rows = [Row((), ids[at : at + n], at, own, tuple(range(n)))]
        while len(others) < company:
            others.append(engine.fragments.new(None))
        for other in others:
            if other.length < 60:
                tokens = [rng.randrange(5, 900) for _ in range(rng.choice((1, 1, 9)))]
                rows.append(Row((), tokens, other.length, other, (0,)))
        for _ in range(company // 4):
            rows.append(Row((Span(own, at),) if at else (), [7], at, None, (0,)))
        mixed = rows[1:]
        rng.shuffle(mixed)
        place = rng.randrange(len(mixed) + 1)
        output = engine.forward([*mixed[:place], rows[0], *mixed[place:]])
        before = sum(len(row.logits_at) for row in mixed[:place])
        bits += [output.logits(before + i).tobytes() for i in range(n)]
        for other in [each for each in others if rng.random() < 0.3]:
            others.remove(other)
            engine.fragments.free(other)
        at += n
    for fragment in (own, *others):
        engine.fragments.free(fragment)
    return bits


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    for kind in ("f32", "q8_0"):
        export_gguf(TINY, folder / f"{kind}.gguf", kind)
    windowed(folder / "windowed.gguf", folder / "f32.gguf")
    return folder


@pytest.mark.parametrize("name", ["f32", "q8_0", "windowed"])
def test_path_has_the_same_bits_in_any_batch(files: Path, name: str) -> None:
    engine = load(files / f"{name}.gguf")
    ids = [(7 * i + 3) % 900 + 5 for i in range(70)]
    alone = grow(engine, ids, 1, 0, 0)
    for seed, (size, company) in enumerate([(70, 0), (1, 3), (9, 8), (1, 30), (40, 30)]):
        assert grow(engine, ids, size, company, seed) == alone, (size, company)
    engine.close()


def test_path_has_the_same_bits_below_a_recomputed_prefix(files: Path) -> None:
    """The prefix then lies above the cells of what follows it; they are sorted."""
    engine = load(files / "q8_0.gguf")
    ids = [(7 * i + 3) % 900 + 5 for i in range(50)]
    alone = grow(engine, ids, 1, 0, 0)
    prefix = engine.fragments.new(None)
    engine.forward([Row((), ids[:30], 0, prefix, ())])
    below = engine.fragments.new(prefix)
    engine.forward([Row((Span(prefix, 30),), ids[30:40], 30, below, ())])
    recomputed = engine.fragments.new(None)
    engine.forward([Row((), ids[:30], 0, recomputed, ())])
    engine.fragments.free(prefix)
    engine.fragments.attach(below, recomputed)
    path = (Span(recomputed, 30),)
    bits = []
    for at in range(40, 50):
        output = engine.forward([Row(path, [ids[at]], at, below, (0,))])
        bits.append(output.logits(0).tobytes())
    assert bits == alone[40:]
    engine.close()


def test_false_claim_of_reproducibility_raises_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))
    monkeypatch.setattr(batch_invariance, "_run", lambda *_: np.full((3, 5), next(calls)))
    with pytest.raises(Unsupported, match="does not hold"):
        load(shallow_gguf())


def test_flash_attention_off_raises() -> None:
    with pytest.raises(ConfigError, match="needs flash attention"):
        load(shallow_gguf(), flash_attention=False)


def test_batches_are_as_large_as_the_bits_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(context: object, leases: object, ids: object, n: int, n_others: int) -> np.ndarray:
        return np.full((2, 5), float(n + n_others > 8))

    monkeypatch.setattr(batch_invariance, "_run", run)
    engine = load(shallow_gguf())
    assert engine._pool.shards[0].context.n_batch == 8
    engine.close()
