"""Forced text and how it is cut: vocabularies that lack bytes, and tokens that are banned."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import tokenizers

import weft
from cases import first_of
from core.tokens import builders
from shallow import TINY, shallow
from weft import Branch, Loom
from weft._core.tokens.tokenizer import Tokenizer
from weft.constraints import GBNF, Choice, Constraint, JsonSchema, Lazy, Regex
from weft.constraints.base import Compiler, Matcher, n_words
from weft.constraints.cuts import Vocabulary
from weft.errors import DeadEnd
from weft.lm.lm import LM
from weft.search import smc

TEXTS = ["hello there world", "the answer is yellow", '{"name": "naïve 🙂"}']


@cache
def without_byte(character: str) -> Compiler:
    """Return the embedded tokenizer; the entry of one byte spells another text."""
    data = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    model = data["model"]
    model["vocab"]["unused_entry"] = model["vocab"].pop(character)
    model["merges"] = [pair for pair in model["merges"] if character not in pair]
    text = Tokenizer.wrap(tokenizers.Tokenizer.from_str(json.dumps(data)), stop_ids=[0])
    return Compiler(text, text.n_vocab)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    text = Tokenizer.from_folder(TINY)
    return Compiler(text, text.n_vocab)


def mask(compiler: Compiler, matcher: Matcher, banned: frozenset[int] = frozenset()) -> set[int]:
    """Return the tokens of a matcher's mask that are not banned."""
    bits = np.empty(n_words(compiler.n_vocab), dtype=np.int32)
    matcher.fill(bits, banned)
    allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: compiler.n_vocab]
    return set(np.flatnonzero(allowed).tolist()) - banned


def brute_cuts(spellings: list[bytes], text: bytes, banned: frozenset[int]) -> int | None:
    """Return the length of the shortest cut of a text, or None: a search over all tokens."""
    lengths = {0: 0}
    for end in range(1, len(text) + 1):
        before = [
            lengths[end - len(each)]
            for token, each in enumerate(spellings)
            if each
            and token not in banned
            and text[:end].endswith(each)
            and end - len(each) in lengths
        ]
        if before:
            lengths[end] = min(before) + 1
    return lengths.get(len(text))


def test_cuts_are_the_shortest_ones_that_a_search_over_all_tokens_finds() -> None:
    random_ = random.Random(5)
    for _ in range(200):
        spellings = [
            bytes(random_.choice(b"abc") for _ in range(random_.randint(0, 3))) for _ in range(9)
        ]
        banned = frozenset(random_.sample(range(9), k=random_.randint(0, 4)))
        text = bytes(random_.choice(b"abc") for _ in range(random_.randint(1, 9)))
        vocabulary = Vocabulary(spellings)
        cuts = vocabulary.cuts(text, len(text), banned)
        tokens = cuts.from_start()
        shortest = brute_cuts(spellings, text, banned)
        assert cuts.has_cut(0) == (shortest is not None)
        assert len(tokens) == (shortest or 0)
        if tokens:
            assert b"".join(spellings[token] for token in tokens) == text
            assert banned.isdisjoint(tokens)
        written = [
            bytes((token - 9,)) if token >= 9 else spellings[token]
            for token in vocabulary.cut(text, 9)
        ]
        assert b"".join(written) == text


