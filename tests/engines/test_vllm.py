"""The vLLM engine: native runs, logits by open requests, adapters, and errors."""

from __future__ import annotations

import asyncio
import gc
import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("vllm", reason="vllm is not installed")

from safetensors.numpy import save_file  # noqa: E402

import weft  # noqa: E402
from weft import AsyncLM, Branch, Loom  # noqa: E402
from weft._core.sampling.metrics import log_softmax  # noqa: E402
from weft._core.sampling.params import SamplingParams  # noqa: E402
from weft.constraints import GBNF, Allow, Choice, Lark, Lazy, Regex  # noqa: E402
from weft.engines.base import Row, ScoreSpan  # noqa: E402
from weft.engines.generation import GenerationEvent, GenerationRequest  # noqa: E402
from weft.engines.vllm.loop import EngineLoop  # noqa: E402
from weft.engines.vllm.native import vllm_params  # noqa: E402
from weft.engines.vllm.rows import LogitsReader  # noqa: E402
from weft.engines.vllm.running import RunningEngine  # noqa: E402
from weft.engines.vllm.vllm_internals import idle_tokens  # noqa: E402
from weft.errors import (  # noqa: E402
    ConfigError,
    ContextOverflow,
    ForwardError,
    ModelLoadError,
    StaleHandle,
    Unsupported,
)
from weft.lm.lm import LM  # noqa: E402

