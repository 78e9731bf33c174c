"""A steady step of the torch engine: no masks of Transformers' own, no copies, no waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import AttentionMaskInterface  # noqa: E402

from cases import one_in  # noqa: E402
from families import FAMILIES, build  # noqa: E402
from shallow import shallow  # noqa: E402
from weft import LM, Loom  # noqa: E402
from weft._core.sampling.sampler import DrawResult  # noqa: E402
from weft._core.tokens.tokenizer import Tokenizer  # noqa: E402
from weft.constraints import Regex  # noqa: E402
from weft.engines.base import FutureTokens, HostDraws, Row, Span  # noqa: E402
from weft.engines.torch import TorchEngine, input_tensors  # noqa: E402
from weft.engines.torch.attention_hook import NAME, no_mask  # noqa: E402
from weft.engines.torch.input_tensors import CachedTensor, IncrementingTensor, InputIds  # noqa: E402
from weft.errors import ConfigError, ContextOverflow  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


class Drawn:
    """Draws that are on the device. The host must not ask for them."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = torch.tensor(ids)

    def result(self) -> DrawResult:
        raise AssertionError("the host read draws that are on the device")


class Branches:
    """A prompt and some branches below it, that step together."""

    def __init__(self, engine: TorchEngine, tails: Sequence[int]) -> None:
        self.engine = engine
        store = engine.fragments
        self.trunk = store.new(None)
        engine.forward([Row((), [(7 * i) % 100 for i in range(11)], 0, self.trunk)])
        self.path = (Span(self.trunk, 11),)
        self.tails = [store.new(self.trunk) for _ in tails]
        for tail, n in zip(self.tails, tails, strict=True):
            if n:
                engine.forward([Row(self.path, [(5 * i + n) % 100 for i in range(n)], 11, tail)])

    def rows(self, tokens: Sequence[Sequence[int] | FutureTokens]) -> list[Row]:
        return [
            Row(self.path, ids, 11 + tail.length, tail, (0,))
            for ids, tail in zip(tokens, self.tails, strict=True)
        ]

    def step(self, tokens: Sequence[Sequence[int] | FutureTokens]) -> np.ndarray:
        output = self.engine.forward(self.rows(tokens))
        return np.stack([output.logits(i) for i in range(len(tokens))])

    def free(self) -> None:
        for fragment in [self.trunk, *self.tails]:
            self.engine.fragments.free(fragment)


@pytest.mark.parametrize("name", one_in(4, FAMILIES))
def test_logits_are_the_same_to_the_bit_without_a_mask_function(name: str) -> None:
    """It stands in Transformers' table for a moment only, while a model is looked at."""
    engine = TorchEngine.adopt(build(name))
    actual = []
    for has_mask in (False, True):
        if has_mask:
            AttentionMaskInterface.register(NAME, no_mask)
        else:
            assert NAME not in AttentionMaskInterface()
        try:
            branches = Branches(engine, [0, 3, 9])
            actual.append([branches.step([[i], [i + 1], [i + 2]]) for i in range(3)])
            branches.free()
        finally:
            AttentionMaskInterface._global_mapping.pop(NAME, None)
    assert np.array_equal(*actual)


class Watch(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "_unique2", "item"}
UPLOADS = {"lift_fresh", "lift_fresh_copy", "_to_copy_from_host"}


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Count what a forward does; making a tensor of host numbers is "upload" there."""
    watch = Watch()
    with monkeypatch.context() as patch:
        for name in ("tensor", "from_numpy", "as_tensor"):
            real = getattr(torch, name)

            def noting(*given: Any, real: Any = real, **more: Any) -> Any:
                watch.counts["upload"] += 1
                return real(*given, **more)

            patch.setattr(torch, name, noting)
        with watch:
            yield watch


@pytest.mark.parametrize("tails", [[2, 2, 2, 2], [1, 3, 9, 5], [2, 40, 3, 33]], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3_text", "gpt2"])
def test_steady_step_sends_nothing_to_the_device_and_waits_for_nothing(
    name: str, tails: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.engines.torch.engine.FusedDecoder.from_model", lambda *given: None)
    engine = TorchEngine.adopt(build(name))
    branches = Branches(engine, tails)
    twin = Branches(engine, tails)
    for step in range(5):
        ids = [(11 * step + i) % 100 for i in range(4)]
        draws = Drawn(ids)
        rows = branches.rows([FutureTokens(draws, i) for i in range(4)])
        with watched(monkeypatch) as watch:
            output = engine.forward(rows)
        actual = {
            name: n for name, n in watch.counts.items() if name in {*WAITS, *UPLOADS, "upload"}
        }
        if step:
            assert actual == {}
        else:
            assert actual["upload"]  # the plan
        assert watch.counts["mm"] + watch.counts["addmm"] + watch.counts["linear"] > 3
    # The twin gets its tokens from the host: the plan of the others was theirs alone.
    for step in range(5):
        expected = twin.step([[(11 * step + i) % 100] for i in range(4)])
    got = np.stack([output.logits(i) for i in range(4)])
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.kernels
def test_steady_step_over_paged_kv_sends_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the kernel itself, which is nothing but operations on the device."""
    pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")
    from weft.engines.torch.paged import kernel

    if not kernel.is_interpreted():
        pytest.skip("triton's interpreter is not on")
    engine = TorchEngine.adopt(build("qwen3"), kv="paged")
    branches = Branches(engine, [1, 3, 9, 20])

    def attended(query: Any, *rest: Any) -> Any:
        return torch.zeros_like(query).transpose(0, 1)

    monkeypatch.setattr("weft.engines.torch.paged.step.tree_attention", attended)
    draws = Drawn([4, 3, 2, 1])
    for step in range(5):
        rows = branches.rows([FutureTokens(draws, i) for i in range(4)])
        with watched(monkeypatch) as watch:
            engine.forward(rows)
        actual = {
            name: n for name, n in watch.counts.items() if name in {*WAITS, *UPLOADS, "upload"}
        }
        assert (actual == {}) == (step > 0), step