@pytest.mark.parametrize("character", ["ñ", "q", "z"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_is_forced_as_the_tokenizer_cuts_it_if_the_vocabulary_lacks_a_byte(
    character: str, text: str
) -> None:
    compiler = without_byte(character)
    own = compiler.text.encode(text, add_bos=False)
    assert b"".join(compiler.spellings[token] for token in own) == text.encode()
    matcher = compiler.matcher(Choice([text]))
    for token in own:
        assert matcher.forced()[:1] == [token]
        assert mask(compiler, matcher) == {token}
        matcher.accept(token)
    assert matcher.must_end


def test_text_with_a_byte_that_no_token_writes_is_forced_up_to_it() -> None:
    compiler = without_byte("q")
    matcher = compiler.matcher(Choice(["hello q there"]))
    while forced := matcher.forced():
        for token in forced:
            matcher.accept(token)
    assert mask(compiler, matcher) == set()
    assert not matcher.must_end
    assert matcher.failure is None
    other = compiler.matcher(Choice(["q", "hello"]))
    assert {compiler.spellings[token] for token in mask(compiler, other)} <= {
        b"hello"[:n] for n in range(1, 6)
    }


CONSTRAINTS: list[tuple[Constraint, bytes]] = [
    (Choice(["hello there world"]), b"hello there world"),
    (JsonSchema({"const": {"name": "the yellow owl"}}), b'{"name": "the yellow owl"}'),
    (GBNF('root ::= "hello " "there" " world"'), b"hello there world"),
    (Regex("hello there world"), b"hello there world"),
    (Lazy(Regex("hello there world"), ["hello"]), b"hello there world"),
]


@pytest.mark.parametrize("n_draws", first_of([15, 60]))
@pytest.mark.parametrize(("constraint", "text"), CONSTRAINTS)
def test_forced_text_is_cut_without_banned_tokens_if_possible(
    compiler: Compiler, constraint: Constraint, text: bytes, n_draws: int
) -> None:
    random_ = random.Random(7)
    own = compiler.ids_of(text)
    matcher, n_free = compiler.matcher(constraint), 0
    while not matcher.forced():  # a lazy constraint forces nothing before its trigger
        matcher.accept(own[n_free])
        n_free += 1
    rest = text[len(b"".join(compiler.spellings[token] for token in own[:n_free])) :]
    one_byte = [token for token, each in enumerate(compiler.spellings) if len(each) == 1]
    for _ in range(n_draws):
        banned = set(random_.sample(own, k=random_.randint(1, len(own))))
        banned |= set(random_.sample(one_byte, k=random_.choice([0, 3, 60])))
        _assert_cut(compiler, matcher.clone(), rest, frozenset(banned))


def _assert_cut(compiler: Compiler, matcher: Matcher, text: bytes, banned: frozenset[int]) -> None:
    """Masks lead through the text without banned tokens where a cut exists; forced tokens agree."""
    has_cut = brute_cuts(compiler.spellings, text, banned) is not None
    drawn: list[int] = []
    foretold: list[int] = []
    while not matcher.must_end:
        foretold = foretold or matcher.forced(banned)
        allowed = mask(compiler, matcher, banned)
        if not has_cut:
            assert not allowed
            assert not foretold
            return
        (token,) = allowed
        assert foretold[:1] == [token]
        foretold = foretold[1:]
        matcher.accept(token)
        drawn.append(token)
    assert b"".join(compiler.spellings[token] for token in drawn) == text
    assert banned.isdisjoint(drawn)


def test_ban_of_one_token_leaves_the_tokenizers_cut_before_it(compiler: Compiler) -> None:
    own = compiler.ids_of(b"hello there world")
    assert len(own) > 3
    matcher = compiler.matcher(Choice(["hello there world"]))
    assert matcher.forced(frozenset(own[-1:])) == own[:-1]


def test_other_id_of_an_equal_text_is_used_for_a_banned_one() -> None:
    text = Tokenizer.wrap(builders.duplicates(), stop_ids=[1])
    compiler = Compiler(text, text.n_vocab)
    spelled = compiler.spellings
    order = sorted(filter(spelled.__getitem__, range(len(spelled))), key=spelled.__getitem__)
    one, two = next(pair for pair in pairwise(order) if spelled[pair[0]] == spelled[pair[1]])
    vocabulary = compiler.vocabulary
    assert vocabulary.token(spelled[one]) == one
    assert vocabulary.token(spelled[one], {one}) == two
    assert vocabulary.token(spelled[one], {one, two}) is None


# With a model ------------------------------------------------------------------------------------

HELLO = Choice(["hello there world"])


@pytest.fixture(scope="module")
def lm() -> Iterator[LM]:
    with weft.load(shallow(), engine="numpy") as lm:
        yield lm


def by_branch(lm: LM, bias: dict[int, float], *, steered: bool = False) -> list[int] | None:
    at_creation = {} if steered else {"logit_bias": bias}
    with Branch.create(lm, grammar=HELLO, seed=3, temperature=1.0, **at_creation) as branch:
        branch.prefill(lm.tokenize("Say:"))
        n_prompt = len(branch.tokens)
        if steered:
            branch.steer(bias)
        try:
            while not branch.sampler.matcher.must_end:
                token = branch.produce().token
                assert branch.legal()[token]
                assert branch.legal().sum() == 1 or any(map(math.isfinite, bias.values()))
                branch.commit(token)
        except DeadEnd:
            return None
        return branch.tokens[n_prompt:]


def by_loom(lm: LM, bias: dict[int, float]) -> list[int] | None:
    loom = Loom(lm, "Say:", template=False)
    try:
        (node,) = loom.grow(
            n=1, constraint=HELLO, logit_bias=bias, seed=3, max_tokens=40, show=False
        )
    except DeadEnd:
        return None
    return list(node.tokens)


def by_search(lm: LM, bias: dict[int, float]) -> list[int] | None:
    try:
        result = smc(lm, "Say:", n=1, depth=1, constraint=HELLO, logit_bias=bias, seed=3)
    except DeadEnd:
        return None
    return None if result.best is None else list(result.best.tokens)


@pytest.mark.parametrize("n_banned", [1, 2])
def test_loom_branch_and_search_give_one_cut_without_banned_tokens(lm: LM, n_banned: int) -> None:
    own = lm.tokenize("hello there world", add_bos=False)
    for first in range(len(own)):
        bias = dict.fromkeys(own[first : first + n_banned], -math.inf)
        tokens = by_loom(lm, bias)
        assert tokens is not None
        assert set(bias).isdisjoint(tokens)
        assert lm.text.decode(tokens) == "hello there world"
        assert by_branch(lm, bias) == tokens
        assert by_branch(lm, bias, steered=True) == tokens
        assert by_search(lm, bias) == tokens


@pytest.mark.parametrize("bias", [-100.0, -1e9, -1e30])
def test_large_negative_bias_avoids_a_forced_token_in_loom_and_branch(lm: LM, bias: float) -> None:
    own = lm.tokenize("hello there world", add_bos=False)
    for token in own:
        tokens = by_loom(lm, {token: bias})
        assert tokens is not None
        assert lm.text.decode(tokens) == "hello there world"
        assert by_branch(lm, {token: bias}) == tokens
        assert by_branch(lm, {token: bias}, steered=True) == tokens
        assert token != own[0] or token not in tokens


def test_large_bias_is_followed_in_forced_text(lm: LM) -> None:
    (h,) = lm.tokenize("h", add_bos=False)
    first, *_ = lm.tokenize("hello", add_bos=False)
    assert h != first
    bias = {first: -1.0, h: 100.0}
    for tokens in (by_loom(lm, bias), by_branch(lm, bias)):
        assert tokens is not None
        assert tokens[0] == h


def test_bias_of_other_tokens_leaves_forced_text_as_it_is(lm: LM) -> None:
    own = lm.tokenize("hello there world", add_bos=False)
    (h,) = lm.tokenize("h", add_bos=False)
    assert by_loom(lm, {h: 100.0}) == by_branch(lm, {h: 100.0}) == own


def test_mask_of_forced_text_with_biased_tokens_has_the_first_tokens_of_all_cuts(lm: LM) -> None:
    """The twin: all tokens that the text starts with, from which it can be completed."""
    text, compiler = b"hello there world", lm.constraints
    own, random_ = lm.tokenize(text.decode(), add_bos=False), random.Random(1)
    parts = [token for token, each in enumerate(compiler.spellings) if each and each in text]
    for _ in range(20):
        banned = frozenset(random_.sample(parts, k=random_.choice([0, 1, 8])))
        biased = frozenset(random_.sample(own, k=random_.randint(1, len(own)))) - banned
        matcher, position = compiler.matcher(HELLO), 0
        while forced := matcher.forced(banned, biased):
            assert biased.isdisjoint(forced)
            position += len(compiler.spellings[forced[0]])
            matcher.accept(forced[0])
        bits = np.zeros(n_words(compiler.n_vocab), dtype=np.int32)
        matcher.fill(bits, banned, biased)
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: compiler.n_vocab]
        if matcher.must_end:
            continue
        rest = text[position:]
        wanted = {
            token
            for token in parts
            if token not in banned
            and rest.startswith(spelled := compiler.spellings[token])
            and brute_cuts(compiler.spellings, rest[len(spelled) :], banned) is not None
        }
        assert set(np.flatnonzero(allowed).tolist()) == wanted


def test_text_without_another_cut_is_a_dead_end_in_loom_branch_and_search(lm: LM) -> None:
    with_w = [token for token, each in enumerate(lm.text.vocab_bytes) if b"w" in each]
    bias = dict.fromkeys(with_w, -math.inf)
    assert by_loom(lm, bias) is None
    assert by_branch(lm, bias) is None
    assert by_branch(lm, bias, steered=True) is None
    assert by_search(lm, bias) is None
