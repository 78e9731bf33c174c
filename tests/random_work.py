"""Random work on a scheduler, compared with the rule of its engine."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from rig import (
    N_VOCAB,
    Rig,
    logits_after,
    run,
    score_of,
    text_after,
)
from weft._core.kv.place import Place
from weft._core.sched.work import Extend, Logits, Run, Scores, Ticket, Want
from weft.errors import Cancelled, ForwardError, KVFull

RECIPES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0},
    {},
    {"temperature": 0.7, "top_k": 4},
    {"presence_penalty": 0.5, "repetition_penalty": 1.4},
]


class Work:
    """Submits, cancels and steps at random; knows what every ticket must say.

    flaky: the engine may fail anywhere, and then so may work.
    """

    def __init__(self, rig: Rig, seed: int, *, flaky: bool = False) -> None:
        self.rig = rig
        self.flaky = flaky
        self.n_failed = 0
        self.random = random.Random(seed)
        self.places: list[tuple[Place, list[int]]] = [(rig.place([]), [])]
        self.open: list[tuple[Ticket, list[int], bool]] = []
        self.n_answered = 0
        self.n_full = 0

    def ids(self, limit: int) -> list[int]:
        # Few ids, so that paths share and part everywhere.
        return [self.random.randrange(3) for _ in range(self.random.randrange(limit))]

    def some_place(self) -> tuple[Place, list[int]]:
        place, ids = self.random.choice(self.places)
        if self.random.random() < 0.3:
            depth = self.random.randrange(len(ids) + 1)
            return place.at(depth), ids[:depth]
        return place, ids

    def wants(self, path: list[int]) -> tuple[Want, ...]:
        n, out = len(path), []
        for _ in range(self.random.randrange(3) if n > 1 else 0):
            at = self.random.randrange(1, n + 1)
            first = self.random.randrange(1, n)
            last = self.random.randrange(first, n) + 1
            scores = Scores(first, last, 2)
            if at == last:
                scores = Scores(first, n + 1, 2, final=path[0])
            out.append(self.random.choice([Logits(at), scores]))
        return tuple(out)

    def extend(self) -> tuple[Extend, list[int]]:
        place, ids = self.some_place()
        tokens = self.ids(9)[: self.rig.n_ctx - len(ids)]
        path = ids + tokens
        return Extend(place, tokens, self.wants(path)), path

    def op_extend(self) -> None:
        item, path = self.extend()
        self.note(self.rig.submit(item), [path])

    def op_atomic(self) -> None:
        pairs = [self.extend() for _ in range(self.random.randrange(4))]
        tickets = self.rig.submit(*(item for item, _ in pairs), atomic=True)
        self.note(tickets, [path for _, path in pairs], atomic=len(pairs) > 1)

    def op_run(self) -> None:
        place, ids = self.some_place()
        options = self.random.choice(RECIPES)
        tokens = self.ids(4)[: self.rig.n_ctx - len(ids)] or ([1] if not ids else [])
        ids = ids + tokens
        item = run(
            self.rig.place(tokens, place),
            self.random.randrange(3),
            stop_ids=frozenset(self.random.sample(range(N_VOCAB), self.random.randrange(3))),
            max_tokens=self.random.randrange(1, 12),
            **options,
        )
        self.note(self.rig.submit(item), [ids])

    def op_cancel(self) -> None:
        if self.open:
            self.random.choice(self.open)[0].cancel()

    def op_step(self) -> None:
        self.rig.step(self.random.randrange(1, 4))

    def note(self, tickets: list[Ticket], paths: list[list[int]], atomic: bool = False) -> None:
        for ticket, path in zip(tickets, paths, strict=True):
            self.open.append((ticket, path, atomic))

    def turn(self) -> None:
        ops = [self.op_extend, self.op_run, self.op_run, self.op_step, self.op_step, self.op_step]
        rare = [self.op_atomic, self.op_cancel]
        self.random.choice(ops + (rare if self.random.random() < 0.4 else []))()
        if self.rig.scheduler.in_flight is None:
            self.rig.tree.check()
        self.look()

    def look(self) -> None:
        """Compare what is answered; forget most of it, so that its places are let go."""
        for entry in [entry for entry in self.open if entry[0].done]:
            self.open.remove(entry)
            self.check(*entry)
            self.n_answered += 1
        while len(self.places) > 8:
            self.places.pop(self.random.randrange(1, len(self.places)))

    def check(self, ticket: Ticket, path: list[int], atomic: bool) -> None:
        item = ticket.item
        if self.flaky and isinstance(ticket.error, ForwardError):
            self.n_failed += 1
        elif isinstance(ticket.error, KVFull):
            self.n_full += 1
            capacity = self.rig.tree.budget.capacity
            assert capacity is not None
            more = item.max_tokens if isinstance(item, Run) else 0
            longest = len(path) + more
            # What the engine could not free is short, too.
            fits = longest <= capacity and not self.flaky
            assert atomic or not fits, "KVFull for a path that fits alone"
        elif isinstance(ticket.error, Cancelled):
            assert atomic or ticket.cancelled
        elif isinstance(item, Run):
            self.check_run(ticket, item, path)
        else:
            for want, answer in zip(item.wants, ticket.result(), strict=True):
                check_answer(want, answer, path)
            self.places.append((self.rig.place(item.tokens, item.place), path))

    def check_run(self, ticket: Ticket, item: Run, ids: list[int]) -> None:
        result = ticket.result()
        tokens, reason = text_after(ids, item, self.rig.n_ctx)
        if result.finish_reason == "cancelled":
            assert ticket.cancelled
            assert tokens[: len(result.tokens)] == result.tokens
        else:
            assert (result.tokens, result.finish_reason) == (tokens, reason)
        path = [*ids, *result.tokens]
        assert result.end.ids() == path
        self.places.append((result.end, path))


def check_answer(want: Want, answer: Any, path: list[int]) -> None:
    if isinstance(want, Logits):
        np.testing.assert_array_equal(answer, logits_after(path[: want.depth]))
    else:
        known = path if want.final is None else [*path, want.final]
        expected_score = score_of(known, want.first, want.last, want.top)
        np.testing.assert_array_equal(answer.logprobs, expected_score.logprobs)
        np.testing.assert_array_equal(answer.top_ids, expected_score.top_ids)
