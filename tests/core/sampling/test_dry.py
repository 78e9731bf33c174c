from __future__ import annotations

import numpy as np
import pytest

import weft
from core.sampling import naive
from shallow import shallow
from weft._core.sampling.dry import DryHistory, SequenceBreakers
from weft._core.sampling.params import DRY_BREAKERS, SamplingParams
from weft._core.sampling.sampler import BatchSampler, Sampler
from weft.errors import ConfigError

VOCABULARY = [b"a", b"b", b"c", b"ab", b"b\n", b"x", b"\n", b"Us", b"er", b":", b"r:", b"y"]


def encode(text: str) -> list[int]:
    """Return the tokens of a text, the longest that fits first."""
    ids, rest = list[int](), text.encode()
    while rest:
        best = max((t for t in VOCABULARY if rest.startswith(t)), key=len)
        ids.append(VOCABULARY.index(best))
        rest = rest[len(best) :]
    return ids


def penalties(history: DryHistory) -> dict[int, float]:
    ids, values = history.penalties()
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def params(**options: object) -> SamplingParams:
    return SamplingParams(**{"dry_multiplier": 0.8, **options})


def test_repeated_sequence_penalises_its_next_token_by_its_length() -> None:
    """The text a b c x a b c: x continues three tokens, and no other token continues any."""
    history = DryHistory(params())
    history.add([0, 1, 2, 5, 0, 1, 2])
    assert penalties(history) == pytest.approx({5: 0.8 * 1.75})
    history.add([5])
    assert penalties(history) == pytest.approx({0: 0.8 * 1.75**2})


@pytest.mark.parametrize("allowed_length", [1, 2, 5])
@pytest.mark.parametrize("last_n", [None, 1, 9, 40])
@pytest.mark.parametrize("base", [1.0, 1.75, 4.0])
def test_penalties_of_random_texts_equal_the_naive_twin(
    allowed_length: int, last_n: int | None, base: float
) -> None:
    """Texts of few tokens repeat often; the last breakers are one, two and three tokens long."""
    options = params(dry_allowed_length=allowed_length, dry_penalty_last_n=last_n, dry_base=base)
    breakers = [[6], [7, 8], [9, 3, 9]]
    tails = {6: ((),), 7: ((8,),), 9: ((3, 9),)}
    is_head = np.zeros(11, dtype=bool)
    is_head[list(tails)] = True
    vocabulary = SequenceBreakers(tails, is_head, np.array([6]))
    random = np.random.default_rng(allowed_length)
    for n_kinds in (2, 4, 10):
        history = DryHistory(options, vocabulary)
        text = random.integers(n_kinds, size=30).tolist()
        history.add(text)
        for token in random.integers(n_kinds, size=40).tolist():
            expected = naive.dry(
                text,
                multiplier=0.8,
                base=base,
                allowed_length=allowed_length,
                last_n=last_n,
                breakers=breakers,
            )
            assert penalties(history) == pytest.approx(expected)
            copy = history.copy()
            copy.add([0, 0, 0])
            history.add([token])
            text.append(token)


def test_long_repetitions_have_a_finite_penalty() -> None:
    """1,000 equal tokens: the penalty stops growing before float32 overflows."""
    history = DryHistory(params(dry_multiplier=100.0))
    history.add([3] * 1000)
    penalty = penalties(history)[3]
    assert 1e20 < penalty <= 1e30
    chain = Sampler(params(dry_multiplier=100.0, temperature=0), 0)
    chain.add_prompt([3] * 1000)
    logits = np.array([[0.0, 1.0, 2.0, 50.0]], dtype=np.float32)
    drawn = BatchSampler([chain]).draw(logits, np.array([0]), np.array([0], dtype=np.uint64))
    assert drawn.ids.tolist() == [2]


def test_breakers_are_tokens_that_contain_or_begin_their_text() -> None:
    """A newline is in two tokens. "User:" begins in "Us", and no token contains it."""
    breakers = SequenceBreakers.from_texts(["\n", "User:"], VOCABULARY, encode)
    assert breakers.single.tolist() == [4, 6]
    assert breakers.tails == {4: ((),), 6: ((),), 7: (tuple(encode("er:")),)}
    assert breakers.n_after(np.array([0, 4, 1, 2], dtype=np.int32)) == 2
    assert breakers.n_after(np.array([7, *encode("er:"), 2], dtype=np.int32)) == 1
    assert breakers.n_after(np.array([7, 8, 2, 10, 11], dtype=np.int32)) == 5


def test_dry_of_a_loom_ends_the_repetition_of_a_greedy_text() -> None:
    """The shallow model repeats itself; with DRY no four tokens occur twice between breakers."""
    with weft.load(str(shallow())) as lm:
        prompt = "one two three. one two three. one two three."
        options = {"temperature": 0, "max_tokens": 40}
        with weft.Loom(lm, prompt) as loom:
            (plain,) = loom.grow(**options)
            (dry,) = loom.grow(dry_multiplier=50.0, dry_sequence_breakers=(), **options)
            repeated = [_n_repeated(lm.text.encode(prompt), node.tokens) for node in (plain, dry)]
            assert repeated[0] > repeated[1] == 0
            assert dry.params.dry_multiplier == 50.0


def _n_repeated(prompt: list[int], generated: list[int], n: int = 4) -> int:
    """Return how many generated tokens end a sequence of n tokens that occurred before."""
    text = [*prompt, *generated]
    grams, count = set[tuple[int, ...]](), 0
    for end in range(n, len(text) + 1):
        gram = tuple(text[end - n : end])
        count += end > len(prompt) and gram in grams
        grams.add(gram)
    return count


def test_dry_of_a_branch_counts_accepted_tokens_and_forks_with_them() -> None:
    with weft.load(str(shallow())) as lm:
        options = {"dry_multiplier": 80.0, "dry_allowed_length": 1, "temperature": 0}
        branch = weft.Branch.create(lm, **options)
        branch.prefill(lm.text.encode("once upon a time"))
        tokens = list[int]()
        for _ in range(8):
            tokens.append(branch.produce().token)
            branch.commit(tokens[-1])
        fork = branch.fork()
        text = lm.text
        breakers = SequenceBreakers.from_texts(DRY_BREAKERS, text.vocab_bytes, text.continuation)
        expected = naive.dry(
            tokens,
            multiplier=80.0,
            allowed_length=1,
            breakers=[[token] for token in breakers.single.tolist()],
        )
        logits = branch.logits.astype(float)
        for token, penalty in expected.items():
            logits[token] -= penalty
        assert fork.produce().token == branch.produce().token == int(logits.argmax())


def test_dry_without_effect_draws_the_same_tokens() -> None:
    with weft.load(str(shallow())) as lm, weft.Loom(lm, "a b c") as loom:
        plain = loom.grow(n=2, max_tokens=6, seed=1)
        dry = loom.grow(n=2, max_tokens=6, seed=1, dry_multiplier=1.0, dry_allowed_length=50)
        assert [node.tokens for node in plain] == [node.tokens for node in dry]


@pytest.mark.parametrize(
    ("name", "value"),
    [("dry_multiplier", -1), ("dry_base", 0.5), ("dry_allowed_length", 0)]
    + [("dry_penalty_last_n", 0), ("dry_sequence_breakers", [""]), ("dry_sequence_breakers", 3)],
)
def test_invalid_dry_parameter_raises_and_names_it(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})
