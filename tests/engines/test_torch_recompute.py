"""Models without KV of single tokens recompute full paths, and equal their plain forward."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from families import N_VOCAB, RECOMPUTED_FAMILIES, build, cases, plain_logits  # noqa: E402
from weft import LM, AsyncLM, Branch, BranchStore, Loom, load, search  # noqa: E402
from weft._core.sampling import metrics  # noqa: E402
from weft.constraints import Regex  # noqa: E402
from weft.engines.base import Fragment, Row, ScoreSpan  # noqa: E402
from weft.engines.full_sequences import calls  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.recompute.engine import RecomputeEngine  # noqa: E402
from weft.errors import (  # noqa: E402
    ConfigError,
    ContextOverflow,
    ForwardError,
    ModelLoadError,
    Unsupported,
)

pytestmark = pytest.mark.torch

# Largest absolute difference of logits (they reach about 4) from the model's own plain forward.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.06, torch.bfloat16: 0.35}
SLACK = 1e-4
IDS = [(i * i * 5 + 11 * i + 3) % (N_VOCAB - 3) + 3 for i in range(60)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny models only lose time to others
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=cases(RECOMPUTED_FAMILIES))
def pair(request: pytest.FixtureRequest) -> tuple[Any, RecomputeEngine]:
    """A model that its owner keeps, and its engine."""
    model = build(request.param)
    engine = TorchEngine.adopt(model)
    assert isinstance(engine, RecomputeEngine)
    return model, engine


def complete(ids: list[int], *at: int, scores: tuple[ScoreSpan, ...] = ()) -> Row:
    return Row((), ids, 0, None, at or (len(ids) - 1,), scores)


def _near(got: Any, want: Any, tolerance: float = 1e-4) -> None:
    assert float(np.abs(np.asarray(got) - np.asarray(want)).max()) <= tolerance


def mixed(seed: int = 1) -> list[list[int]]:
    """Paths of many lengths; some begin others, some are equal."""
    rng = random.Random(seed)
    paths = [rng.choices(IDS, k=rng.choice((1, 2, 5, 9, 17, 30))) for _ in range(9)]
    return [*paths, paths[4][:1], paths[5] + [7], IDS[:20], IDS[:11], IDS[:20]]


# Every family --------------------------------------------------------------------------------


def test_every_position_of_a_path_equals_the_plain_forward(pair: Any) -> None:
    model, engine = pair
    output = engine.forward([complete(IDS[:37], *range(37))])
    _near([output.logits(i) for i in range(37)], plain_logits(model, IDS[:37]))


def test_logits_depend_on_no_companion_and_no_order(pair: Any) -> None:
    model, engine = pair
    for seed in (1, 2):
        paths = mixed(seed)
        random.Random(seed).shuffle(paths)
        output = engine.forward([complete(ids) for ids in paths])
        for index, ids in enumerate(paths):
            _near(output.logits(index), plain_logits(model, ids)[-1])


def test_scores_equal_log_softmax(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = pair
    monkeypatch.setattr("weft._core.sampling.metrics.SCORE_NUMBERS", 4 * N_VOCAB)
    spans = (ScoreSpan(5, tuple(IDS[6:16]), 3), ScoreSpan(14, (4,)))
    output = engine.forward([complete(IDS[:9]), complete(IDS[:16], scores=spans)])
    long, single = output.scores()[1]
    logits = plain_logits(model, IDS[:16])[5:].numpy()
    want = metrics.score(logits[:10], np.array(IDS[6:16]), 3)
    np.testing.assert_allclose(long.logprobs, want.logprobs, atol=1e-4)
    np.testing.assert_allclose(long.entropies, want.entropies, atol=1e-4)
    np.testing.assert_allclose(long.top_logprobs, want.top_logprobs, atol=1e-4)
    assert long.ranks.tolist() == want.ranks.tolist()
    np.testing.assert_allclose(single.logprobs, metrics.log_softmax(logits[9:10])[:, 4], atol=1e-4)
    assert output.scores()[0] == []


@pytest.mark.engines
def test_the_owners_model_stays_as_it_was() -> None:
    for name in RECOMPUTED_FAMILIES:
        model, untouched = build(name), build(name)
        first, second = TorchEngine.adopt(model), TorchEngine.adopt(model)
        got = [each.forward([complete(IDS[:30])]).logits(0) for each in (first, second)]
        first.close()
        want = plain_logits(untouched, IDS[:40])
        _near(got, want[29])
        assert torch.equal(plain_logits(model, IDS[:40]), want), name
        _near(second.forward([complete(IDS[:12])]).logits(0), want[11])
        assert model.config.to_dict() == untouched.config.to_dict()
        second.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", cases(RECOMPUTED_FAMILIES))
def test_half_precision_stays_within_tolerance(name: str, dtype: Any) -> None:
    try:
        model = build(name, dtype)
        plain_logits(model, IDS[:16])
    except RuntimeError as error:
        pytest.skip(f"Transformers' own forward fails in this dtype: {error}")
    engine = TorchEngine.adopt(model)
    assert engine.info.dtype == str(dtype).removeprefix("torch.")
    paths = [IDS[:30], IDS[20:33], IDS[3:9]]
    output = engine.forward([complete(ids) for ids in paths])
    for index, ids in enumerate(paths):
        _near(output.logits(index), plain_logits(model, ids)[-1], TOLERANCE[dtype])


def test_hidden_states_are_the_base_models_own(pair: Any) -> None:
    model, engine = pair
    rows = [Row((), IDS[:9], 0), Row((), IDS[4:20], 0)]
    if not engine.info.n_embd:
        with pytest.raises(Unsupported, match="embed"):
            engine.hidden_states(rows)
        return
    for row, states in zip(rows, engine.hidden_states(rows), strict=True):
        with torch.no_grad():
            want = model.base_model(torch.tensor([row.tokens]), use_cache=False)[0][0]
        assert states.shape == (row.n_tokens, engine.info.n_embd)
        _near(states, want.numpy(), 1e-3)


# What runs together ----------------------------------------------------------------------------


@pytest.mark.parametrize("min_n", [None, 1, 40])
@pytest.mark.parametrize("max_n", [1, 8, 64, 4096])
def test_every_row_is_answered_once_by_a_path_that_it_begins(max_n: int, min_n: int | None) -> None:
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, ids in enumerate(mixed()):
        rows.setdefault(tuple(ids), []).append(number)
    answered: dict[int, tuple[int, ...]] = {}
    n_paths = 0
    for call in calls(rows, max_n, min_n):
        longest = max(len(path.ids) for path in call)
        assert len(call) == 1 or len(call) * longest <= max_n
        n_paths += len(call)
        for path in call:
            for number in path.rows:
                assert number not in answered
                answered[number] = path.ids
    assert answered.keys() == {number for numbers in rows.values() for number in numbers}
    for ids, numbers in rows.items():
        assert all(answered[number][: len(ids)] == ids for number in numbers)
    begun = [ids for ids in rows if any(o[: len(ids)] == ids != o for o in rows)]
    assert n_paths == len(rows) - len(begun)


def watched(engine: RecomputeEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shapes of the model calls from now on."""
    shapes: list[tuple[int, int]] = []
    run = engine._head.run

    def recorded(token_ids: Any, **given: Any) -> Any:
        shapes.append(tuple(token_ids.shape))
        return run(token_ids, **given)

    monkeypatch.setattr(engine._head, "run", recorded)
    return shapes


