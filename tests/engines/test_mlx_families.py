"""The engine's laws for families of mlx-lm's models, against the model's own plain forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from mlx_families import CONFIGS, FAMILIES, N_VOCAB, build, plain_logits  # noqa: E402
from weft._core.sampling import metrics  # noqa: E402
from weft.engines import shared_prefixes as prefixes  # noqa: E402
from weft.engines.base import Row, ScoreSpan, Span  # noqa: E402
from weft.engines.mlx import MlxEngine  # noqa: E402
from weft.engines.mlx.kv import KVShape, MlxFragment, MlxMemory, SlotShape  # noqa: E402
from weft.engines.mlx.shared_prefixes import plan_step  # noqa: E402

pytestmark = pytest.mark.mlx

# Largest absolute difference of logits (they query_span about 4) from the same model's own forward.
TOLERANCE = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.25}
IDS = [(i * i * 5 + 11 * i + 3) % (N_VOCAB - 3) + 3 for i in range(120)]

Path = tuple[Span, ...]


class Bench:
    """One engine and its oracle; a path is its spans and the tokens on it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.engine = MlxEngine.adopt(model)
        self.store = self.engine.fragments
        self.tolerance = TOLERANCE[self.engine.info.dtype]

    def node(self, above: Path, ids: Sequence[int], chunk: int = 1000) -> Path:
        """Run ids after a path, `chunk` at a time; return the longer path."""
        fragment = self.store.new(above[-1].fragment if above else None)
        start = sum(span.length for span in above)
        for at in range(0, len(ids), chunk):
            self.engine.forward([Row(above, ids[at : at + chunk], start + at, fragment)])
        return (*above, Span(fragment, len(ids)))

    def check(self, path: Path, ids: Sequence[int], token: int = 5) -> None:
        """A token after the path has the logits of one plain forward."""
        output = self.engine.forward([Row(path, [token], len(ids), None, (0,))])
        self.near(output.logits(0), plain_logits(self.model, [*ids, token])[-1])

    def near(self, got: NDArray[np.float32], want: NDArray[np.float32]) -> None:
        worst = float(np.abs(got - want).max())
        assert worst <= self.tolerance, worst


