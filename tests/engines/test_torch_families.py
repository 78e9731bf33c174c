"""The engine's laws for every family of models, against the model's own plain forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from families import FAMILIES, N_CTX, N_VOCAB, build, cases, plain_logits  # noqa: E402
from weft._core.sampling import metrics  # noqa: E402
from weft.engines import shared_prefixes as prefixes  # noqa: E402
from weft.engines.base import Fragment, Row, ScoreSpan, Span  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.model import cache_name  # noqa: E402
from weft.errors import Unsupported  # noqa: E402

pytestmark = pytest.mark.torch

# Largest absolute difference of logits (they query_span about 4) from the float32 oracle.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.25}
OTHER_CACHES = {"deepseek_v3": "does not contain the keys", "minimax": "accepts no cache"}
IDS = [(i * i * 5 + 11 * i + 3) % (N_VOCAB - 3) + 3 for i in range(60)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny models only lose time to others
    yield
    torch.set_num_threads(before)


class Bench:
    """One engine and its oracle; `path` of a node is its spans, `ids` its tokens."""

    def __init__(self, model: Any, n_ctx: int | None = None, **options: Any) -> None:
        self.model = model
        self.engine = TorchEngine.adopt(model, n_ctx=n_ctx, **options)
        self.store = self.engine.fragments

    def node(self, above: tuple[Span, ...], ids: list[int], chunk: int = 1000) -> tuple[Span, ...]:
        """Run ids after a path, `chunk` at a time; return the longer path."""
        fragment = self.store.new(above[-1].fragment if above else None)
        start = sum(s.length for s in above)
        for at in range(0, len(ids), chunk):
            some = ids[at : at + chunk]
            self.engine.forward([Row(above, some, start + at, fragment)])
        return (*above, Span(fragment, len(ids)))

    def read(self, path: tuple[Span, ...], token: int) -> Any:
        position = sum(s.length for s in path)
        return _logits(self.engine.forward([Row(path, [token], position, None, (0,))]))

    def oracle(self, ids: list[int]) -> Any:
        return plain_logits(self.model, ids)


def _logits(output: Any, index: int = 0) -> Any:
    return torch.from_numpy(output.logits(index))


def _near(got: Any, want: Any, tolerance: float = 1e-4) -> None:
    assert float((got - want).abs().max()) <= tolerance


@pytest.fixture(scope="module", params=cases(FAMILIES))
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(build(request.param), N_CTX.get(request.param))


def test_full_chunked_and_token_by_token_prefill_agree(bench: Bench) -> None:
    ids = IDS[:23]
    want = bench.oracle([*ids, 5])[-1]
    for chunk in (23, 9, 2, 1):
        _near(bench.read(bench.node((), ids, chunk), 5), want)


def test_every_position_of_a_prefill_equals_the_plain_forward(bench: Bench) -> None:
    fragment = bench.store.new(None)
    output = bench.engine.forward([Row((), IDS[:21], 0, fragment, tuple(range(21)))])
    _near(torch.stack([_logits(output, i) for i in range(21)]), bench.oracle(IDS[:21]))


def test_extending_a_child_leaves_sibling_logits_unchanged(bench: Bench) -> None:
    trunk = bench.node((), IDS[:9])
    left, right = bench.node(trunk, IDS[9:14]), bench.node(trunk, IDS[20:26])
    before = bench.read(right, 7)
    _near(before, bench.oracle([*IDS[:9], *IDS[20:26], 7])[-1])
    longer = bench.node(left, IDS[14:20])
    assert torch.equal(bench.read(right, 7), before)
    _near(bench.read(longer, 7), bench.oracle([*IDS[:20], 7])[-1])


def _mixed_rows(bench: Bench) -> tuple[list[Row], list[list[int]]]:
    """Decodes, prefills and reads of many lengths in a small tree; and the tokens of each path."""
    trunk = bench.node((), IDS[:8])
    child = bench.node(trunk, IDS[8:13])
    rows, paths = [], []
    for path, ids in ((trunk, IDS[:8]), (child, IDS[:13]), ((), [])):
        for n, keeps in ((1, True), (1, True), (2, True), (5, False), (6, True), (1, False)):
            fragment: Fragment | None = bench.store.new(None) if keeps else None
            tokens = IDS[20 + n + len(rows) : 20 + 2 * n + len(rows)]
            rows.append(Row(path, tokens, len(ids), fragment, (n - 1,)))
            paths.append([*ids, *tokens])
    return rows, paths


def test_logits_depend_on_no_companion_and_no_order(bench: Bench) -> None:
    for order in (1, -1):
        rows, paths = _mixed_rows(bench)
        output = bench.engine.forward(rows[::order])
        for index, ids in enumerate(paths[::order]):
            _near(_logits(output, index), bench.oracle(ids)[-1])


def test_mixed_step_continues_as_decodes_of_uneven_length(bench: Bench) -> None:
    rows, paths = _mixed_rows(bench)
    bench.engine.forward(rows)
    kept = [(r, p) for r, p in zip(rows, paths, strict=True) if r.kv_out is not None]
    for step in range(3):
        for row, ids in kept:
            row.tokens, row.position, row.logits_at = [30 + step], len(ids), (0,)
            ids.append(30 + step)
        output = bench.engine.forward([row for row, _ in kept])
    for index, (_, ids) in enumerate(kept):
        _near(_logits(output, index), bench.oracle(ids)[-1])


@pytest.mark.parametrize("joined", [0, 4, 1024])
def test_path_of_many_short_nodes_decodes_as_its_tokens(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, joined: int
) -> None:
    """Nodes one below the other, with rows below them all, some and one; one is longer."""
    monkeypatch.setattr(prefixes, "MAX_SHORT", 4)
    monkeypatch.setattr(prefixes, "MAX_MERGED", joined)
    paths: list[tuple[tuple[Span, ...], list[int]]] = [((), [])]
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
        rows.append(Row(paths[5][0], IDS[40:44], len(paths[5][1]), None, (3,)))
        output = bench.engine.forward(rows)
        for number, (_, ids) in enumerate(below):
            known = [*ids, *IDS[number : number + step + 1]]
            _near(_logits(output, number), bench.oracle(known)[-1])
        _near(_logits(output, len(below)), bench.oracle([*paths[5][1], *IDS[40:44]])[-1])


def test_splitting_anywhere_changes_nothing(bench: Bench) -> None:
    ids = IDS[:12]
    want = bench.oracle([*ids, 5])[-1]
    for at in range(1, 12, 3):
        for chunk in (12, 1):
            path = bench.node((), ids, chunk)
            upper = bench.store.split(path[0].fragment, at)
            halves = (Span(upper, at), Span(path[0].fragment, 12 - at))
            _near(bench.read(halves, 5), want)
            bench.store.join(upper, path[0].fragment)
            _near(bench.read(path, 5), want)


def test_export_free_load_changes_nothing(bench: Bench) -> None:
    path = bench.node((), IDS[:10])
    tail = bench.node(path, IDS[10:15], chunk=1)
    before = bench.read(tail, 5)
    data = [bench.store.export(s.fragment) for s in tail]
    for span in tail:
        bench.store.free(span.fragment)
    repeated = tuple(Span(f, f.length) for f in (bench.store.load(d, None) for d in data))
    _near(bench.read(repeated, 5), before, 1e-6)


def test_scores_equal_log_softmax(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft._core.sampling.metrics.SCORE_NUMBERS", 4 * N_VOCAB)
    trunk = bench.node((), IDS[:6])
    targets = tuple(IDS[7:17])
    row = Row(trunk, IDS[6:16], 6, None, (), (ScoreSpan(0, targets, 3), ScoreSpan(9, (4,))))
    long, single = bench.engine.forward([row]).scores()[0]
    logits = bench.oracle(IDS[:16])[6:].numpy()
    want = metrics.score(logits, np.array(targets), 3)
    np.testing.assert_allclose(long.logprobs, want.logprobs, atol=1e-4)
    np.testing.assert_allclose(long.entropies, want.entropies, atol=1e-4)
    np.testing.assert_allclose(long.top_logprobs, want.top_logprobs, atol=1e-4)
    assert long.ranks.tolist() == want.ranks.tolist()
    assert long.top_ids.tolist() == want.top_ids.tolist()
    np.testing.assert_allclose(single.logprobs, metrics.log_softmax(logits[9:])[:, 4], atol=1e-4)


def test_prefix_cache_is_accepted_by_the_model_itself(bench: Bench) -> None:
    path = bench.node(bench.node((), IDS[:9]), IDS[9:13], chunk=1)
    message = OTHER_CACHES.get(bench.model.config.model_type)
    if message is not None:
        with pytest.raises(Unsupported, match=message):
            bench.engine.prefix_cache(path)
        return
    given = {cache_name(bench.model): bench.engine.prefix_cache(path)}
    with torch.no_grad():
        got = bench.model(input_ids=torch.tensor([[5]]), **given).logits[0, -1]
    _near(got, bench.oracle([*IDS[:13], 5])[-1])


def test_engines_own_model_gives_plain_logits_too(bench: Bench) -> None:
    """Sinks, caps and windows count where no step is running."""
    _near(plain_logits(bench.engine.model, IDS[:30]), bench.oracle(IDS[:30]))


def test_layers_with_shared_kv_have_no_kv_of_their_own() -> None:
    """Gemma 3n and 4: in two layers of five and of four; every path agrees all the same."""
    for name, n_layers in (("gemma3n", 3), ("gemma4", 2)):
        shared = Bench(build(name))
        assert shared.engine.info.n_layers == n_layers
        cache = shared.engine.prefix_cache(shared.node((), IDS[:9]))
        kept = [layer for layer in cache.layers if layer.keys is not None]
        numbers = sum(layer.keys[:, :, 0].numel() + layer.values[:, :, 0].numel() for layer in kept)
        assert shared.engine.info.kv_bytes_per_token == 4 * numbers


def test_owners_model_stays_as_it_was(bench: Bench) -> None:
    config = bench.model.config.to_dict()
    ids = torch.tensor([IDS[:12]])
    call = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    fresh = bench.model.generate(ids, attention_mask=torch.ones_like(ids), **call)
    before = bench.oracle(IDS[:40])
    engine = TorchEngine.adopt(bench.model, n_ctx=bench.engine.info.context_length)
    engine.forward([Row((), IDS[:30], 0, None, (29,))])
    assert torch.equal(bench.oracle(IDS[:40]), before)
    assert torch.equal(
        bench.model.generate(ids, attention_mask=torch.ones_like(ids), **call), fresh
    )
    assert bench.model.config.to_dict() == config
    assert bench.model.config._attn_implementation in ("eager", "sdpa")
    pairs = zip(bench.model.parameters(), engine.model.parameters(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", cases(FAMILIES))
def test_half_precision_stays_within_tolerance(name: str, dtype: Any) -> None:
    low = Bench(build(name, dtype), N_CTX.get(name))
    trunk = low.node((), IDS[:9])
    tails = [low.node(trunk, IDS[9 + i : 13 + i], chunk=1) for i in range(2)]
    for i, path in enumerate(tails):
        ids = [*IDS[:9], *IDS[9 + i : 13 + i], 5]
        _near(low.read(path, 5), low.oracle(ids)[-1], TOLERANCE[dtype])
    data = low.store.export(tails[0][-1].fragment)
    repeated = low.store.load(data, None)
    before = low.read(tails[0], 5)
    _near(low.read((*trunk, Span(repeated, repeated.length)), 5), before, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases(FAMILIES))
def test_tree_on_a_gpu_equals_the_plain_forward(name: str) -> None:
    model = build(name).to("cuda")
    on_gpu = Bench(model, N_CTX.get(name))
    assert on_gpu.engine.info.device.startswith("cuda")
    for order in (1, -1):
        rows, paths = _mixed_rows(on_gpu)
        output = on_gpu.engine.forward(rows[::order])
        for index, ids in enumerate(paths[::order]):
            _near(_logits(output, index), on_gpu.oracle(ids)[-1], 1e-3)
    path = on_gpu.node((), IDS[:20], chunk=1)
    _near(on_gpu.read(path, 5), on_gpu.oracle([*IDS[:20], 5])[-1], 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["padded", "paged"])
def test_steps_are_ordered_whatever_stream_their_callers_have(kv: str) -> None:
    """One thread after another steps the same engine, and each may have a current stream."""
    on_gpu = Bench(build("llama").to("cuda"), kv=kv)
    path: tuple[Span, ...] = ()
    for number, token in enumerate(IDS[:40]):
        with torch.cuda.stream(torch.cuda.Stream()) if number % 2 else nullcontext():
            path = on_gpu.node(path, [token])
    _near(on_gpu.read(path, 5), on_gpu.oracle([*IDS[:40], 5])[-1], 1e-3)


def test_long_rope_is_fixed_by_the_context_and_not_by_companions() -> None:
    """A path past the short context makes Transformers use long factors for all rows."""
    model = build("phi3_longrope")
    ids = [(3 * i) % 100 + 3 for i in range(90)]
    long = Bench(model)
    assert "long frequencies" in long.engine.info.extra["rope"]
    path = long.node((), ids)
    _near(long.read(path, 5), long.oracle([*ids, 5])[-1])
    alone = _logits(long.engine.forward([Row((), ids[:10], 0, None, (9,))]))
    sibling = long.engine.forward([Row((), ids[:10], 0, None, (9,)), Row((), ids, 0, None, (89,))])
    _near(_logits(sibling, 0), alone, 1e-5)
    short = Bench(model, 64)
    assert "short frequencies" in short.engine.info.extra["rope"]
    _near(short.read(short.node((), ids[:20]), 5), short.oracle([*ids[:20], 5])[-1])
