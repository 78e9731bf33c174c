"""The text of a choice, however its tokens and the end of its run arrive."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import weft
from cases import first_of
from shallow import shallow
from weft._core.sampling.params import SamplingParams
from weft.lm.lm import LM
from weft.loom.stop_strings import StopStrings
from weft.service.server.openai.runs import ChoiceRun

STOPS = ["th", "na", "e w", "llo", "🦊", "\n"]
TEXTS = ["hello there world", "the naïve 🦊 wept: na", "over the hill", "a\nb"]


@pytest.fixture(scope="module")
def lm() -> Iterator[LM]:
    with weft.load(shallow(), engine="numpy") as lm:
        yield lm


def choice(lm: LM, stops: list[str]) -> ChoiceRun:
    node = SimpleNamespace(params=SamplingParams(stop=stops), stop_string=None, finish_reason=None)
    pending: Any = SimpleNamespace(child=node, ticket=None)
    return ChoiceRun(lm, pending, prompt=0, index=0, mute=frozenset())


def run_of(lm: LM, text: str, stops: list[str]) -> tuple[list[int], str | None]:
    """Return the tokens that a run draws of a text, up to a stop string; and that string."""
    watch, tokens = StopStrings(tuple(stops)), []
    for token in lm.tokenize(text, add_bos=False):
        tokens.append(token)
        if (stop := watch.push(lm.text.token_bytes(token))) is not None:
            return tokens, stop
    return tokens, None


def end(run: ChoiceRun, stop: str | None) -> None:
    run.node.stop_string = stop
    run.node.finish_reason = "length" if stop is None else "stop"
    run.end()


@pytest.mark.parametrize("n_draws", first_of([10, 200]))
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_never_contain_a_stop_string(lm: LM, text: str, n_draws: int) -> None:
    random_ = random.Random(text)
    for _ in range(n_draws):
        stops = random_.sample(STOPS, k=2)
        tokens, stop = run_of(lm, text, stops)
        complete = choice(lm, stops)
        complete.grow(tokens, [0.0] * len(tokens))
        end(complete, stop)
        streamed, sent, sent_tokens = choice(lm, stops), "", list[int]()
        while tokens:
            n = random_.randint(1, len(tokens))
            streamed.grow(tokens[:n], [0.0] * n)
            tokens = tokens[n:]
            sent += streamed.piece()
            sent_tokens += streamed.new_tokens()[1]
            assert not any(each in sent for each in stops)
        assert stop is None or sent == complete.text  # all of it, before the run's end
        end(streamed, stop)
        sent += streamed.piece()
        sent_tokens += streamed.new_tokens()[1]
        assert sent == streamed.text == complete.text
        assert sent_tokens == complete.new_tokens()[1]
        assert streamed.finish_reason == complete.finish_reason


def test_choice_with_a_stop_string_ends_if_its_run_is_lost(lm: LM) -> None:
    run = choice(lm, ["there"])
    tokens = lm.tokenize("hello there", add_bos=False)
    run.grow(tokens, [0.0] * len(tokens))
    assert run.piece() == "hello "
    run.end()
    assert (run.text, run.finish_reason) == ("hello ", "stop")
