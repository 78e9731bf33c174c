"""Laws of `LM.score`, `LM.choose` and `LM.score_many`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import weft
from core.tokens.builders import byte_level, metaspace_bytes, sentencepiece
from shallow import shallow
from weft import Loom
from weft._core.tokens.tokenizer import Tokenizer
from weft.errors import ConfigError, ContextOverflow

PROMPT = "Use 4 9 10 13 to make 24.\n13 - 9 ="
ENDINGS = [" 4 (left: 4 4 10)", " 5", " 4", " 22 (left: 22 4 10)"]


@pytest.fixture(scope="module")
def shared() -> Iterator[weft.LM]:
    with weft.load(shallow(), engine="numpy") as lm:
        yield lm


@pytest.fixture
def lm(shared: weft.LM) -> Iterator[weft.LM]:
    lm = weft.LM(shared.engine, shared.text)
    yield lm
    lm.driver.close()


def with_tokenizer(shared: weft.LM, backend: Any, **limits: Any) -> weft.LM:
    return weft.LM(shared.engine, Tokenizer(backend), **limits)


def forward_logprobs(lm: weft.LM, ids: list[int], n_last: int) -> list[float]:
    """Return the logprobs of the last tokens of a path, one `next` per token."""
    logprobs = []
    for end in range(len(ids) - n_last, len(ids)):
        row = {entry.id: entry.logprob for entry in Loom(lm, ids[:end]).next(lm.info.n_vocab)}
        logprobs.append(row[ids[end]])
    return logprobs


def encode_pair(encode: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The rule of lm-evaluation-harness's `_encode_pair` for causal models."""
    n_spaces = len(context) - len(context.rstrip())
    if n_spaces > 0:
        continuation = context[-n_spaces:] + continuation
        context = context[:-n_spaces]
    before = encode(context)
    return before, encode(context + continuation)[len(before) :]


# Scores ---------------------------------------------------------------------------------------


def test_scores_equal_one_forward_per_token(lm: weft.LM) -> None:
    scores = lm.score(PROMPT, ENDINGS)
    prompt = lm.tokenize(PROMPT)
    for ending, score in zip(ENDINGS, scores, strict=True):
        ids = lm.tokenize(PROMPT + ending)
        assert list(score.tokens) == ids[len(prompt) :]
        assert "".join(score.texts) == ending
        expected = forward_logprobs(lm, ids, score.n_tokens)
        assert score.logprobs == pytest.approx(expected, abs=1e-4)
        assert score.total == score.score == pytest.approx(math.fsum(expected), abs=1e-3)


def test_prompt_of_four_candidates_is_computed_once(lm: weft.LM) -> None:
    before = lm.stats()
    scores = lm.score(PROMPT, ENDINGS)
    after = lm.stats()
    n_prompt = len(lm.tokenize(PROMPT))
    distinct = {score.tokens[:end] for score in scores for end in range(1, score.n_tokens)}
    assert after.prefilled - before.prefilled == n_prompt + len(distinct)
    assert after.steps - before.steps <= 3


def test_greedy_continuation_is_greedy_and_another_is_not(lm: weft.LM) -> None:
    greedy = Loom(lm, PROMPT, template=False).grow(temperature=0, max_tokens=4)[0].tokens
    other = [*greedy[:-1], (greedy[-1] + 1) % lm.info.n_vocab]
    first, second = lm.score(PROMPT, [greedy, other])
    assert first.is_greedy is True
    assert second.is_greedy is False
    assert first.ranks == (0, 0, 0, 0)


def test_normalized_scores_divide_by_tokens_and_bytes(lm: weft.LM) -> None:
    for normalize, size in (("tokens", "n_tokens"), ("bytes", "n_bytes")):
        for text in ("é €", " 4"):
            (score,) = lm.score(PROMPT, [text], normalize=normalize)
            assert score.n_bytes == len(text.encode())
            assert score.score == score.total / getattr(score, size)


def test_end_adds_the_end_token_of_texts_and_of_chats(lm: weft.LM) -> None:
    (raw,) = lm.score(PROMPT, [" 4"], end=True)
    assert raw.tokens[-1] == lm.eog_token
    assert raw.n_bytes == 2
    chat = [{"role": "user", "content": "What is 13 - 9?"}]
    (answer,) = lm.score(chat, ["4"], end=True)
    assert answer.tokens[-1] == lm.turn_separator[0]
    path = [*lm.format_chat(chat).ids, *answer.tokens]
    assert answer.logprobs == pytest.approx(forward_logprobs(lm, path, 2), abs=1e-4)