@pytest.mark.parametrize("state_bytes", [0, None])
def test_many_long_paths_run_in_calls_of_bounded_size(
    state_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("bloom")
    engine = TorchEngine.adopt(model, state_bytes=state_bytes)
    shapes = watched(engine, monkeypatch)
    rng = random.Random(3)
    paths = [rng.choices(IDS, k=rng.randint(100, 200)) for _ in range(20)]
    output = engine.forward([complete(ids) for ids in paths])
    assert max(rows * length for rows, length in shapes) <= 512
    assert len(shapes) >= sum(map(len, paths)) // 512
    _near(output.logits(7), plain_logits(model, paths[7])[-1])


# Paths that go on ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]
)
def test_continued_and_forked_paths_equal_the_plain_forward(pair: Any, seed: int) -> None:
    """Random work: each step some paths get tokens, are forked, forgotten, or scored."""
    model, engine = pair
    engine.clear_caches()
    rng = random.Random(seed)
    paths = [IDS[:12], IDS[:12], IDS[5:19]]
    for _ in range(12):
        paths = [[*ids, *rng.choices(IDS, k=rng.choice((1, 1, 1, 2, 3)))] for ids in paths]
        rows = [complete(ids) for ids in paths]
        span = ScoreSpan(len(paths[0]) - 3, tuple(paths[0][-2:]))
        if rng.random() < 0.3:
            rows.append(complete(paths[0], len(paths[0]) - 1, scores=(span,)))
        output = engine.forward(rows)
        for index, ids in enumerate(paths):
            _near(output.logits(index), plain_logits(model, ids)[-1], SLACK)
        if len(rows) > len(paths):
            logits = plain_logits(model, paths[0]).log_softmax(-1)[span.start :].numpy()
            want = logits[[0, 1], span.targets]
            np.testing.assert_allclose(output.scores()[-1][0].logprobs, want, atol=SLACK)
        paths.append(list(rng.choice(paths)))  # a fork, of one that goes on, too
        if len(paths) > 5:
            del paths[rng.randrange(len(paths))]
        if rng.random() < 0.1:
            engine.clear_caches()


