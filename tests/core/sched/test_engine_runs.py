"""Runs that an engine with a loop of its own generates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

import pytest

from fakes import Boom, OwnLoopFake
from rig import MemoryEngine, Rig, assert_result, logits_after, run
from weft._core.sampling.sampler import Sampler
from weft._core.sched.engine_runs import check_steps, why_not_generated
from weft._core.sched.work import Extend, Logits, Run, RunState, Scores
from weft.constraints.base import Matcher
from weft.engines.base import Output, Row
from weft.engines.generation import EventCallback, GenerationEvent, GenerationRequest
from weft.errors import ConfigError, ConstraintError, ForwardError, Unsupported

PROMPT = [1, 2, 3, 4, 5]
# Of a run that is ended from here: the engine's own thread must not come to its end before.
ENDLESS = 50_000


def fake(**options: Any) -> OwnLoopFake:
    return OwnLoopFake(MemoryEngine(), **options)


def with_script(
    engine: OwnLoopFake, script: Callable[[GenerationRequest, EventCallback], None]
) -> OwnLoopFake:
    """Make the engine emit exactly the events of `script`."""

    def start(request: GenerationRequest, emit: EventCallback) -> list[Any]:
        engine.native.started.append(request)
        script(request, emit)
        return []

    engine.native.start = start  # type: ignore[method-assign]
    engine.native.cancel = lambda *_: None  # type: ignore[method-assign]
    return engine


def test_siblings_are_requested_together() -> None:
    engine = fake(max_in_flight=8)
    rig = Rig(engine)
    place = rig.place(PROMPT)
    items = [run(place, i, temperature=0.9) for i in range(5)]
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)
    (request,) = engine.native.started
    assert request.tokens == tuple(PROMPT)
    assert request.streams == tuple(item.sampler.stream for item in items)
    rig.finish()


def test_number_of_requests_in_flight_does_not_exceed_the_engines_limit() -> None:
    engine = fake(max_in_flight=3)
    rig = Rig(engine)
    items = [run(rig.place([*PROMPT, i]), i) for i in range(4)]
    items += [run(rig.place(PROMPT), 10 + i) for i in range(7)]
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)
    assert engine.native.max_siblings == 3
    rig.finish()


def test_equal_greedy_runs_are_one_with_the_longest_length() -> None:
    engine = fake()
    rig = Rig(engine)
    items = [run(rig.place(PROMPT), i, temperature=0, max_tokens=2 + i) for i in range(4)]
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)
    (request,) = engine.native.started
    assert (len(request.streams), request.max_tokens) == (1, 5)
    rig.finish()


def test_steps_run_next_to_an_engine_run() -> None:
    rig = Rig(fake())
    place = rig.place(PROMPT)
    item = run(place, 0, max_tokens=20)
    result, (row,) = rig.drive(item, Extend(place, (6,), (Logits(6),)))
    assert_result(rig, item, result)
    assert row.shape == (16,)
    rig.finish()


def test_engine_run_continues_while_a_step_without_memory_is_repeated() -> None:
    emitters: list[EventCallback] = []
    engine = with_script(fake(), lambda _, emit: emitters.append(emit))
    rig = Rig(engine)
    forward, n_rows = engine.forward, list[int]()

    def short(rows: Sequence[Row]) -> Output:
        n_rows.append(len(rows))
        if len(rows) > 1:
            raise MemoryError("no memory for a step")
        return forward(rows)

    engine.forward = short  # type: ignore[method-assign]
    place = rig.place(PROMPT)
    (running,) = rig.submit(run(place, 0, max_tokens=2))
    rig.step()
    extends = [Extend(place, (token,), (Logits(6),)) for token in (6, 7)]
    for token, (row,) in zip((6, 7), rig.drive(*extends), strict=True):
        assert row.tolist() == logits_after([*PROMPT, token]).tolist()
    assert n_rows == [2, 1, 1]
    (emit,) = emitters  # the run was not preempted
    emit(GenerationEvent(0, (3, 4), (-1.0, -1.0), (0.5, 0.5), end="length"))
    rig.driver.drive([running])
    assert running.result().tokens == [3, 4]
    rig.finish()


@pytest.mark.parametrize("fail_on", [0, 3, 7])
def test_failure_of_a_request_fails_its_siblings_only(fail_on: int) -> None:
    engine = fake(fail_on={fail_on})
    rig = Rig(engine)
    items = [run(rig.place(PROMPT), i, max_tokens=12) for i in range(4)]
    tickets = rig.drive_quietly(*items)
    failed = [ticket.error for ticket in tickets if ticket.error is not None]
    (error,) = failed
    assert isinstance(error, ForwardError)
    assert isinstance(error.__cause__, Boom)
    for item, ticket in zip(items, tickets, strict=True):
        if ticket.error is None:
            assert_result(rig, item, ticket.result())
    rig.tree.check()
    item_after = run(rig.place(PROMPT), 9)
    (result,) = rig.drive(item_after)
    assert_result(rig, item_after, result)
    rig.finish()


def test_engine_that_fails_to_start_fails_those_runs_only() -> None:
    engine = fake()
    rig = Rig(engine)
    begin = engine.native.start
    engine.native.start = lambda *_: 1 / 0  # type: ignore[assignment, return-value, method-assign]
    (ticket,) = rig.drive_quietly(run(rig.place(PROMPT), 0))
    assert isinstance(ticket.error, ForwardError)
    engine.native.start = begin  # type: ignore[method-assign]
    item = run(rig.place(PROMPT), 0)
    (result,) = rig.drive(item)
    assert_result(rig, item, result)
    rig.finish()


def test_sink_that_ends_a_run_ignores_later_events() -> None:
    def script(request: GenerationRequest, emit: EventCallback) -> None:
        emit(GenerationEvent(0, (3, 4, 5), (-1.0, -1.0, -1.0), (0.5, 0.5, 0.5)))
        emit(GenerationEvent(0, (6,), (-1.0,), (0.5,), end="length"))

    rig = Rig(with_script(fake(), script))

    def sink(state: RunState) -> Any:
        return "stop" if state.tokens[-1] == 4 else None

    (result,) = rig.drive(run(rig.place(PROMPT), 0, sink=sink))
    assert (result.tokens, result.logprobs) == ([3, 4], [-1.0, -1.0])
    assert (result.finish_reason, result.end.ids()) == ("stop", [*PROMPT, 3, 4])
    rig.finish()


def test_cancelled_run_keeps_its_tokens_and_is_cancelled_in_the_engine() -> None:
    engine = fake()
    rig = Rig(engine, n_ctx=2 * ENDLESS)
    reached = threading.Event()

    def sink(state: RunState) -> None:
        if len(state.tokens) >= 3:
            reached.set()

    (ticket,) = rig.submit(run(rig.place(PROMPT), 0, max_tokens=ENDLESS, sink=sink))
    while not reached.is_set():
        rig.step()
    ticket.cancel()
    rig.driver.drive([ticket])
    result = ticket.result()
    assert result.finish_reason == "cancelled"
    assert len(result.tokens) >= 3
    assert result.end.ids() == [*PROMPT, *result.tokens]
    with engine.native.news:
        assert engine.native.news.wait_for(lambda: not engine.native.going)
    rig.finish()


def test_scores_that_the_engine_does_not_report_are_absent() -> None:
    rig = Rig(fake(has_logprobs=False))
    item = run(rig.place(PROMPT), 0)
    (result,) = rig.drive(item)
    assert len(result.tokens) == 6
    assert result.logprobs == []
    assert result.entropies == []
    rig.finish()


def test_entropies_missing_for_one_token_are_absent_for_all() -> None:
    def script(request: GenerationRequest, emit: EventCallback) -> None:
        emit(GenerationEvent(0, (3,), (-1.0,), (0.5,)))
        emit(GenerationEvent(0, (4,), (-2.0,)))
        emit(GenerationEvent(0, (5,), (-2.0,), (0.5,), end="length"))

    rig = Rig(with_script(fake(), script))
    (result,) = rig.drive(run(rig.place(PROMPT), 0, max_tokens=3))
    assert (result.tokens, result.logprobs, result.entropies) == ([3, 4, 5], [-1.0, -2.0, -2.0], [])
    rig.finish()


def test_run_takes_no_more_tokens_than_max_tokens() -> None:
    def script(request: GenerationRequest, emit: EventCallback) -> None:
        emit(GenerationEvent(0, range(request.max_tokens + 5), end="length"))

    rig = Rig(with_script(fake(), script))
    (result,) = rig.drive(run(rig.place(PROMPT), 0, max_tokens=4))
    assert result.tokens == [0, 1, 2, 3]
    rig.finish()


def test_context_ends_a_run() -> None:
    rig = Rig(fake(), n_ctx=9)
    item, full = run(rig.place(PROMPT), 0, max_tokens=50), run(rig.place(range(9)), 1)
    for expected, result in zip((item, full), rig.drive(item, full), strict=True):
        assert_result(rig, expected, result)
        assert result.finish_reason == "context"
    rig.finish()


def test_run_with_a_parameter_the_engine_lacks_runs_by_steps() -> None:
    engine = fake()
    engine.native.unsupported_params = lambda params: (  # type: ignore[method-assign]
        "typical_p" if params.typical_p < 1 else None
    )
    rig = Rig(engine)
    own, stepped = run(rig.place(PROMPT), 0), run(rig.place(PROMPT), 1, typical_p=0.9)
    for item, result in zip((own, stepped), rig.drive(own, stepped), strict=True):
        assert_result(rig, item, result)
    assert [request.params.typical_p for request in engine.native.started] == [1.0]
    rig.finish()


def test_engine_without_steps_raises_and_names_what_it_lacks() -> None:
    engine = fake(steps=False)
    engine.native.unsupported_params = lambda params: (  # type: ignore[method-assign]
        "typical_p=0.9" if params.typical_p < 1 else None
    )
    rig = Rig(engine)
    place = rig.place(PROMPT)
    with pytest.raises(Unsupported, match="generates complete runs only.*next-token"):
        rig.submit(Extend(place, (), (Logits(5),)))
    with pytest.raises(Unsupported, match="cannot honour typical_p=0.9"):
        rig.submit(run(place, 0, typical_p=0.9))
    with pytest.raises(Unsupported, match="no branches that are committed token by token"):
        check_steps(run(place, 0).sampler.params, engine)
    item = run(place, 0)
    (result,) = rig.drive(item)
    assert_result(rig, item, result)
    assert engine.calls  # calls of its own loop only: rows with one complete path
    rig.finish()


def test_many_threads_and_a_loop_share_the_engine() -> None:
    rig = Rig(fake(max_in_flight=4))
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        item = run(rig.place([*PROMPT, number]), number)
        results[number] = (item, rig.drive(item)[0])

    async def results_of_loop() -> list[Any]:
        items = [run(rig.place([*PROMPT, 9, i]), 20 + i) for i in range(5)]
        tickets = await rig.driver.asubmit(items)
        await rig.driver.adrive(tickets)
        return list(zip(items, [ticket.result() for ticket in tickets], strict=True))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for item, result in asyncio.run(results_of_loop()):
        assert_result(rig, item, result)
    for thread in threads:
        thread.join()
    assert len(results) == 5
    for item, result in results.values():
        assert_result(rig, item, result)
    rig.finish()


def test_close_ends_requests_in_flight() -> None:
    rig = Rig(fake(), n_ctx=2 * ENDLESS)
    (ticket,) = rig.submit(run(rig.place(PROMPT), 0, max_tokens=ENDLESS))
    rig.step(3)
    rig.driver.close()
    assert ticket.error is not None
    rig.tree.check()


def test_end_or_an_error_is_the_last_event() -> None:
    assert not GenerationEvent(0, (1,)).is_last
    assert GenerationEvent(0, end="stop").is_last
    assert GenerationEvent(0, error=ConfigError("no")).is_last


class Below(Matcher):
    """Allows tokens below a bound, any number of them; `may_end`: the text may end."""

    def __init__(self, bound: int, *, may_end: bool = False) -> None:
        self.bound = bound
        self.can_end = may_end

    def fill(self, bits: Any, *sets: Set[int]) -> None:
        bits[:] = (1 << self.bound) - 1

    def accept(self, token: int) -> None:
        if token >= self.bound:
            raise ConstraintError(f"{token} is not allowed")

    def is_allowed(self, token: int) -> bool:
        return token < self.bound

    @property
    def may_end(self) -> bool:
        return self.can_end

    @property
    def must_end(self) -> bool:
        return False

    def clone(self) -> Below:
        return Below(self.bound, may_end=self.can_end)


def constrained(item: Run, matcher: Matcher) -> Run:
    return replace(item, sampler=Sampler(item.sampler.params, item.sampler.stream, matcher))


@pytest.mark.parametrize(
    ("tokens", "may_end", "message"),
    [
        ((3, 4), True, None),
        ((3, 4), False, "a text that its constraint does not let end, after 2 tokens"),
        ((3, 9), True, "9 is not allowed"),
    ],
)
def test_engine_output_that_breaks_the_constraint_fails_the_run(
    tokens: tuple[int, ...], may_end: bool, message: str | None
) -> None:
    def script(request: GenerationRequest, emit: EventCallback) -> None:
        emit(GenerationEvent(0, tokens, end="stop"))

    rig = Rig(with_script(fake(), script))
    item = constrained(run(rig.place(PROMPT), 0), Below(8, may_end=may_end))
    (ticket,) = rig.drive_quietly(item)
    if message is None:
        result = ticket.result()
        assert (result.tokens, result.finish_reason) == (list(tokens), "stop")
        assert result.ended_by is None  # the engine did not name a token
    else:
        assert message in str(ticket.error)
    rig.finish()


def test_logprobs_missing_for_one_token_are_absent_for_all() -> None:
    def script(request: GenerationRequest, emit: EventCallback) -> None:
        emit(GenerationEvent(0, (3,), (-1.0,), (0.5,)))
        emit(GenerationEvent(0, (4,), None, (0.5,)))
        emit(GenerationEvent(0, (5,), end="length"))

    rig = Rig(with_script(fake(), script))
    (result,) = rig.drive(run(rig.place(PROMPT), 0, max_tokens=3))
    assert (result.tokens, result.logprobs, result.entropies) == ([3, 4, 5], [], [])
    rig.finish()


def test_length_limit_set_by_the_context_is_reported_as_context() -> None:
    def script(request: GenerationRequest, emit: EventCallback) -> None:
        emit(GenerationEvent(0, range(3), end="length"))

    rig = Rig(with_script(fake(), script), n_ctx=8)
    (result,) = rig.drive(run(rig.place(PROMPT), 0, max_tokens=50))
    assert (result.tokens, result.finish_reason) == ([0, 1, 2], "context")
    rig.finish()


def test_length_end_before_the_context_is_full_is_reported_as_length() -> None:
    def script(request: GenerationRequest, emit: EventCallback) -> None:
        emit(GenerationEvent(0, (1,), end="length"))  # it has less room than its own limit says

    rig = Rig(with_script(fake(), script))
    (result,) = rig.drive(run(rig.place(PROMPT), 0, max_tokens=50))
    assert (result.tokens, result.finish_reason) == ([1], "length")
    rig.finish()


def test_run_that_the_engine_cannot_cancel_ends() -> None:
    rig = Rig(fake(), n_ctx=2 * ENDLESS)
    engine = rig.engine
    assert isinstance(engine, OwnLoopFake)
    cancel = engine.native.cancel

    def fails(handle: Any, sibling: int) -> None:
        cancel(handle, sibling)
        raise Boom("cancel")

    engine.native.cancel = fails  # type: ignore[method-assign]
    (ticket,) = rig.submit(run(rig.place(PROMPT), 0, max_tokens=ENDLESS))
    rig.step(3)
    ticket.cancel()
    rig.driver.drive([ticket])
    assert ticket.result().finish_reason == "cancelled"
    item = run(rig.place(PROMPT), 1)
    assert_result(rig, item, *rig.drive(item))
    rig.finish()


def test_rows_of_log_probabilities_do_not_take_what_asks_for_raw_logits() -> None:
    engine = fake()
    engine.info = replace(
        engine.info, capabilities=replace(engine.info.capabilities, raw_logits=False)
    )
    engine.native.unsupported_params = lambda params: (  # type: ignore[method-assign]
        "typical_p" if params.typical_p < 1 else None
    )
    rig = Rig(engine)
    place = rig.place(PROMPT)
    with pytest.raises(Unsupported, match="no raw logits"):
        rig.submit(run(place, 0, typical_p=0.9, repetition_penalty=1.2))
    fine = [run(place, 0, repetition_penalty=1.2), run(place, 1, typical_p=0.9)]
    for item, result in zip(fine, rig.drive(*fine), strict=True):
        assert_result(rig, item, result)
    rig.drive(Extend(place, (6,), (Logits(6),)))
    rig.finish()


def test_scores_alone_are_taken_without_steps_where_the_engine_scores() -> None:
    engine = fake(steps=False)
    engine.info = replace(engine.info, capabilities=replace(engine.info.capabilities, scoring=True))
    rig = Rig(engine)
    place = rig.place(PROMPT)
    rig.drive(Extend(place, (), (Scores(1, 5),)))
    with pytest.raises(Unsupported, match="complete runs only: no next-token distributions, no"):
        rig.submit(Extend(place, (), (Scores(1, 5, top=2),)))
    assert why_not_generated(run(place).sampler, None) == "anything but steps"
    rig.finish()


def test_constraint_that_has_advanced_stays_in_the_scheduler() -> None:
    rig = Rig(engine := fake())
    begun = run(rig.place(PROMPT)).sampler
    assert why_not_generated(begun, engine.native) is None
    begun.resumed = True
    why = why_not_generated(begun, engine.native)
    assert why == "a constraint that has begun before this node"
    rig.finish()


def test_siblings_of_different_lengths_are_separate_requests() -> None:
    rig = Rig(engine := fake())
    items = [run(rig.place(PROMPT), i, temperature=0.9, max_tokens=2 + i) for i in range(3)]
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)
    assert [request.max_tokens for request in engine.native.started] == [2, 3, 4]
    rig.finish()


def test_siblings_with_different_stop_tokens_are_separate_requests() -> None:
    rig = Rig(engine := fake())
    stops = [frozenset({40}), frozenset({40}), frozenset({41})]
    items = [
        run(rig.place(PROMPT), i, temperature=0.9, stop_ids=each) for i, each in enumerate(stops)
    ]
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)
    assert [(request.stop_ids, len(request.streams)) for request in engine.native.started] == [
        (frozenset({40}), 2),
        (frozenset({41}), 1),
    ]
    rig.finish()


def test_second_end_of_a_sibling_is_ignored_and_ended_siblings_are_not_cancelled() -> None:
    cancelled: list[int] = []

    def script(request: GenerationRequest, emit: EventCallback) -> None:
        for sibling in (0, 0, 1):
            emit(GenerationEvent(sibling, (3,), (-1.0,), (0.5,), end="length"))

    engine = with_script(fake(), script)
    engine.native.cancel = lambda _, sibling: cancelled.append(sibling)  # type: ignore[method-assign]
    rig = Rig(engine)
    results = rig.drive(*(run(rig.place(PROMPT), i, temperature=0.9) for i in range(2)))
    assert [(result.tokens, result.finish_reason) for result in results] == [([3], "length")] * 2
    assert rig.scheduler.engine_runs is not None
    assert (cancelled, rig.scheduler.engine_runs.n_in_flight) == ([], 0)
    rig.finish()


def test_requested_length_is_limited_by_the_context() -> None:
    rig = Rig(engine := fake(), n_ctx=len(PROMPT) + 3)
    item = run(rig.place(PROMPT), max_tokens=50, stop_ids=frozenset())
    (result,) = rig.drive(item)
    assert_result(rig, item, result)
    assert [request.max_tokens for request in engine.native.started] == [3]
    rig.finish()


def test_runs_with_constraints_are_requested_one_by_one() -> None:
    """Each has a matcher of its own here, and is given to the engine with it."""
    engine = fake()
    engine.native.unsupported_params = lambda params: None  # type: ignore[method-assign]
    rig = Rig(engine)
    items = [constrained(run(rig.place(PROMPT), i), Below(16, may_end=True)) for i in range(3)]
    rig.drive(*items)
    assert [len(request.streams) for request in engine.native.started] == [1, 1, 1]
    rig.finish()


def test_cancelled_runs_are_cancelled_in_the_engine_without_waiting() -> None:
    cancelled: list[int] = []
    engine = with_script(fake(), lambda request, emit: None)
    engine.native.cancel = lambda _, sibling: cancelled.append(sibling)  # type: ignore[method-assign]
    rig = Rig(engine)
    tickets = rig.submit(*(run(rig.place(PROMPT), i, temperature=0.9) for i in range(3)))
    rig.step()
    engine_runs = rig.scheduler.engine_runs
    assert engine_runs is not None
    assert not engine_runs.is_idle
    for ticket in tickets:
        ticket.cancel()
    rig.driver.drive(tickets)
    assert sorted(cancelled) == [0, 1, 2]
    assert engine_runs.is_idle
    rig.finish()