def test_text_messages_and_rendered_chat_give_equal_scores(lm: weft.LM) -> None:
    messages = [{"role": "user", "content": "What is 13 - 9?"}]
    prompts: list[Any] = ["What is 13 - 9?", messages, lm.format_chat(messages)]
    prompts.append(lm.format_chat(messages).ids)
    totals = [
        [score.total for score in lm.score(one, ["4", "five"], template=True)] for one in prompts
    ]
    assert all(each == pytest.approx(totals[0], abs=1e-5) for each in totals)


def test_texts_and_token_ids_mix(lm: weft.LM) -> None:
    ids = lm.text.continuation(" 4")
    text, tokens = lm.score(PROMPT, [" 4", ids])
    assert text.tokens == tokens.tokens
    assert text.total == pytest.approx(tokens.total, abs=1e-5)


def test_measure_of_a_list_equals_score(lm: weft.LM) -> None:
    with Loom(lm, PROMPT, template=False) as loom:
        measured = loom.measure(ENDINGS, normalize="tokens", end=True)
        (one,) = asyncio.run(loom.ameasure([ENDINGS[0]], normalize="tokens", end=True))
        with pytest.raises(ConfigError, match="'none', 'tokens', 'bytes'"):
            loom.measure(ENDINGS, normalize="chars")  # type: ignore[call-overload]
    scored = lm.score(PROMPT, ENDINGS, normalize="tokens", end=True)
    assert [each.tokens for each in measured] == [each.tokens for each in scored]
    assert [each.score for each in measured] == pytest.approx([each.score for each in scored])
    assert one.score == pytest.approx(scored[0].score, abs=1e-5)


def test_awaited_scores_equal_those_of_plain_calls(lm: weft.LM) -> None:
    async def ask() -> Any:
        return await asyncio.gather(
            lm.ascore(PROMPT, ENDINGS),
            lm.achoose(PROMPT, ENDINGS),
        )

    scores, chosen = asyncio.run(ask())
    plain = lm.score(PROMPT, ENDINGS)
    assert [one.total for one in scores] == pytest.approx([one.total for one in plain], abs=1e-4)
    assert chosen.index == lm.choose(PROMPT, ENDINGS).index


# The boundary ---------------------------------------------------------------------------------

BOUNDARIES = [
    ("hello world,", " hello"),
    ("hello world, ", "hello"),
    ("hello world,  ", "there"),
    ("hello wor", "ld there"),  # tokenized together, "world" is other tokens
    ("hello\n", "hello"),
    ("the quick", " brown fox"),
    ("日本", " 日本"),
    ("x", "\n"),
]


@pytest.mark.parametrize("backend", [byte_level, sentencepiece, metaspace_bytes])
@pytest.mark.parametrize(("prompt", "candidate"), BOUNDARIES)
def test_boundary_is_the_one_of_the_evaluation_harness(
    backend: Any, prompt: str, candidate: str, shared: weft.LM
) -> None:
    tokenizer = backend()
    lm = with_tokenizer(shared, backend())
    before, expected = encode_pair(lambda text: tokenizer.encode(text).ids, prompt, candidate)
    (score,) = lm.score(prompt, [candidate])
    assert list(score.tokens) == expected
    path = [*before, *expected]
    assert score.logprobs == pytest.approx(forward_logprobs(lm, path, len(expected)), abs=1e-4)
    lm.driver.close()


def test_bos_of_the_tokenizer_precedes_the_prompt_once(shared: weft.LM) -> None:
    lm = with_tokenizer(shared, byte_level(bos=True))
    prompt = lm.tokenize("hello")
    assert prompt[0] == 0
    (score,) = lm.score("hello", [" world"])
    expected = forward_logprobs(lm, [*prompt, *score.tokens], score.n_tokens)
    assert score.logprobs == pytest.approx(expected, abs=1e-4)
    lm.driver.close()


def test_prompt_of_spaces_only_is_a_prompt(shared: weft.LM) -> None:
    lm = with_tokenizer(shared, byte_level())
    (score,) = lm.score("  ", ["hello"])
    assert "".join(score.texts) == "hello"
    lm.driver.close()


# Choices --------------------------------------------------------------------------------------


def sglang_greedy(rows: list[list[float]]) -> int:
    """The rule of SGLang's greedy_token_selection: drop all but the best, token by token."""
    longest = max(map(len, rows))
    rows = [[*row, *[sum(row) / len(row)] * (longest - len(row))] for row in rows]
    left = list(range(len(rows)))
    for at in range(longest):
        best = max(rows[i][at] for i in left)
        left = [i for i in left if rows[i][at] == best]
    return left[0]