# One of each way to attend; the others are slow ones.
CORE = ("llama_windows", "gemma2", "gpt2", "gpt_oss", "deepseek_v3")
CASES = [name if name in CORE else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@pytest.fixture(scope="module", params=CASES)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(build(request.param))


def test_family_attends_as_is_known(request: pytest.FixtureRequest, bench: Bench) -> None:
    name = request.node.callspec.params["bench"]
    assert bench.engine.info.extra["attention"] == CONFIGS[name][2]


def test_full_and_chunked_prefill_agree(bench: Bench) -> None:
    """Beyond LONG_ROW tokens a row is computed by MLX's own attention."""
    fragment = bench.store.new(None)
    output = bench.engine.forward([Row((), IDS[:90], 0, fragment, tuple(range(90)))])
    want = plain_logits(bench.model, IDS[:90])
    for at in range(90):
        bench.near(output.logits(at), want[at])
    for chunk in (70, 9):
        bench.check(bench.node((), IDS[:110], chunk), IDS[:110])


def test_tree_of_many_short_nodes_decodes_as_its_paths(bench: Bench) -> None:
    """Bundles, banks of uneven tails, companions of any kind."""
    trunk = bench.node((), IDS[:11])
    paths = [(trunk, IDS[:11]), ((), [])]
    for i in range(5):
        ids = [*IDS[:11], *IDS[i : 3 * i + 4]]
        paths.append((bench.node(trunk, ids[11:]), ids))
    tails = [bench.store.new(None) for _ in paths]
    for step in range(9):
        rows = [
            Row(path, [IDS[i + step]], len(ids) + tails[i].length, tails[i], (0,))
            for i, (path, ids) in enumerate(paths)
            if i <= 2 * step  # they join one after the other
        ]
        extra = [Row(trunk, IDS[30 : 30 + n], 11, None, (n - 1,)) for n in (1, 3, 2)]
        output = bench.engine.forward([*rows, *extra] if step % 3 else rows)
        for number, row in enumerate(rows):
            i = next(i for i, tail in enumerate(tails) if tail is row.kv_out)
            begun = (i + 1) // 2
            known = [*paths[i][1], *(IDS[i + s] for s in range(begun, step + 1))]
            bench.near(output.logits(number), plain_logits(bench.model, known)[-1])
        for number, row in enumerate(extra if step % 3 else []):
            known = [*IDS[:11], *row.tokens]
            bench.near(output.logits(len(rows) + number), plain_logits(bench.model, known)[-1])


@pytest.mark.parametrize("joined", [0, 4, 1024])
def test_path_of_many_short_nodes_decodes_as_its_tokens(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, joined: int
) -> None:
    """Nodes one below the other, with rows below them all, some and one; one is longer."""
    monkeypatch.setattr(prefixes, "MAX_SHORT", 4)
    monkeypatch.setattr(prefixes, "MAX_MERGED", joined)
    paths: list[tuple[Path, list[int]]] = [((), [])]
    at = 0
    for size in (2, 1, 3, 7, 1, 4, 2):
        paths.append((bench.node(paths[-1][0], IDS[at : at + size]), IDS[: at + size]))
        at += size
    for number in range(3):
        path, ids = paths[7]
        for size in (1, 2, 2):
            more = IDS[at + number : at + number + size]
            path, ids = bench.node(path, more), [*ids, *more]
            at += size
        paths.append((path, ids))
    below = [paths[i] for i in (3, 7, 7, 8, 9, 10, 0)]
    tails = [bench.store.new(None) for _ in below]
    for step in range(3):
        rows = [
            Row(path, [IDS[number + step]], len(ids) + step, tail, (0,))
            for number, ((path, ids), tail) in enumerate(zip(below, tails, strict=True))
        ]
        output = bench.engine.forward(rows)
        for number, (_, ids) in enumerate(below):
            known = [*ids, *IDS[number : number + step + 1]]
            bench.near(output.logits(number), plain_logits(bench.model, known)[-1])


def test_short_nodes_one_below_the_other_are_one_level() -> None:
    shape = KVShape(2, 8, mx.float32)
    memory = MlxMemory(SlotShape([shape, shape]))
    data = {"k.0": np.ones((2, 4, 8), np.float32), "v.0": np.ones((2, 4, 8), np.float32)}
    data["dtype"] = np.array("float32")
    path = tuple(Span(memory.load(data), 4) for _ in range(5))
    rows = [Row(path, [5], 20, MlxFragment(), (0,)) for _ in range(3)]
    (level,) = plan_step(rows, memory).levels
    (piece,) = level.groups
    assert (piece.first, piece.length) == (0, 20)
    assert memory.is_contiguous([span.fragment for span in path])


def test_prefixes_that_share_some_spans_give_correct_logits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one token leave the path after its first node, rows of several after the second."""
    monkeypatch.setattr(prefixes, "MAX_SHORT", 0)  # no bundles
    monkeypatch.setattr(prefixes, "MAX_COPIED", 0)
    path: Path = ()
    for at in range(0, 12, 4):
        path = bench.node(path, IDS[at : at + 4])
    other, new = bench.node((), IDS[20:30]), bench.store.new
    rows = [
        Row(path[:1], [5], 4, new(None), (0,)),
        Row(path, [5], 12, new(None), (0,)),
        Row(other, [5], 10, new(None), (0,)),
        Row(path[:2], IDS[8:11], 8, None, (2,)),
    ]
    output = bench.engine.forward(rows)
    for number, ids in enumerate(([*IDS[:4], 5], [*IDS[:12], 5], [*IDS[20:30], 5], IDS[:11])):
        bench.near(output.logits(number), plain_logits(bench.model, ids)[-1])


def test_cut_joined_and_reloaded_fragments_give_the_same(bench: Bench) -> None:
    (span,) = bench.node((), IDS[:23], 7)
    lower = span.fragment
    upper = bench.store.split(lower, 9)
    path = (Span(upper, 9), Span(lower, 14))
    bench.check(path, IDS[:23])
    data = bench.store.export(lower)
    bench.store.free(lower)
    repeated = bench.store.load(data, upper)
    bench.check((Span(upper, 9), Span(repeated, 14)), IDS[:23])
    bench.store.join(upper, repeated)
    bench.check((Span(repeated, 23),), IDS[:23])
    bench.store.trim(repeated, 15)
    bench.check((Span(repeated, 15),), IDS[:15])


def test_scores_are_those_of_the_plain_forward(bench: Bench) -> None:
    span = ScoreSpan(2, tuple(IDS[3:12]), 2)
    (result,) = bench.engine.forward([Row((), IDS[:12], 0, None, (), (span,))]).scores()[0]
    want = metrics.log_softmax(plain_logits(bench.model, IDS[:12])[2:11])
    np.testing.assert_allclose(result.logprobs, want[range(9), IDS[3:12]], atol=1e-4)


def test_prefix_cache_continues_at_the_end_of_the_path(bench: Bench) -> None:
    path = bench.node(bench.node((), IDS[:20]), IDS[20:29])
    cache = bench.engine.prefix_cache(path)
    logits = bench.model(mx.array([IDS[29:31]]), cache=cache)
    bench.near(np.array(logits[0, -1].astype(mx.float32)), plain_logits(bench.model, IDS[:31])[-1])


@pytest.mark.parametrize("name", ["llama_windows", "deepseek_v3", "gemma2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stays_near_the_same_models_own_forward(name: str, dtype: str) -> None:
    """Deep in a tree. No experts: MLX's CPU routes in float32 alone."""
    model = build(name, getattr(mx, dtype))
    bench = Bench(model)
    assert bench.engine.info.dtype == dtype
    path = bench.node(bench.node(bench.node((), IDS[:9]), IDS[9:14]), IDS[14:20])
    output = bench.engine.forward([Row(path, IDS[20:29], 20, None, tuple(range(9)))])
    want = plain_logits(model, IDS[:29])[20:]
    for at in range(9):
        bench.near(output.logits(at), want[at])