SMALL = {"kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 64}
TINY = Path(str(weft.__file__)).parent / "data" / "tiny"
PROMPT = "Use 4 9 10 13 to make 24."
PROMPTS = [
    *(f"Use {a} {b} 10 13 to make 24." for a in range(3, 8) for b in range(5, 10)),
    *(
        f"Once upon a time a {kind} {animal} named {name}"
        for kind in ("brave", "small", "old", "clever", "kind")
        for animal, name in (
            ("fox", "Anna"), ("owl", "Tom"), ("otter", "Mia"), ("bear", "Ben"), ("cat", "Kira")
        )
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def lm() -> Iterator[LM]:
    options = {**SMALL, "enable_lora": True, "max_lora_rank": 8}
    with weft.load("tiny", engine="vllm", dtype="float32", engine_options=options) as created:
        yield created


@pytest.fixture(scope="module")
def reference() -> Iterator[LM]:
    with weft.load("tiny") as created:
        yield created


def reader_of(lm: LM) -> LogitsReader:
    return lm.engine._reader


def rows_after(lm: LM, ids: list[int], *, adapter: str | None = None) -> np.ndarray:
    output = lm.engine.forward([Row((), ids, 0, None, (len(ids) - 1,), (), adapter)])
    return output.logits(0)


def open_requests_of(lm: LM) -> set[str]:
    """Return the requests that vLLM has not ended: they take places in its batch, and KV."""
    states = lm.engine._running.engine.output_processor.request_states
    return {state.external_req_id for state in states.values()}


def check_nothing_leaked(lm: LM) -> None:
    """The requests that vLLM holds are those that are kept, and every slot is free, once."""
    reader = reader_of(lm)
    kept_alive = {name for name in open_requests_of(lm) if name.startswith("weft-row-")}
    assert len(kept_alive) == len(reader._idle) <= reader.max_idle
    assert reader._idle_tokens == sum(len(ids) for _, ids in reader._idle)
    assert reader.buffer is not None
    assert sorted(reader.buffer.free) == [*range(reader.buffer.n_slots)]


# The same model ---------------------------------------------------------------------------------


def test_greedy_texts_of_50_prompts_are_those_of_the_numpy_engine(lm: LM, reference: LM) -> None:
    assert len(set(PROMPTS)) == 50

    def texts(of: LM) -> list[str]:
        looms = [Loom(of, prompt) for prompt in PROMPTS]
        return [loom.grow(max_tokens=24, temperature=0, show=False)[0].text for loom in looms]

    assert texts(lm) == texts(reference)


def test_logprobs_of_native_runs_are_raw(lm: LM, reference: LM) -> None:
    loom = Loom(lm, PROMPT)
    created = loom.grow(
        n=3, max_tokens=12, seed=5, temperature=0.7, top_p=0.9, presence_penalty=0.5, show=False
    )
    for node in created:
        ids = node.get_prefix_tokens()
        twin = Loom(reference, ids[: len(loom.tokens)], template=False)
        want = twin.measure(ids[len(loom.tokens) :]).logprobs
        np.testing.assert_allclose(node.logprobs, want, atol=1e-4)
        assert node.entropies == []  # vLLM reports none


def test_same_seed_gives_the_same_texts_and_siblings_differ(lm: LM) -> None:
    def texts(seed: int) -> list[str]:
        created = Loom(lm, PROMPTS[40]).grow(n=6, max_tokens=16, seed=seed, show=False)
        return [node.text for node in created]

    assert texts(1) == texts(1)
    assert len({*texts(1), *texts(2)}) > 6


def test_stream_may_be_left_and_the_rest_is_not_generated(lm: LM) -> None:
    loom = Loom(lm, PROMPT)
    for number, _ in enumerate(loom.stream(n=2, max_tokens=900, seed=1, temperature=1.2)):
        if number == 5:
            break
    gc.collect()
    (node,) = loom.grow(max_tokens=4, temperature=0, show=False)
    assert len(node.tokens) == 4


# -- native runs -----------------------------------------------------------------------------------


class NativeRun:
    """A run submitted to vLLM, and the events of each sibling."""

    def __init__(self, lm: LM, ids: Sequence[int], **options: Any) -> None:
        options = {"stop_ids": frozenset(), "max_tokens": 16, "streams": (1,), **options}
        params = SamplingParams(**options.pop("params", {"temperature": 0}))
        assert lm.engine.native is not None
        self.native = lm.engine.native
        self.news: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
        self.events: list[list[GenerationEvent]] = [[] for _ in options["streams"]]
        self.handle = self.native.start(
            GenerationRequest(tuple(ids), params, **options), self.news.put
        )

    def hear(self) -> GenerationEvent:
        event = self.news.get(timeout=60)
        mine = self.events[event.sibling]
        assert not mine or not mine[-1].is_last  # nothing comes after an end
        mine.append(event)
        return event

    def tokens(self, sibling: int = 0) -> list[int]:
        """Wait for a sibling's end; return its tokens."""
        mine = self.events[sibling]
        while not mine or not mine[-1].is_last:
            self.hear()
        return [token for event in mine for token in event.tokens]

    def logprobs(self, sibling: int = 0) -> list[float]:
        return [each for event in self.events[sibling] for each in event.logprobs or ()]


def test_run_ends_at_its_end_token_and_does_not_hold_it(lm: LM) -> None:
    ids = lm.tokenize(PROMPTS[30])
    free = NativeRun(lm, ids, max_tokens=12)
    tokens = free.tokens()
    assert len(tokens) == 12
    assert free.events[0][-1].end == "length"
    at = next(n for n in range(4, 12) if tokens[n] not in tokens[:n])
    ended = NativeRun(lm, ids, max_tokens=12, stop_ids=frozenset({tokens[at], 0}))
    assert ended.tokens() == tokens[:at]
    assert (ended.events[0][-1].end, ended.events[0][-1].ended_by) == ("stop", tokens[at])
    np.testing.assert_allclose(ended.logprobs(), free.logprobs()[:at], atol=1e-4)


def test_cancelled_sibling_ends_and_the_others_continue(lm: LM) -> None:
    run = NativeRun(lm, lm.tokenize(PROMPT), streams=(1, 2, 3), max_tokens=400, params={})
    while not all(run.events):
        run.hear()
    run.native.cancel(run.handle, 1)
    assert len(run.tokens(1)) < 400
    assert run.events[1][-1].end == "cancelled"
    for other in (0, 2):
        assert len(run.tokens(other)) == 400
        assert run.events[other][-1].end == "length"
    assert not any(name.startswith("weft-run-") for name in open_requests_of(lm))


def test_run_cancelled_before_its_start_reports_its_end(lm: LM) -> None:
    """The loop is busy meanwhile, and then handles both at once."""
    loop, proceed = lm.engine._running.loop.loop, threading.Event()
    loop.call_soon_threadsafe(proceed.wait)
    run = NativeRun(lm, lm.tokenize(PROMPT), streams=(1, 2), max_tokens=16, params={})
    run.native.cancel(run.handle, 1)
    proceed.set()
    assert run.tokens(1) == []
    assert run.events[1][-1].end == "cancelled"
    assert len(run.tokens(0)) == 16


def test_seeds_differ_by_stream_and_by_where_a_run_begins() -> None:
    def seed(n_tokens: int, stream: int) -> int | None:
        run = GenerationRequest((7,) * n_tokens, SamplingParams(), (stream,), 16, frozenset())
        return vllm_params(run, stream).seed

    places = [(n_tokens, stream) for n_tokens in (5, 6, 7) for stream in (1, 2, 2**64 - 1)]
    assert len({seed(*place) for place in places}) == len(places)
    assert all(0 <= (seed(*place) or 0) < 2**63 for place in places)
    assert seed(5, 1) == seed(5, 1)


GREEDY: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_p": 1e-6},
    {"min_p": 1.0},
]


@pytest.mark.parametrize("params", GREEDY, ids=str)
def test_filters_that_leave_one_token_give_the_greedy_text(lm: LM, params: dict[str, Any]) -> None:
    for prompt in PROMPTS[20:25]:
        loom = Loom(lm, prompt)
        (want,) = loom.grow(max_tokens=16, temperature=0, show=False)
        (created,) = loom.grow(max_tokens=16, seed=3, show=False, **params)
        assert created.tokens == want.tokens


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_draws_are_as_warm_as_they_should_be(lm: LM, reference: LM, temperature: float) -> None:
    """Two tokens two logits apart; 400 draws at temperature 1 pass with odds below 1e-5."""
    loom = Loom(lm, PROMPT)
    row = rows_after(reference, list(loom.tokens))
    biases = {30: 80.0 - float(row[30]), 31: 78.0 - float(row[31])}
    drawn = loom.grow(
        n=400, max_tokens=1, temperature=temperature, logit_bias=biases, seed=4, show=False
    )
    tokens = [token for node in drawn for token in node.tokens]
    assert set(tokens) == {30, 31}
    share = 1 / (1 + np.exp(2 / temperature))
    sigma = np.sqrt(share * (1 - share) / 400)
    assert abs(tokens.count(31) / 400 - share) < 3 * sigma


SHIFTED: list[dict[str, Any]] = [
    {"presence_penalty": 0.2, "frequency_penalty": 2.0},
    {"presence_penalty": 2.0, "frequency_penalty": 0.2},
    {"repetition_penalty": 1.6},
    {"constraint": set(range(30, 300))},
]


@pytest.mark.parametrize("params", SHIFTED, ids=lambda params: "-".join(params))
def test_penalties_and_biases_give_the_tokens_of_the_numpy_engine(
    lm: LM, reference: LM, params: dict[str, Any]
) -> None:
    def tokens(of: LM, **params: Any) -> list[tuple[int, ...]]:
        looms = [Loom(of, prompt) for prompt in PROMPTS[20:24]]
        created = [loom.grow(max_tokens=40, temperature=0, show=False, **params) for loom in looms]
        return [tuple(node.tokens) for (node,) in created]

    assert tokens(lm, **params) == tokens(reference, **params)
    assert tokens(lm, **params) != tokens(lm)


def test_biases_and_end_tokens_count_under_a_constraint_too(lm: LM, reference: LM) -> None:
    (end, *_) = sorted(reference.tokenizer.stop_ids)
    for bias in ({31: 60.0}, {31: 60.0, end: 90.0}):
        for constraint in (None, {30, 31, 32}):
            options = {"logit_bias": bias, "constraint": constraint}
            ours, theirs = (
                Loom(of, PROMPT).grow(max_tokens=6, temperature=0, show=False, **options)[0]
                for of in (lm, reference)
            )
            assert ours.tokens == theirs.tokens
            assert ours.finish_reason == theirs.finish_reason
    assert (ours.tokens, ours.finish_reason) == ([], "stop")


# Rows -------------------------------------------------------------------------------------------


def test_branch_continues_in_one_open_request(lm: LM, reference: LM) -> None:
    reader = reader_of(lm)
    opened, extended = reader.n_opened, reader.n_extended
    ours, theirs = (Branch.create(each, temperature=0.0) for each in (lm, reference))
    for branch in (ours, theirs):
        branch.prefill(branch.lm.tokenize("Once upon a time a grey fox"))
    for _ in range(12):
        np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-4)
        token = ours.produce().token
        for branch in (ours, theirs):
            branch.commit(token)
    assert reader.n_opened - opened == 1
    assert reader.n_extended - extended >= 11


def test_tokens_that_the_host_chose_replace_the_drawn_ones(lm: LM, reference: LM) -> None:
    """An open request drops what vLLM drew: the row is that of the host's path, not of vLLM's."""
    rng = np.random.default_rng(3)
    ids = [int(each) for each in rng.integers(30, 2000, size=40)]
    before = reader_of(lm).n_extended
    for end in range(34, 41):
        np.testing.assert_allclose(
            rows_after(lm, ids[:end]), rows_after(reference, ids[:end]), atol=1e-4
        )
    assert reader_of(lm).n_extended - before == 6


def test_siblings_of_one_context_share_its_open_request_and_the_prefix(
    lm: LM, reference: LM
) -> None:
    ids = [*range(300, 340)]
    paths = [ids, *([*ids, token] for token in (500, 501, 502))]
    for path in paths:
        np.testing.assert_allclose(rows_after(lm, path), rows_after(reference, path), atol=1e-4)


def test_open_requests_stay_few_and_close_by_their_age(lm: LM) -> None:
    reader = reader_of(lm)
    assert reader.max_idle == 16
    for first in range(400, 440):
        rows_after(lm, [first, 7, 8])
    assert len(reader._idle) == reader.max_idle
    assert reader._idle_tokens == sum(len(ids) for _, ids in reader._idle)
    assert (None, (439, 7, 8)) in reader._idle
    assert (None, (400, 7, 8)) not in reader._idle


def test_requests_that_vllm_holds_are_those_that_are_kept(lm: LM) -> None:
    reader, ids = reader_of(lm), [*range(700, 712)]
    for path in (ids, ids, [*ids, 5], [*ids, 6], ids, [*ids, 5], ids[:3]):
        rows_after(lm, path)  # the same ones again, too: two requests of one path
        check_nothing_leaked(lm)
    for first in range(800, 830):
        rows_after(lm, [first, 7])
    check_nothing_leaked(lm)
    lm.engine._running.loop.call(reader.close())
    check_nothing_leaked(lm)
    assert not open_requests_of(lm)


def test_rows_that_fail_or_are_left_leak_nothing(lm: LM, reference: LM) -> None:
    reader, loop = reader_of(lm), lm.engine._running.loop
    paths = [(None, (30 + i, 200)) for i in range(80)]
    none = {None: None}
    for _ in range(3):
        with pytest.raises(Exception, match="2048"):  # vLLM's own words: more than it has room for
            loop.call(reader.rows([*paths[:2], (None, (5,) * 3000)], none))
        check_nothing_leaked(lm)

        async def leave() -> None:
            work = asyncio.ensure_future(reader.rows(paths, none))
            await asyncio.sleep(0.01)
            work.cancel()
            await asyncio.wait([work])
            assert work.cancelled()

        loop.call(leave())
        check_nothing_leaked(lm)
    np.testing.assert_allclose(
        loop.call(reader.rows(paths, none)),
        [rows_after(reference, list(ids)) for _, ids in paths],
        atol=1e-4,
    )


def test_requests_that_are_kept_hold_no_more_tokens_than_they_may(lm: LM) -> None:
    running = lm.engine._running
    reader = LogitsReader(
        running.engine, lm.info.n_vocab, buffer=None, max_idle=8, max_idle_tokens=50
    )
    before = len(open_requests_of(lm))
    kept = {1: 1, 2: 2, 3: 2, 4: 2}
    for number in kept:
        ids = (*range(900 + number, 920 + number),)
        running.loop.call(reader.rows([(None, ids)], {None: None}))
        assert len(reader._idle) == len(open_requests_of(lm)) - before == kept[number]
    running.loop.call(reader.rows([(None, (9,) * 60)], {None: None}))  # too long to be kept
    assert len(reader._idle) == len(open_requests_of(lm)) - before == reader._idle_tokens == 0


@pytest.mark.parametrize(("n_blocks", "longest"), [(100, 512), (20, 512), (33, 512), (9, 64)])
def test_two_paths_fit_next_to_idle_requests(n_blocks: int, longest: int) -> None:
    cache = SimpleNamespace(num_gpu_blocks=n_blocks, block_size=32)
    model = SimpleNamespace(max_model_len=longest)
    kept = idle_tokens(SimpleNamespace(cache_config=cache, model_config=model))
    assert 0 <= kept <= 32 * n_blocks // 2
    assert kept == 0 or kept + 2 * longest <= 32 * n_blocks
    assert (kept > 0) == (32 * n_blocks > 2 * longest)


class Requests:
    """An engine whose rows are noise by path; in open requests, what it drew may stay."""

    def __init__(self, *, keeps_drawn: bool) -> None:
        self.keeps_drawn = keeps_drawn
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(get_vocab_size=lambda: 50, max_model_len=64),
            cache_config=SimpleNamespace(num_gpu_blocks=100, block_size=32),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
        )

    async def generate(self, given: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
        if isinstance(given, dict):
            yield message(noise(given["prompt_token_ids"]))
            return
        ids: list[int] = []
        async for chunk in given:
            ids += chunk.prompt["prompt_token_ids"]
            yield message(noise(ids))
            if self.keeps_drawn:
                ids.append(int(noise(ids).argmax()))


def noise(ids: Sequence[int]) -> np.ndarray:
    return log_softmax(np.random.default_rng(list(ids)).normal(0, 2, 50).astype(np.float32))


def message(row: np.ndarray) -> Any:
    logprobs = SimpleNamespace(token_ids=[*range(50)], logprobs=row.tolist())
    return SimpleNamespace(outputs=[SimpleNamespace(logprobs=logprobs)])


@pytest.mark.parametrize("keeps_drawn", [False, True])
def test_requests_stay_open_if_they_continue_by_the_hosts_tokens(keeps_drawn: bool) -> None:
    loop = EngineLoop()
    try:
        reader = RunningEngine(Requests(keeps_drawn=keeps_drawn), loop, None).reader(
            "auto", "logprobs"
        )
        assert reader.max_idle == (0 if keeps_drawn else 2)
        for ids in ((3,), (3, 4), (3, 4, 5), (3, 4, 6), (3, 4, 5, 6, 7)):
            (row,) = loop.call(reader.rows([(None, ids)], {None: None}))
            np.testing.assert_allclose(row, noise(ids), atol=1e-6)
    finally:
        loop.close()


def test_rows_by_logprobs_are_those_of_the_board(lm: LM) -> None:
    engine = lm.engine
    slow = LogitsReader(
        engine._running.engine, lm.info.n_vocab, buffer=None, max_idle=4, max_idle_tokens=999
    )
    paths = [(None, (30, 40, 50)), (None, (30, 40, 50, 60))]
    result = engine._running.loop.call(slow.rows(paths, {None: None}))
    engine._running.loop.call(slow.close())
    for (_, ids), row in zip(paths, result, strict=True):
        want = log_softmax(rows_after(lm, list(ids)))
        np.testing.assert_allclose(log_softmax(row), want, atol=1e-4)


def test_scores_and_rows_within_one_row(lm: LM, reference: LM) -> None:
    ids = [*range(600, 640)]
    row = Row((), ids, 0, None, (3, 39), (ScoreSpan(5, tuple(ids[6:30]), 4),))
    ours, theirs = lm.engine.forward([row]), reference.engine.forward([row])
    for number in range(2):
        np.testing.assert_allclose(ours.logits(number), theirs.logits(number), atol=1e-4)
    (one,), (two,) = ours.scores()[0], theirs.scores()[0]
    for name in ("logprobs", "entropies", "top_logprobs"):
        np.testing.assert_allclose(getattr(one, name), getattr(two, name), atol=1e-4)
    assert np.abs(one.ranks - two.ranks).max() <= 3  # unlikely tokens lie close together
    assert one.top_ids.tolist() == two.top_ids.tolist()


def test_many_contexts_at_once_are_more_than_there_are_slots(lm: LM, reference: LM) -> None:
    contexts = [[30 + i, 200, 300 + i] for i in range(90)]

    async def ask(of: LM) -> np.ndarray:
        model = AsyncLM(of, as_torch=False)
        return np.asarray(await model.batch_next_token_logprobs(contexts))

    np.testing.assert_allclose(asyncio.run(ask(lm)), asyncio.run(ask(reference)), atol=1e-4)


def test_invalid_row_raises_before_any_request(lm: LM) -> None:
    forward = lm.engine.forward
    with pytest.raises(ForwardError, match="0 to 2047; got 5 to 2048"):
        forward([Row((), [5, 2048], 0, None, (1,))])
    with pytest.raises(ContextOverflow, match="2048 tokens is longer than the context of 2047"):
        forward([Row((), [5] * 2048, 0, None, (0,))])
    with pytest.raises(ForwardError, match="logits_at"):
        forward([Row((), [5], 0, None, (1,))])
    with pytest.raises(StaleHandle, match="'gone'"):
        forward([Row((), [5], 0, None, (0,), (), "gone#1")])


# What goes to vLLM, and what runs by steps ------------------------------------------------------

NATIVE: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9, "temperature_first": True},
    {"top_p": 0.9, "top_k": 40},
    {"min_p": 0.1, "top_k": 40},
    {"temperature": 0, "min_p": 0.1, "top_p": 0.9, "temperature_first": True},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": {5: -float("inf"), 9: 2.5}},
    {"penalty_last_n": 64},
    {"constraint": Regex("[0-9]+ apples")},
    {"constraint": Choice(["yes", "no"])},
    {"constraint": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"constraint": Lark('start: "a" /[0-9]{2}/')},
    {"constraint": GBNF('root ::= "a" [0-9] [0-9]')},
    {"constraint": {30, 31, 32}},
]
STEPPED: dict[str, dict[str, Any]] = {
    "typical_p": {"typical_p": 0.9},
    "top_n_sigma": {"top_n_sigma": 1.5},
    "xtc_probability": {"xtc_probability": 0.5},
    "dry_multiplier": {"dry_multiplier": 0.8},
    "temperature=0.7 after": {
        "temperature": 0.7,
        "top_p": 0.9,
        "temperature_first": False,
    },
    "temperature=0.005": {"temperature": 0.005},
    "temperature=3": {"temperature": 3.0},
    "min_p": {"min_p": 0.1, "top_p": 0.9},
    "presence_penalty": {"presence_penalty": 2.5},
    "penalty_last_n": {"penalty_last_n": 64, "presence_penalty": 0.5},
    "logit_bias": {"logit_bias": {9: float("inf")}},
    "Lazy": {"constraint": Lazy(Regex("[0-9]+x"), ["1"])},
}