def test_siblings_continue_in_one_call_of_a_token_each(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine.adopt(build("mamba"))
    assert engine.info.caches_state
    prompt = IDS[:20]
    engine.forward([complete(prompt)])
    shapes = watched(engine, monkeypatch)
    paths = [[*prompt, 30 + i] for i in range(6)]
    engine.forward([complete(ids) for ids in paths])
    engine.forward([complete([*ids, 9]) for ids in paths])
    engine.forward([complete([*ids, 9, 8]) for ids in paths[2:5]])
    engine.forward([complete([*prompt, 77])])  # the prompt's own state is there still
    assert shapes == [(6, 1), (6, 1), (3, 1), (1, 1)]
    engine.clear_caches()
    engine.forward([complete([*prompt, 77])])
    assert shapes[4:] == [(1, 21)]


def test_states_stay_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("bloom")
    token = 3 * 2 * 32 * 4  # layers, K and V, numbers, bytes
    engine = TorchEngine.adopt(model, state_bytes=64 * token)
    ends = engine._runner.states
    assert ends is not None
    shapes = watched(engine, monkeypatch)
    for n in range(10, 30):
        output = engine.forward([complete([40 + i, *IDS[:n]]) for i in range(4)])
        assert ends._used_bytes <= 64 * token
        for i in range(4):
            _near(output.logits(i), plain_logits(model, [40 + i, *IDS[:n]])[-1])
    assert (4, 1) in shapes  # while it was short
    assert shapes[-1] == (4, 30)  # then the full path was run
    with pytest.raises(ConfigError, match="state_bytes"):
        TorchEngine.adopt(model, state_bytes=-1)
    with pytest.raises(ConfigError, match="kv_budget"):
        TorchEngine.adopt(build("llama"), state_bytes=1)


def test_state_cached_twice_is_cleared_completely() -> None:
    model = build("bloom")
    engine = TorchEngine.adopt(model)
    for _ in range(2):  # the second time for its first position, so the full path is run once more
        engine.forward([complete(IDS[:20], 0, 19)])
    engine.clear_caches()
    assert len(engine._runner.states) == engine._runner.states._used_bytes == 0
    _near(engine.forward([complete(IDS[:21])]).logits(0), plain_logits(model, IDS[:21])[-1])


def test_failed_continuation_leaves_the_cache_valid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("jamba")
    engine = TorchEngine.adopt(model)
    paths = [[*IDS[:14], 30 + i] for i in range(3)]
    engine.forward([complete(ids) for ids in paths])
    engine.forward([complete([*ids, 5]) for ids in paths])
    layer = engine.model.model.layers[-1]

    def full(*_: Any) -> Any:
        raise MemoryError("no room")

    hook = layer.register_forward_pre_hook(full)  # others have taken the token in by then
    for _ in range(2):
        with pytest.raises(ForwardError, match="no room"):
            engine.forward([complete([*ids, 5, 6]) for ids in paths])
    hook.remove()
    output = engine.forward([complete([*ids, 5, 6]) for ids in paths])
    for index, ids in enumerate(paths):
        _near(output.logits(index), plain_logits(model, [*ids, 5, 6])[-1])


def test_rows_that_a_hidden_engine_cannot_run_raise() -> None:
    model = build("bloom")
    engine = TorchEngine.adopt(model, n_ctx=20)
    with pytest.raises(ForwardError, match="full paths"):
        engine.forward([Row((), IDS[:3], 0, Fragment())])
    with pytest.raises(ForwardError, match="position 3"):
        engine.forward([Row((), IDS[:3], 3)])
    with pytest.raises(ForwardError, match="no tokens"):
        engine.forward([Row((), [], 0)])
    with pytest.raises(ConfigError, match=f"0 to {N_VOCAB - 1}"):
        engine.forward([complete([3, N_VOCAB])])
    with pytest.raises(ContextOverflow, match="20"):
        engine.forward([complete(IDS[:21])])
    _near(engine.forward([complete(IDS[:20])]).logits(0), plain_logits(model, IDS[:20])[-1])
    assert engine.forward([]).scores() == []
    engine.close()
    engine.close()
    with pytest.raises(ForwardError, match="closed"):
        engine.forward([complete(IDS[:3])])


def test_failed_forward_raises_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine.adopt(build("mamba"))
    want = engine.forward([complete(IDS[:9])]).logits(0)

    def full(*_: Any, **given: Any) -> Any:
        raise MemoryError("no room")

    engine.clear_caches()
    with monkeypatch.context() as patched:
        patched.setattr(engine._head, "run", full)
        with pytest.raises(ForwardError, match="no room"):
            engine.forward([complete(IDS[:9])])
    _near(engine.forward([complete(IDS[:9])]).logits(0), want, 1e-6)


def test_padding_token_within_a_text_is_read_as_the_model_reads_it() -> None:
    """RoBERTa gives what comes after one other positions, and its own cache does not."""
    model = build("roberta")
    engine = TorchEngine.adopt(model)
    text = [5, 9, 40, 0, 33, 7, 0, 18, 12, 50, 3, 44]
    for n in (8, 9, 10, 12):
        _near(engine.forward([complete(text[:n])]).logits(0), plain_logits(model, text[:n])[-1])


# Loading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [("bloom", "ALiBi"), ("mamba", "recurrent"), ("jamba", "recurrent")]
    + [("llama4_chunked", "chunks"), ("falcon", "AttentionInterface"), ("roberta", "positions")]
    + [("deepseek_v32", "select or compress"), ("llama4_whole", "is not separate")],
)
def test_disabled_prefix_caching_is_logged_once_with_its_reason(
    name: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "weft"):
        engine = TorchEngine.adopt(build(name))
        engine.forward([complete(IDS[:5])])
    (record,) = [each for each in caplog.records if each.name.startswith("weft")]
    assert record.getMessage().startswith("prefix caching disabled")
    assert why in record.getMessage()
    assert why in engine.info.extra["no_prefix_caching"]
    assert (engine.info.kv, engine.info.kv_bytes_per_token) == ("hidden", 0)
    assert engine.fragments is None