def test_methods_choose_as_those_of_sglang(lm: weft.LM) -> None:
    scores = lm.score(PROMPT, ENDINGS)
    rows = [list(score.logprobs) for score in scores]
    without = []
    for score in scores:  # the first token has no logprob, which counts as 0
        rest = list(score.tokens[1:])
        measured = Loom(lm, list(score.tokens[:1])).measure(rest).logprobs if rest else ()
        without.append([0.0, *measured])
    values: dict[str, list[float]] = {
        "likelihood": [sum(row) for row in rows],
        "token_length_normalized": [float(np.mean(row)) for row in rows],
        "unconditional_likelihood_normalized": [
            float(np.mean(np.array(row) - np.array(other)))
            for row, other in zip(rows, without, strict=True)
        ],
    }
    for method, expected in values.items():
        chosen = lm.choose(PROMPT, ENDINGS, method=method)  # type: ignore[arg-type]
        assert chosen.values == pytest.approx(expected, abs=1e-4)
        assert chosen.index == int(np.argmax(expected))
        assert chosen.text == str(chosen) == ENDINGS[chosen.index]
        assert [one.tokens for one in chosen.scores] == [one.tokens for one in scores]
    greedy = lm.choose(PROMPT, ENDINGS, method="greedy_token_selection")
    assert greedy.index == sglang_greedy(rows)


def test_choice_has_probabilities_and_a_repr_of_one_line(lm: weft.LM) -> None:
    chosen = lm.choose(PROMPT, [" 4", " 5"])
    weights = np.exp([score.total for score in chosen.scores])
    assert chosen.probabilities == pytest.approx(weights / weights.sum())
    assert repr(chosen) == (
        f"Selection({chosen.text!r}, {chosen.index} of 2, by token_length_normalized)"
    )


def test_choice_of_token_ids_has_their_text(lm: weft.LM) -> None:
    ids = [lm.text.continuation(text) for text in (" 4", " 5")]
    chosen = lm.choose(PROMPT, ids)
    assert chosen.text == (" 4", " 5")[chosen.index]


def test_equal_candidates_choose_the_first(lm: weft.LM) -> None:
    assert lm.choose(PROMPT, [" 4", " 4"]).index == 0


# Many prompts ---------------------------------------------------------------------------------


def few_shot_prompts(n: int) -> list[tuple[str, list[str]]]:
    shots = ["13 - 9 = 4 (left: 4 4 10)\n" * 4, "4 + 9 = 13 (left: 13 10 13)\n" * 4]
    return [(f"{shots[i % 2]}{i} + {i} =", [f" {2 * i}", f" {i}", " 4"]) for i in range(n)]


def test_many_prompts_score_as_one_each_in_prefix_order(lm: weft.LM) -> None:
    prompts = few_shot_prompts(8)
    results = list(lm.score_many(prompts))
    order = [index for index, _ in results]
    assert sorted(order) == list(range(8))
    assert sorted(order[:4]) in ([0, 2, 4, 6], [1, 3, 5, 7])  # one prefix after the other
    for index, scores in results:
        alone = lm.score(*prompts[index])
        assert [one.tokens for one in scores] == [one.tokens for one in alone]
        expected = [one.total for one in alone]
        assert [one.total for one in scores] == pytest.approx(expected, abs=1e-4)


def test_small_kv_budget_computes_shared_prefixes_once(shared: weft.LM) -> None:
    prompts = few_shot_prompts(16)
    paths = {tuple(shared.tokenize(text)) for text, _ in prompts}
    longest = max(map(len, paths))
    n_slots = longest + 64
    lm = weft.LM(shared.engine, shared.text, kv_bytes=n_slots * shared.info.kv_bytes_per_token)
    peak = []
    for _ in lm.score_many(prompts):
        peak.append(lm.tree.budget.used)
    assert max(peak) <= n_slots
    distinct = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    n_candidates = sum(len(scores) * 3 for scores in [*prompts])
    assert lm.stats().prefilled <= len(distinct) + n_candidates * 2
    lm.driver.close()


def test_first_results_arrive_before_the_last_prompt_runs(shared: weft.LM) -> None:
    prompts = few_shot_prompts(40)
    lm = weft.LM(shared.engine, shared.text, n_batch=16)
    stream = lm.score_many(prompts)
    next(stream)
    n_early = lm.stats().prefilled
    for _ in stream:
        pass
    assert n_early < lm.stats().prefilled / 2
    lm.driver.close()