@pytest.mark.parametrize("params", NATIVE, ids=str)
def test_supported_parameters_use_native_runs(lm: LM, params: dict[str, Any]) -> None:
    assert lm.engine.native is not None
    assert lm.engine.native.unsupported_params(SamplingParams(**params)) is None
    steps = lm.stats().steps
    created = Loom(lm, PROMPT).grow(n=2, max_tokens=12, seed=1, show=False, **params)
    assert created
    assert lm.stats().steps == steps


@pytest.mark.parametrize("why", STEPPED)
def test_parameter_that_vllm_applies_differently_runs_by_steps(lm: LM, why: str) -> None:
    assert lm.engine.native is not None
    refusal = lm.engine.native.unsupported_params(SamplingParams(**STEPPED[why]))
    assert refusal is not None
    assert why in refusal
    steps = lm.stats().steps
    (node, *_) = Loom(lm, PROMPT).grow(max_tokens=4, seed=1, show=False, **STEPPED[why])
    assert lm.stats().steps > steps
    assert len(node.logprobs) == len(node.tokens)


def test_texts_of_native_constraints_fit_them(lm: LM) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["fox", "owl"]}, "old": {"type": "boolean"}},
        "required": ["name", "old"],
        "additionalProperties": False,
    }
    for node in Loom(lm, PROMPT).grow(n=5, max_tokens=40, seed=2, constraint=schema, show=False):
        assert node.finish_reason == "stop"
        assert json.dumps(json.loads(node.text)) == node.text  # no spaces but those of Weft
        assert node.logprobs == []  # vLLM reports those of the masked distribution
    for node in Loom(lm, PROMPT).grow(
        n=5, max_tokens=9, seed=2, constraint=Allow({30, 31}), show=False
    ):
        assert set(node.tokens) <= {30, 31}