@pytest.mark.parametrize("name", ["bloom", "mamba", "jamba", "falcon"])
def test_folder_gives_the_logits_of_its_model(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    engine = TorchEngine.load(tmp_path)
    assert engine.info.kv == "hidden"
    if name != "jamba":  # whose experts lie in files otherwise than in memory
        assert engine.info.fingerprint == TorchEngine.adopt(model).info.fingerprint
    _near(engine.forward([complete(IDS[:20])]).logits(0), plain_logits(model, IDS[:20])[-1])
    assert TorchEngine.load(tmp_path, dtype="bfloat16").info.dtype == "bfloat16"


def test_weights_that_give_nan_raise() -> None:
    model = build("mamba")
    with torch.no_grad():
        model.backbone.norm_f.weight.fill_(float("nan"))
    with pytest.raises(ModelLoadError, match="not finite"):
        TorchEngine.adopt(model)


def test_closed_engine_gives_its_weights_back() -> None:
    model = build("bloom")
    engine = TorchEngine.adopt(model)
    stored = weakref.ref(model.get_input_embeddings().weight)
    del model
    engine.close()
    gc.collect()
    assert stored() is None


# Above it --------------------------------------------------------------------------------------


@pytest.fixture(params=["bloom", pytest.param("mamba", marks=pytest.mark.programs), "jamba"])
def owned(request: pytest.FixtureRequest) -> Iterator[tuple[Any, LM]]:
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.BPE({chr(40 + i): i for i in range(80)}, []))
    backend.decoder = decoders.ByteLevel()
    model = build(request.param)
    with load(model, backend) as lm:
        yield model, lm


def truth(model: Any, ids: list[int]) -> Any:
    return plain_logits(model, ids)[-1].log_softmax(-1).numpy()