def test_texts_are_the_same_where_steps_overlap() -> None:
    """On a CPU, where nothing is won by it: the order of calls is what a card sees."""
    texts = []
    for overlap in (False, True):
        engine = TorchEngine.load(shallow(), dtype="float32")
        engine.info = replace(
            engine.info, async_scheduling=overlap, max_num_batched_tokens=64 if overlap else None
        )
        with LM(engine, Tokenizer.from_folder(shallow())) as lm:
            loom = Loom(lm, "Once upon a time")
            created = loom.grow(n=4, max_tokens=12, seed=3, show=False)
            created += created[0].grow(
                n=3, max_tokens=9, seed=4, repetition_penalty=1.3, show=False
            )
            created += loom.grow(n=2, max_tokens=9, seed=5, constraint=Regex("[a-z ]+"), show=False)
            texts.append([node.tokens for node in created])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("numbers", [[0, 1, 2], [2, 0, 1], [1, None, 0], [None, 2, None]])
def test_tokens_that_are_late_are_those_that_were_drawn(numbers: list[int | None]) -> None:
    """In any order, mixed with tokens known on the host; -1 is any token."""
    engine = TorchEngine.adopt(build("qwen3"))
    branches, twin = Branches(engine, [1, 4, 2]), Branches(engine, [1, 4, 2])
    for ids in ([5, 6, 7], [60, 61, 62]):
        draws = Drawn([*ids, -1])
        late = [[50 + i] if n is None else FutureTokens(draws, n) for i, n in enumerate(numbers)]
        known = [[50 + i] if n is None else [ids[n]] for i, n in enumerate(numbers)]
        np.testing.assert_allclose(branches.step(late), twin.step(known), atol=1e-6)
    nothing = [FutureTokens(draws, 3), [1], [2]]
    assert np.isfinite(branches.step(nothing)).all()


def test_late_tokens_of_the_host_are_waited_for_and_the_context_has_an_end() -> None:
    engine = TorchEngine.adopt(build("qwen3"), n_ctx=16)
    branches, twin = Branches(engine, [3, 4]), Branches(engine, [3, 4])
    zeros = np.zeros(2, np.float32)
    draws = HostDraws(DrawResult(np.array([8, 9]), zeros, zeros))
    got = branches.step([FutureTokens(draws, 1), FutureTokens(draws, 0)])
    assert np.array_equal(got, twin.step([[9], [8]]))
    for late in (Drawn([1, 2]), HostDraws(DrawResult(np.array([1, 2]), zeros, zeros))):
        with pytest.raises(ContextOverflow, match="a path of 17 tokens"):
            branches.step([FutureTokens(late, 0), FutureTokens(late, 1)])
    assert [tail.length for tail in branches.tails] == [4, 5]


@pytest.mark.parametrize("wrong", [-1, 120])
def test_one_wrong_token_among_many_rows_is_named(wrong: int) -> None:
    engine = TorchEngine.adopt(build("qwen3"))
    assert engine.info.n_vocab == 120
    branches = Branches(engine, [3, 4, 5])
    with pytest.raises(ConfigError, match=f"token ids must be 0 to 119; got {wrong} to {wrong}"):
        branches.step([[7], [wrong], [8]])
    assert [tail.length for tail in branches.tails] == [3, 4, 5]


def test_cached_tensors_contain_the_given_numbers() -> None:
    counted, kept = IncrementingTensor(CPU), CachedTensor(CPU)
    first = counted.at([3, 9])
    assert counted.at([3, 9]) is first
    assert counted.at([4, 10]) is first
    for numbers in ([4, 10], [5, 11], [5, 12], [6, 13, 1], [6, 13], [7, 14], [], [7, 14], [0]):
        assert counted.at(numbers).tolist() == numbers
        assert kept.of(numbers).tolist() == numbers
    assert kept.of([0]) is kept.of([0])


def test_protocol_of_draws_is_checked_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not row by row: a protocol check tests all of its names, which takes microseconds."""
    requested = []

    class Counting(type):
        def __instancecheck__(cls, _: object) -> bool:
            requested.append(1)
            return True

    class There(metaclass=Counting): ...

    monkeypatch.setattr(input_tensors, "DeviceTokens", There)
    ids, drawn = InputIds(CPU), Drawn(range(40))
    info: Any = SimpleNamespace(context_length=50, n_vocab=90)
    rows = [Row((), FutureTokens(drawn, number), 3, None, (0,)) for number in range(40)]
    assert ids.packed(ids.checked(rows, info), range(40)).tolist() == list(range(40))
    assert len(requested) == 2
