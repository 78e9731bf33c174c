"""`TokenLimits`: masks and steps agree with a plain reading of the limits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import weft
from shallow import shallow
from weft.constraints import Regex, from_dict
from weft.constraints.base import n_words
from weft.constraints.token_limits import TokenLimits
from weft.errors import ConfigError

pytestmark = pytest.mark.fluent


def allowed_by(limits: TokenLimits, ends: frozenset[int], before: list[int], token: int) -> bool:
    """Return True if a token may follow others, computed from the limits only."""
    text = [*before, token]
    if limits.allowed is not None and token not in limits.allowed:
        return False
    if any(text[-len(word) :] == list(word) for word in limits.bad_words):
        return False
    return len(before) >= limits.min_tokens or token not in ends | limits.stop_ids


def test_masks_follow_the_limits() -> None:
    random_ = random.Random(1)
    lm = weft.load(shallow())
    n_vocab, ends = lm.info.n_vocab, lm.constraints.stop_ids
    few = [*random_.sample(range(n_vocab), 6), min(ends)]
    for _ in range(60):
        words = tuple(tuple(random_.choices(few, k=random_.randint(1, 3))) for _ in range(3))
        limits = TokenLimits(
            random_.choice([None, frozenset(few)]), words, random_.randint(0, 3), frozenset(few[:1])
        )
        matcher, before = lm.constraints.matcher(limits), list[int]()
        for _ in range(6):
            bits = np.zeros(n_words(n_vocab), dtype=np.int32)
            matcher.clone().fill(bits)
            unpacked = np.unpackbits(bits.view(np.uint8), bitorder="little")[:n_vocab]
            wanted = [allowed_by(limits, ends, before, token) for token in range(n_vocab)]
            assert unpacked.tolist() == wanted
            assert [matcher.is_allowed(token) for token in few] == [wanted[t] for t in few]
            going_on = [token for token in few if wanted[token] and token not in ends]
            if not going_on:
                break
            before.append(random_.choice(going_on))
            matcher.accept(before[-1])


def test_limits_apply_with_another_constraint_and_are_saved() -> None:
    lm = weft.load(shallow())
    inner = Regex("[ab]{4}")
    word = tuple(lm.text.continuation("a"))
    limits = TokenLimits(bad_words=(word,), stop_ids=frozenset({5}), inner=inner)
    node = weft.Loom(lm, "Once").grow(constraint=limits, seed=3)[0]
    assert "a" not in node.text or inner.parse(node.text)
    assert from_dict(limits.to_dict()) == limits
    assert from_dict(TokenLimits(frozenset({1}), min_tokens=2).to_dict()) == TokenLimits(
        frozenset({1}), min_tokens=2
    )
    with pytest.raises(ConfigError, match="allowed are 0 to"):
        lm.constraints.matcher(TokenLimits(stop_ids=frozenset({lm.info.n_vocab})))


def test_node_that_a_stop_token_ended_can_be_continued() -> None:
    lm = weft.load(shallow())
    loom = weft.Loom(lm, "Once")
    tokens = loom.grow(temperature=0, max_tokens=3)[0].tokens
    limits = TokenLimits(stop_ids=frozenset({tokens[2]}))
    node = loom.grow(temperature=0, constraint=limits)[0]
    assert node.tokens == tokens[: tokens.index(tokens[2])]
    assert (node.finish_reason, node.terminal) == ("stop", False)
    after = TokenLimits(stop_ids=limits.stop_ids, min_tokens=1)
    assert node.grow(constraint=after, max_tokens=2)[0].tokens


def test_bad_words_given_as_texts_are_absent_from_a_loom() -> None:
    lm = weft.load("tiny")
    loom = weft.Loom(lm, "Once upon a time")
    (plain,) = loom.grow(temperature=0, max_tokens=12)
    word = plain.text.split()[2]
    limits = TokenLimits(bad_words=[word], min_tokens=12)
    (node,) = loom.grow(temperature=0, max_tokens=12, constraint=limits)
    assert word in plain.text
    assert word not in node.text.split()
    assert len(node.tokens) == 12
    assert from_dict(limits.to_dict()) == limits == node.params.constraint


def test_a_branch_stops_at_stop_ids_after_min_tokens() -> None:
    """The greedy text repeats the stop token; the branch may not draw it before 4 tokens."""
    lm = weft.load("tiny")
    with weft.Branch.create(lm, temperature=0) as plain:
        plain.prefill(lm.text.encode("Once upon a time"))
        stop = plain.produce().token
    limits = TokenLimits(stop_ids=[stop], min_tokens=4, allowed=[stop, 300])
    with weft.Branch.create(lm, temperature=0, constraint=limits) as branch:
        branch.prefill(lm.text.encode("Once upon a time"))
        tokens = [piece.token for piece in branch]
        assert tokens == [300] * 4
        assert branch.produce().is_stop


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"bad_words": ["ok", " "]}, "bad_words is"),
        ({"stop_ids": ["a"]}, "a token id in stop_ids is 'a'"),
        ({"inner": 3}, "constraint is 3"),
    ],
)
def test_invalid_limits_raise_and_name_the_field(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenLimits(**wrong)


@pytest.mark.parametrize(
    "name", ["min_tokens", "bad_words", "allowed_token_ids", "stop_token_ids", "min_new_tokens"]
)
def test_keyword_of_another_library_names_token_limits(name: str) -> None:
    with weft.load(shallow()) as lm, weft.Loom(lm, "a") as loom:
        with pytest.raises(ConfigError, match="TokenLimits"):
            loom.grow(**{name: 1})
        with pytest.raises(ConfigError, match="TokenLimits"):
            weft.Branch.create(lm, **{name: 1})