def test_every_face_follows_the_plain_model(owned: tuple[Any, LM]) -> None:
    model, lm = owned
    ids = [id % 80 for id in IDS[:7]]
    loom = Loom(lm, ids, template=False)
    (greedy,) = loom.grow(temperature=0, max_tokens=6)
    for at, token in enumerate(greedy.tokens):
        logprobs = truth(model, [*ids, *greedy.tokens[:at]])
        assert logprobs[token] >= logprobs.max() - 1e-4
        assert greedy.logprobs[at] == pytest.approx(logprobs[token], abs=1e-4)
    grown = loom.grow(n=5, max_tokens=8, seed=3)
    repeated = Loom(lm, ids, template=False).grow(n=5, max_tokens=8, seed=3)
    assert [each.tokens for each in grown] == [each.tokens for each in repeated]
    assert loom.next(1)[0].logprob == pytest.approx(truth(model, ids).max(), abs=1e-4)
    text = "".join(delta.text for delta in loom.stream(max_tokens=4, temperature=0))
    assert greedy.text.startswith(text)
    measured = loom.measure(greedy.tokens)
    assert measured.logprobs == pytest.approx(greedy.logprobs, abs=1e-4)
    got = AsyncLM(lm, as_torch=False).next_token_logprobs_sync([*ids, 9])
    np.testing.assert_allclose(got, truth(model, [*ids, 9]), atol=1e-4)
    batch = asyncio.run(AsyncLM(lm, as_torch=False).batch_next_token_logprobs([ids, ids[:3]]))
    np.testing.assert_allclose(batch[1], truth(model, ids[:3]), atol=1e-4)


def test_branches_fork_commit_and_are_pruned(owned: tuple[Any, LM]) -> None:
    model, lm = owned
    ids = [id % 80 for id in IDS[:7]]
    trunk = Branch.create(lm, seed=1)
    trunk.prefill(ids)
    forks = [trunk.fork() for _ in range(3)]
    store = BranchStore(lm)
    store.commit([(fork, 10 + i) for i, fork in enumerate(forks)])
    for i, fork in enumerate(forks):
        got = torch.tensor(np.array(fork.logits)).log_softmax(-1).numpy()
        np.testing.assert_allclose(got, truth(model, [*ids, 10 + i]), atol=1e-4)
    forks[0].prune()
    repeated = Branch.load(lm, forks[1].save())  # tokens and state, no KV
    np.testing.assert_allclose(repeated.logits, forks[1].logits, atol=1e-4)
    assert repeated.produce().token == forks[1].produce().token


def test_calls_that_need_kv_raise_and_are_named(owned: tuple[Any, LM], tmp_path: Path) -> None:
    _, lm = owned
    branch = Branch.create(lm, seed=1)
    branch.prefill([5, 6, 7])
    with pytest.raises(Unsupported, match="keeps its KV to itself"):
        lm.kv.save([5, 6, 7], tmp_path / "kv")
    with pytest.raises(Unsupported):
        lm.kv.size([5, 6, 7])
    with pytest.raises(Unsupported):
        Loom(lm, [5, 6, 7], template=False).get_prefix_cache()
    with pytest.raises(Unsupported, match="kv_budget"):
        LM(lm.engine, lm.text, kv_bytes=1 << 20)


def test_rows_are_cached_though_prefixes_are_not(owned: tuple[Any, LM]) -> None:
    _, lm = owned
    model = AsyncLM(lm, as_torch=False)
    model.next_token_logprobs_sync([5, 6, 7])
    before = lm.stats()
    model.next_token_logprobs_sync([5, 6, 7])
    model.next_token_logprobs_sync([5, 6, 7])
    assert (lm.stats().prefilled, lm.stats().steps) == (before.prefilled, before.steps)


def test_weights_changed_in_place_are_noticed(owned: tuple[Any, LM]) -> None:
    model, lm = owned
    face = AsyncLM(lm, as_torch=False)
    before = face.next_token_logprobs_sync([5, 6, 7])
    long = [*range(5, 30)]
    face.next_token_logprobs_sync(long)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.7)
    after = face.next_token_logprobs_sync([5, 6, 7])
    assert np.abs(after - before).max() > 0.05
    np.testing.assert_allclose(after, truth(model, [5, 6, 7]), atol=1e-4)
    got = face.next_token_logprobs_sync([*long, 9])
    np.testing.assert_allclose(got, truth(model, [*long, 9]), atol=1e-4)
    for weight in model.parameters():
        weight.data.mul_(1.2)  # which PyTorch does not count
    lm.clear_cache()
    got = face.next_token_logprobs_sync([*long, 9, 8])
    np.testing.assert_allclose(got, truth(model, [*long, 9, 8]), atol=1e-4)


@pytest.mark.programs
def test_search_and_a_constraint_run_on_them(owned: tuple[Any, LM]) -> None:
    _, lm = owned
    loom = Loom(lm, [5, 6, 7], template=False)
    (result,) = loom.grow(max_tokens=6, seed=1, constraint=Regex("[A-F]{4}"))
    assert re.fullmatch("[A-F]{4}", result.text)
    actual = search.beam(lm, "AB", width=2, n=2, depth=2, max_tokens=3, seed=1)
    assert actual.best is not None