# Adapters ---------------------------------------------------------------------------------------


def adapter_folder(folder: Path, *, rank: int = 4, seed: int = 0) -> tuple[Path, Path]:
    """Write an adapter, and the embedded model with it merged in."""
    rng = np.random.default_rng(seed)
    adapter, merged = folder / "adapter", folder / "merged"
    adapter.mkdir()
    merged.mkdir()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "down_proj"], "bias": "none",
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    from weft.engines.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(TINY)
    weights = {name: checkpoint.read(name) for name in checkpoint.tensors}
    halves = {}
    for name in [each for each in weights if "q_proj" in each or "down_proj" in each]:
        n_out, n_in = weights[name].shape
        down = rng.normal(0, 0.05, (rank, n_in)).astype(np.float32)
        up = rng.normal(0, 0.05, (n_out, rank)).astype(np.float32)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        halves[f"{module}.lora_A.weight"], halves[f"{module}.lora_B.weight"] = down, up
        weights[name] = weights[name] + 2 * up @ down
    save_file(halves, adapter / "adapter_model.safetensors")
    save_file(weights, merged / "model.safetensors")
    message = json.loads((TINY / "config.json").read_text()) | {"dtype": "float32"}
    (merged / "config.json").write_text(json.dumps(message))
    for file in TINY.iterdir():
        if not (merged / file.name).exists():
            (merged / file.name).write_bytes(file.read_bytes())
    return adapter, merged


