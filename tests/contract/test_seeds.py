"""A seed gives the same tokens alone, in any company and on every engine; any vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.conftest import KINDS, OPTIONAL, Make
from contract.helpers import logits_at, prompt_ids, run_all, run_item
from weft._core.sampling import rng
from weft._core.sampling.metrics import n_groups
from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.base import Engine
from weft.lm.lm import LM

FEW, MANY = 12, 64  # tokens of a text: by default, and by `-m slow`
LEVEL = 2e-5  # logits of one row differ by so much at most in batches of other shapes
COMPANIES = [1, 6, 29]  # numbers of other runs in the batch


def texts(
    lm: LM, prompt: Sequence[int], seeds: Sequence[int], n_others: int, n_tokens: int
) -> list[list[int]]:
    """Tokens of one run a seed, in a batch with runs of other prompts, lengths and rules."""
    requested = [
        run_item(lm, lm.place(prompt), seed, max_tokens=n_tokens, stop_ids=frozenset())
        for seed in seeds
    ]
    others = [
        run_item(
            lm,
            lm.place([*prompt[: 3 + i], *range(20, 20 + 5 * i)]),
            1000 + i,
            max_tokens=10 + 7 * i % n_tokens,
            stop_ids=frozenset(),
            **[{}, {"top_k": 20}, {"temperature": 0.5}][i % 3],
        )
        for i in range(n_others)
    ]
    mixed = [*others[::2], *requested, *others[1::2]]
    by_item = dict(zip(map(id, mixed), run_all(lm, mixed), strict=True))
    return [by_item[id(item)].tokens for item in requested]


def alone(lm: LM, prompt: Sequence[int], seeds: Sequence[int], n_tokens: int) -> list[list[int]]:
    return [texts(lm, prompt, [seed], 0, n_tokens)[0] for seed in seeds]


def assert_same(
    lm: LM,
    prompt: Sequence[int],
    seeds: Sequence[int],
    results: list[list[int]],
    want: list[list[int]],
    context: object,
) -> None:
    """Texts are equal, but from a token on where two stood level to the rounding of logits."""
    for seed, got, wanted in zip(seeds, results, want, strict=True):
        if got == wanted:
            continue
        at = next(i for i, pair in enumerate(zip(got, wanted, strict=True)) if len({*pair}) == 2)
        heights = standings(lm, [*prompt, *wanted[:at]], seed)
        gap = abs(heights[got[at]] - heights[wanted[at]])
        assert heights[wanted[at]] > heights.max() - LEVEL, (context, seed, at)
        assert gap < LEVEL, (context, seed, at, gap)


def standings(lm: LM, ids: Sequence[int], seed: int) -> NDArray[np.float64]:
    """Return each token's logit and noise together, after `ids`: the largest is drawn."""
    logits = logits_at(lm, ids).astype(np.float64)
    stream, position = rng.stream_of(seed, (0,)), len(ids)
    keys = rng.keys_of(np.array([stream], np.uint64), np.array([position], np.uint64))
    groups = rng.group_noise(keys, n_groups(len(logits)))
    every = np.arange(len(logits))
    return logits + rng.token_noise(groups, np.zeros_like(every), every)


@pytest.mark.torch
@pytest.mark.parametrize("other", ["none", "paged", *OPTIONAL])
@pytest.mark.parametrize(
    ("seeds", "n_tokens"),
    [(range(1), FEW), pytest.param(range(1, 42), MANY, marks=pytest.mark.slow, id="many")],
)
def test_seed_gives_the_same_tokens_alone_in_a_batch_and_on_every_engine(
    make: Make, other: str, seeds: range, n_tokens: int
) -> None:
    """NumPy, torch and the fakes agree, and NumPy agrees with each other engine.

    An engine that generates complete runs by itself draws by its own rule: it agrees with itself.
    """
    want = None
    ours = [kind for kind in KINDS if kind not in (*OPTIONAL, "paged")]
    for kind in ours if other == "none" else ("numpy", other):
        lm = make(kind)
        prompt = prompt_ids(lm, "Tell me a story about a fox.")
        if want is None or lm.info.capabilities.native_runs:
            want = alone(lm, prompt, seeds, n_tokens)
        # A hidden engine runs full paths every step, and Triton's interpreter is slow. These are
        # expensive, and their batches are like others'.
        is_dear = lm.info.kv == "hidden" or kind == "paged"
        for n_others in COMPANIES[:1] if is_dear else COMPANIES:
            results = texts(lm, prompt, seeds, n_others, n_tokens)
            if lm.info.capabilities.native_runs:
                assert results == want, (kind, n_others)
            else:
                assert_same(lm, prompt, seeds, results, want, (kind, n_others))


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 32,000 tokens whose distributions are flat: about 300 tokens level."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    folder = tmp_path_factory.mktemp("wide")
    model.save_pretrained(folder)
    return folder


@pytest.mark.programs
@pytest.mark.torch
@pytest.mark.parametrize(
    ("seeds", "n_tokens"),
    [(range(1), FEW), pytest.param(range(1, 22), MANY, marks=pytest.mark.slow, id="many")],
)
def test_seed_gives_the_same_tokens_over_a_large_flat_vocabulary(
    text: Tokenizer, wide_folder: Path, seeds: range, n_tokens: int
) -> None:
    from weft.engines.numpy import NumpyEngine
    from weft.engines.torch import TorchEngine

    want, prompt = None, list(range(5, 60))
    engines: list[Engine] = [
        NumpyEngine.load(wide_folder),
        TorchEngine.load(wide_folder, dtype="float32"),
    ]
    for engine in engines:
        lm = LM(engine, text)
        if want is None:
            want = alone(lm, prompt, seeds, n_tokens)
            assert len({tuple(tokens) for tokens in want}) == len(seeds)
        for n_others in COMPANIES:
            results = texts(lm, prompt, seeds, n_others, n_tokens)
            assert_same(lm, prompt, seeds, results, want, (engine.info.name, n_others))
        lm.close()