def test_awaited_many_scores_equal_those_of_the_plain_call(lm: weft.LM) -> None:
    prompts = few_shot_prompts(6)

    async def collect() -> dict[int, list[float]]:
        stream = lm.ascore_many(prompts)
        return {index: [one.total for one in scores] async for index, scores in stream}

    awaited = asyncio.run(collect())
    for index, scores in lm.score_many(prompts):
        assert awaited[index] == pytest.approx([one.total for one in scores], abs=1e-4)


def test_no_prompts_give_no_results(lm: weft.LM) -> None:
    assert list(lm.score_many([])) == []


# KV and cancellation --------------------------------------------------------------------------


def test_all_kv_is_evictable_after_a_call(lm: weft.LM) -> None:
    lm.score(PROMPT, ENDINGS)
    lm.choose(PROMPT, ENDINGS, method="unconditional_likelihood_normalized")
    list(lm.score_many(few_shot_prompts(5)))
    assert lm.tree.budget.resident > 0
    assert lm.tree.budget.unevictable == 0
    lm.clear_cache()
    assert lm.tree.budget.used == 0
    lm.tree.check()


def test_closed_stream_leaves_nothing_running(shared: weft.LM) -> None:
    lm = weft.LM(shared.engine, shared.text, n_batch=16)
    stream = lm.score_many(few_shot_prompts(20))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    n_before = lm.stats().prefilled
    lm.score("1 + 1 =", [" 2"])
    assert lm.stats().prefilled - n_before < 16
    assert lm.scheduler.is_idle
    assert lm.tree.budget.unevictable == 0
    lm.driver.close()


def test_cancelled_await_leaves_nothing_running(shared: weft.LM) -> None:
    lm = weft.LM(shared.engine, shared.text, n_batch=16)

    async def cancel_one() -> None:
        task = asyncio.create_task(lm.ascore(PROMPT * 20, ENDINGS))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = lm.ascore_many(few_shot_prompts(20))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await lm.ascore("1 + 1 =", [" 2"])

    asyncio.run(cancel_one())
    assert lm.scheduler.is_idle
    assert lm.tree.budget.unevictable == 0
    lm.driver.close()


# Wrong arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ([], "candidates is empty"),
        ("yes", "candidates is a str"),
        ([" 4", ""], "candidate 1 is empty"),
        ([[]], "candidate 0 is empty"),
        ([b"4"], "candidate 0 is b'4'"),
        ([4], "candidate 0 is 4"),
        ([[10**9]], "token id"),
        ([["a"]], "token ids must be integers"),
    ],
)
def test_wrong_candidates_raise_with_their_number(
    lm: weft.LM, candidates: Any, message: str
) -> None:
    for call in (lm.score, lm.choose):
        with pytest.raises(ConfigError, match=message):
            call(PROMPT, candidates)
    with pytest.raises(ConfigError, match=message):
        lm.score_many([(PROMPT, candidates)])


def test_candidate_that_merges_into_the_prompt_raises(shared: weft.LM) -> None:
    lm = with_tokenizer(shared, byte_level())
    with pytest.raises(ConfigError, match="candidate 0, 'ld', adds no token"):
        lm.score("hello wor", ["ld"])
    lm.driver.close()


def test_unknown_normalize_and_method_list_what_is_allowed(lm: weft.LM) -> None:
    with pytest.raises(ConfigError, match="normalize is 'chars'; allowed are 'none', 'tokens'"):
        lm.score(PROMPT, ENDINGS, normalize="chars")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="method is 'best'; allowed are 'token_length"):
        lm.choose(PROMPT, ENDINGS, method="best")  # type: ignore[arg-type]


def test_too_long_prompt_or_candidate_raises_before_anything_runs(shared: weft.LM) -> None:
    lm = weft.LM(shared.engine, shared.text, n_ctx=32)
    for prompt, candidate in (("4 " * 40, " 4"), ("4 4", " 4" * 40)):
        with pytest.raises(ContextOverflow):
            lm.score(prompt, [candidate])
        with pytest.raises(ContextOverflow):
            lm.score_many([(prompt, [candidate])])
    assert lm.stats().prefilled == 0
    lm.driver.close()


@pytest.mark.parametrize("wrong", ["text", ("only a prompt",), 3])
def test_many_takes_pairs(lm: weft.LM, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="prompt 0 is"):
        lm.score_many([wrong])


def test_empty_prompt_raises(lm: weft.LM) -> None:
    for prompt in ("", []):
        with pytest.raises(ConfigError, match="prompt is empty"):
            lm.score(prompt, ENDINGS)