def test_adapter_a_request_is_the_merged_model(lm: LM, tmp_path: Path) -> None:
    adapter, merged = adapter_folder(tmp_path)
    with weft.load(merged, engine="numpy") as full:
        lm.add_adapter("extra", adapter)
        text = Loom(lm, PROMPT).grow(max_tokens=12, temperature=0, show=False)[0].text
        node = Loom(lm, PROMPT, adapter="extra").grow(max_tokens=12, temperature=0, show=False)[0]
        want = Loom(full, PROMPT).grow(max_tokens=12, temperature=0, show=False)[0]
        assert node.text == want.text
        np.testing.assert_allclose(node.logprobs, want.logprobs, atol=1e-3)
        ids = lm.tokenize(PROMPT)
        rows = AsyncLM(lm, as_torch=False).next_token_logprobs_sync(ids, lora_name="extra")
        theirs = AsyncLM(full, as_torch=False).next_token_logprobs_sync(ids)
        np.testing.assert_allclose(rows, theirs, atol=1e-3)
        assert Loom(lm, PROMPT).grow(max_tokens=12, temperature=0, show=False)[0].text == text
    lm.remove_adapter("extra")
    with pytest.raises(ModelLoadError, match="adapter_config"):
        lm.add_adapter("none", tmp_path)


