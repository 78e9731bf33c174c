"""The naive twin of the chain: one row at a time, in float64 and plain Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from weft._core.sampling.params import SamplingParams

GONE = -math.inf


def softmax(logits: Sequence[float]) -> list[float]:
    peak = max(logits)
    weights = [math.exp(x - peak) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def entropy(logits: Sequence[float]) -> float:
    return -math.fsum(p * math.log(p) for p in softmax(logits) if p > 0)


def logprob(logits: Sequence[float], token_id: int) -> float:
    p = softmax(logits)[token_id]
    return math.log(p) if p > 0 else GONE


def by_likelihood(logits: Sequence[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def keep(logits: Sequence[float], kept: set[int]) -> list[float]:
    return [x if i in kept else GONE for i, x in enumerate(logits)]


def smallest_set(order: list[int], p: Sequence[float], share: float) -> set[int]:
    kept: set[int] = set()
    mass = 0.0
    for i in order:
        if mass >= share:
            break
        kept.add(i)
        mass += p[i]
    return kept


def top_k(logits: Sequence[float], k: int) -> list[float]:
    return keep(logits, set(by_likelihood(logits)[: k or None]))


def top_p(logits: Sequence[float], share: float) -> list[float]:
    if share >= 1:
        return list(logits)
    return keep(logits, smallest_set(by_likelihood(logits), softmax(logits), share))


def typical(logits: Sequence[float], share: float) -> list[float]:
    if share >= 1:
        return list(logits)
    p = softmax(logits)
    h = entropy(logits)
    away = [abs(-math.log(x) - h) if x > 0 else math.inf for x in p]
    return keep(logits, smallest_set(sorted(range(len(p)), key=lambda i: (away[i], i)), p, share))


def min_p(logits: Sequence[float], share: float) -> list[float]:
    p = softmax(logits)
    floor = share * max(p)
    return keep(logits, {i for i, x in enumerate(p) if x >= floor})


def top_n_sigma(logits: Sequence[float], n: float) -> list[float]:
    if n == 0:
        return list(logits)
    finite = [x for x in logits if x > GONE]
    mean = math.fsum(finite) / len(finite)
    sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in finite) / len(finite))
    edge = max(finite) - n * sigma
    return [x if x >= edge else GONE for x in logits]


def xtc(logits: Sequence[float], threshold: float) -> list[float]:
    p = softmax(logits)
    top = [i for i in by_likelihood(logits) if logits[i] > GONE and p[i] >= threshold]
    return keep(logits, set(range(len(logits))) - set(top[:-1]))


def xtc_number(stream: int, position: int) -> float:
    low, high, *_ = philox(stream, position)
    return ((splitmix(low | high << 32, 2**33) >> 11) + 0.5) / 2**53


def common_suffix(one: Sequence[int], two: Sequence[int]) -> int:
    n = 0
    while n < min(len(one), len(two)) and one[-1 - n] == two[-1 - n]:
        n += 1
    return n


def dry(
    text: Sequence[int],
    *,
    multiplier: float,
    base: float = 1.75,
    allowed_length: int = 2,
    last_n: int | None = None,
    breakers: Sequence[Sequence[int]] = (),
) -> dict[int, float]:
    """Return the penalty of each token that would continue a repetition: every place is tried.

    breakers: token sequences; tokens of those with one token are free.
    """
    text = list(text) if last_n is None else list(text)[-last_n:]
    free = next(
        (
            len(text) - at - max(map(len, here))
            for at in reversed(range(len(text)))
            if (here := [b for b in breakers if text[at : at + len(b)] == list(b)])
        ),
        len(text),
    )
    longest: dict[int, int] = {}
    for at in range(1, len(text)):
        n = min(common_suffix(text[:at], text), free)
        if n >= allowed_length and [text[at]] not in [list(b) for b in breakers]:
            longest[text[at]] = max(longest.get(text[at], 0), n)
    return {token: multiplier * base ** (n - allowed_length) for token, n in longest.items()}


def penalise(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
) -> list[float]:
    out = list(logits)
    for i in {*prompt, *generated}:
        out[i] *= 1 / params.repetition_penalty if out[i] > 0 else params.repetition_penalty
    for i, count in Counter(generated).items():
        out[i] -= params.frequency_penalty * count + params.presence_penalty
    return out


def temper(logits: Sequence[float], temperature: float) -> list[float]:
    return [x / temperature for x in logits]


def philox(key: int, counter: int) -> list[int]:
    """Philox4x32-10, word by word: a 64-bit key, a 128-bit counter, four words."""
    mask = 2**32 - 1
    k0, k1 = key & mask, key >> 32
    words = [counter >> 32 * i & mask for i in range(4)]
    for _ in range(10):
        p0, p1 = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [p1 >> 32 ^ words[1] ^ k0, p1 & mask, p0 >> 32 ^ words[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return words


def time(word: int) -> float:
    return -math.log(1 - ((word >> 41) + 0.5) / 2**23)


def splitmix(key: int, counter: int) -> int:
    """Output number `counter` of SplitMix64 started at `key`."""
    mask = 2**64 - 1
    x = key + (counter + 1) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def noise(stream: int, position: int, token_ids: Sequence[int]) -> list[float]:
    """Gumbel noise of tokens: its group's earliest time if a token is the earliest, else later."""
    low, high, *_ = philox(stream, position)
    key, out = low | high << 32, []
    for token_id in token_ids:
        square, line, column = token_id // 4096, token_id // 64 % 64, token_id % 64
        word = splitmix(key, square * 64 + column)
        when = time(word) / 64
        if word % 64 != line:
            when += time(splitmix(key, 2**32 + token_id))
        out.append(-math.log(when))
    return out


def draw(
    logits: Sequence[float],
    params: SamplingParams,
    noises: Sequence[float],
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    xtc_drawn: float = 1.0,
) -> int:
    x = list(logits)
    for i, value in params.logit_bias:
        x[i] += value
    x = penalise(x, params, prompt, generated)
    repeated = dry(
        [*prompt, *generated],
        multiplier=params.dry_multiplier,
        base=params.dry_base,
        allowed_length=params.dry_allowed_length,
        last_n=params.dry_penalty_last_n,
    )
    for i, value in repeated.items():
        x[i] -= value
    if params.temperature == 0:
        return by_likelihood(x)[0]
    if params.temperature_first:
        x = temper(x, params.temperature)
    x = top_n_sigma(x, params.top_n_sigma)
    x = top_k(x, params.top_k)
    x = typical(x, params.typical_p)
    x = top_p(x, params.top_p)
    x = min_p(x, params.min_p)
    if xtc_drawn < params.xtc_probability:
        x = xtc(x, params.xtc_threshold)
    if not params.temperature_first:
        x = temper(x, params.temperature)
    heights = [value + noise for value, noise in zip(x, noises, strict=True)]
    return heights.index(max(heights))