def test_open_request_continues_with_its_own_adapter(lm: LM, reference: LM, tmp_path: Path) -> None:
    adapter, merged = adapter_folder(tmp_path, seed=1)
    ids, reader = [*range(50, 60)], reader_of(lm)
    with weft.load(merged, engine="numpy") as full:
        lm.engine.add_adapter("bent#1", adapter)
        wanted = {None: rows_after(reference, ids), "bent#1": rows_after(full, ids)}
        assert np.abs(wanted[None] - wanted["bent#1"]).max() > 0.1
        for above, name in ((None, "bent#1"), ("bent#1", None)):
            lm.engine._running.loop.call(reader.close())
            rows_after(lm, ids[:-1], adapter=above)
            np.testing.assert_allclose(rows_after(lm, ids, adapter=name), wanted[name], atol=1e-3)
        before = reader.n_extended
        rows_after(lm, ids[:-1], adapter="bent#1")
        np.testing.assert_allclose(
            rows_after(lm, ids, adapter="bent#1"), wanted["bent#1"], atol=1e-3
        )
        assert reader.n_extended == before + 1
        lm.engine.remove_adapter("bent#1")


def test_adapter_of_too_high_a_rank_raises(lm: LM, tmp_path: Path) -> None:
    adapter, _ = adapter_folder(tmp_path, rank=16)
    with pytest.raises(ConfigError, match="16"):
        lm.add_adapter("large", adapter)
    assert rows_after(lm, [5, 6]).shape == (2048,)


# What it cannot do ------------------------------------------------------------------------------


def test_calls_that_need_kv_raise_and_are_named(lm: LM, tmp_path: Path) -> None:
    loom = Loom(lm, PROMPT)
    with pytest.raises(Unsupported, match="vllm"):
        lm.embed(["a"])
    with pytest.raises(Unsupported, match="vllm"):
        loom.get_prefix_cache()
    with pytest.raises(Unsupported, match="vllm"):
        _ = loom.frag
    with pytest.raises(Unsupported, match="vllm"):
        lm.kv.save(loom.tokens, tmp_path / "a.kv")


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"engine_options": {"tensor_paralel_size": 2}}, ConfigError, "near it: tensor_parallel_size"),
    ({"n_ctx": 99, "engine_options": {"max_model_len": 99}}, ConfigError, "two limits"),
    ({"engine_options": {"logprobs_mode": "raw_logits"}}, ConfigError, "Weft sets"),
    ({"engine_options": {"rows": "smoke"}}, ConfigError, '"board" and "logprobs"'),
    ({"engine_options": {"tensor_parallel_size": "two"}}, ConfigError, "rejects its arguments"),
    ({"device": "cuda"}, ConfigError, "runs on 'cpu'"),
    ({"dtype": "int3"}, (ConfigError, Unsupported), "int3"),
    ({"n_seq_max": 4}, Unsupported, "max_num_seqs"),
    ({"kv_budget": "1GiB"}, Unsupported, "kv_cache_memory_bytes"),
]


@pytest.mark.parametrize(("given", "error", "message"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes_raise_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], error: Any, message: str
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(AsyncLLM, "__init__", started)
    with pytest.raises(error, match=message):
        weft.load("tiny", engine="vllm", **given)


def test_broken_folder_error_names_the_file(tmp_path: Path) -> None:
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    full = weights.read_bytes()
    weights.write_bytes(full[: len(full) // 2])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors.*truncated"):
        weft.load(tmp_path, engine="vllm")
    weights.write_bytes(full)
    broken_config = json.loads((TINY / "config.json").read_text())
    broken_config |= {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}
    (tmp_path / "config.json").write_text(json.dumps(broken_config))
    with pytest.raises((Unsupported, ModelLoadError, ConfigError)):
        weft.load(tmp_path, engine="vllm")


def test_engine_that_is_not_async_raises() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    with pytest.raises(ConfigError, match="pass an AsyncLLM"):
        weft.load(AsyncEngineArgs(model=str(TINY)))
