"""Steps launched from draws that the host has not read: on the device, over paged KV.

An engine on a card sets `async_scheduling`, and draws on its device. Here a CPU is the card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import weft  # noqa: E402
from cases import first_of  # noqa: E402
from families import build  # noqa: E402
from shallow import shallow  # noqa: E402
from weft._core.sampling.params import SamplingParams  # noqa: E402
from weft._core.sampling.rng import stream_of  # noqa: E402
from weft._core.sampling.sampler import BatchSampler, DrawBatch, Sampler  # noqa: E402
from weft.engines.base import FutureTokens, Row, Span  # noqa: E402
from weft.engines.torch import TorchEngine, weight_layout  # noqa: E402
from weft.engines.torch.engine import open_model  # noqa: E402
from weft.engines.torch.paged import elementwise, experts, graph_inputs, kernel, routers  # noqa: E402
from weft.engines.torch.sampling import kernel as draw_kernel  # noqa: E402
from weft.engines.torch.sampling import sampler  # noqa: E402
from weft.engines.torch.sampling.sampler import TorchDraws, TorchSampler  # noqa: E402
from weft.errors import ContextOverflow  # noqa: E402

if not (kernel.is_interpreted() or torch.cuda.is_available()):
    pytest.skip("triton has neither its interpreter nor a card", allow_module_level=True)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.kernels,
    pytest.mark.usefixtures("one_load_check"),
]
DEVICE = torch.device("cpu" if kernel.is_interpreted() else "cuda")


@pytest.fixture(autouse=True)
def _draws_on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sampler, "is_for_triton", lambda _: True)
    with torch.inference_mode():
        yield


def as_a_card(engine: Any) -> Any:
    engine.info = replace(engine.info, async_scheduling=True)
    return engine


def drawn(ids: list[int]) -> TorchDraws:
    return TorchDraws(torch.tensor([ids, [0] * len(ids), [0] * len(ids)], device=DEVICE))


def unseen(ids: list[int], monkeypatch: pytest.MonkeyPatch) -> TorchDraws:
    """Draws of which the host may not ask."""
    created = drawn(ids)
    monkeypatch.setattr(TorchDraws, "result", lambda self: pytest.fail("the host has waited"))
    return created


def test_future_tokens_run_like_known_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, mixed with tokens known on the host; a draw of no token is run as token 0."""
    engine = TorchEngine.adopt(build("llama").to(DEVICE), kv="paged", graphs=False)
    trunk = engine.fragments.new(None)
    engine.forward([Row((), [3, 4, 5], 0, trunk)])
    path = (Span(trunk, 3),)
    want = engine.forward([Row(path, tokens, 3, None, (0,)) for tokens in ([9], [0], [7, 8], [11])])
    late = unseen([11, -1, 9], monkeypatch)
    tokens = [FutureTokens(late, 2), FutureTokens(late, 1), [7, 8], FutureTokens(late, 0)]
    for _ in range(2):
        got = engine.forward([Row(path, some, 3, None, (0,)) for some in tokens])
        for at in range(4):
            near = torch.from_numpy(got.logits(at)), torch.from_numpy(want.logits(at))
            torch.testing.assert_close(*near, rtol=1e-4, atol=1e-4)
    row = Row((), FutureTokens(late, 0), engine.info.context_length, None, (0,))
    monkeypatch.setattr("weft.engines.torch.engine.check_rows", lambda rows: None)
    with pytest.raises(ContextOverflow):
        engine.forward([row])


@pytest.mark.parametrize("graphs", first_of([True, False]))
def test_texts_are_the_same_with_steps_in_flight(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of runs that end at different lengths, with penalties and without; the rule is one."""
    monkeypatch.setattr(sampler, "is_for_triton", lambda _: False)
    texts: list[list[str]] = []
    n_late = 0
    for is_card in (False, True):
        if is_card:
            monkeypatch.setattr(sampler, "is_for_triton", lambda _: True)
        engine = TorchEngine.load(shallow(), dtype="float32", kv="paged", graphs=graphs)
        if is_card:
            as_a_card(engine)
        forward = engine.forward

        def counted(rows: Any, forward: Any = forward) -> Any:
            nonlocal n_late
            n_late += sum(isinstance(row.tokens, FutureTokens) for row in rows)
            return forward(rows)

        engine.forward = counted
        with weft.LM(engine, weft.load(shallow()).text) as lm:
            loom = weft.Loom(lm, "Tell me a story about a fox.")
            grown = loom.grow(n=3, max_tokens=9, seed=4, temperature=0.9)
            grown += loom.grow(n=2, max_tokens=4, seed=2, repetition_penalty=1.3)
            grown += grown[0].grow(n=2, max_tokens=3, seed=1)
            texts.append([node.text for node in grown])
            lm.tree.check()
    assert texts[0] == texts[1]
    assert n_late > 15


class Counting(TorchDispatchMode):
    """Counts what a card would launch, and what would wait for it."""

    WAITS = (
        *("_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal", "masked_select"),
        "_grouped_mm",
    )
    # Another look at the same memory, or memory alone.
    NOTHING = (
        *("view", "_unsafe_view", "transpose", "t", "slice", "unsqueeze", "select", "expand"),
        *("alias", "detach", "split", "split_with_sizes", "unbind", "squeeze", "permute"),
        *("empty", "new_empty", "empty_like", "empty_strided", "as_strided", "lift_fresh"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.is_paused = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not self.is_paused:
            self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))

    def waits(self) -> dict[str, int]:
        return {name: n for name, n in self.counts.items() if name in self.WAITS}

    def launches(self) -> int:
        return sum(n for name, n in self.counts.items() if name not in self.NOTHING)


class Kernel:
    """A Triton kernel whose launch counts as one, whatever the interpreter makes of it."""

    now: Counting | None = None

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name = inner, name

    def __getitem__(self, grid: Any) -> Any:
        def launch(*given: Any, **named: Any) -> None:
            counting = Kernel.now
            if counting is None:
                self._inner[grid](*given, **named)
                return
            counting.counts[self._name] += 1
            counting.is_paused = True
            try:
                self._inner[grid](*given, **named)
            finally:
                counting.is_paused = False

        return launch


KERNELS = [
    (kernel, "tree_attention_kernel"),
    (kernel, "merge_attn_states_kernel"),
    (graph_inputs, "find_slots_kernel"),
    (graph_inputs, "copy_inputs_kernel"),
    (elementwise, "rotary_angles_kernel"),
    (elementwise, "rms_norm_kernel"),
    (elementwise, "rotary_and_store_kv_kernel"),
    (elementwise, "rotary_kernel"),
    (elementwise, "store_kv_kernel"),
    (elementwise, "act_and_mul_kernel"),
    (experts, "moe_align_kernel"),
    (experts, "fused_moe_kernel"),
    (experts, "moe_sum_kernel"),
    (routers, "topk_routing_kernel"),
    (draw_kernel, "sample_tile_kernel"),
    (draw_kernel, "reduce_row_kernel"),
]
UPLOADS = [
    *("input_tensors.to_device", "sampling.sampling_tensors.to_device"),
    *("sampling.sampling_tensors.copy_to_device", "paged.attention_metadata.to_device"),
    *("paged.attention_metadata.copy_to_device", "paged.pool.to_device"),
    "paged.pool.copy_to_device",
]


def steady(engine: Any, n: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Counting, list[str]]:
    """Run steps of n rows until they are alike, each from the draws of the one before.

    Returns what the last one did, forward and draw, and what it has uploaded.
    """
    monkeypatch.setattr(engine, "_sampler", TorchSampler(DEVICE, kernels=True))
    store = engine.fragments
    trunk = store.new(None)
    engine.forward([Row((), list(range(3, 12)), 0, trunk)])
    path = (Span(trunk, 9),)
    rows = [Row(path, [5 + i], 9, store.new(None), (0,)) for i in range(n)]
    samplers = [Sampler(SamplingParams(temperature=0.8), stream_of(1, (i,))) for i in range(n)]
    chain = BatchSampler(samplers)
    uploads: list[str] = []
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Kernel(getattr(module, name), name))
    for where in UPLOADS:
        _noting(f"weft.engines.torch.{where}", uploads, monkeypatch)
    counting = Counting()
    for number in range(8):
        uploads.clear()
        counting = Kernel.now = Counting()
        with counting:
            output = engine.forward(rows)
            at = torch.arange(n).numpy()
            positions = (at * 0 + 10 + number).astype("uint64")
            batch = DrawBatch(at, chain, positions, kept=False)
            created = output.draw(batch)
        Kernel.now = None
        for i, row in enumerate(rows):
            row.position += 1
            row.tokens = FutureTokens(created, i)
    return counting, uploads


def _noting(where: str, uploads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    module, _, name = where.rpartition(".")
    inner = getattr(importlib.import_module(module), name)

    def noted(*given: Any) -> Any:
        uploads.append(where)
        return inner(*given)

    monkeypatch.setattr(where, noted)


@pytest.mark.parametrize("name", first_of(["llama", "gemma2", "qwen3", "gpt2", "mixtral"]))
def test_steady_step_waits_for_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it upload anything, by Transformers' own code or fused. Products over groups of
    rows, as mixtures have without kernels, ask the host on most cards how many rows there are.
    """
    engine = TorchEngine.adopt(build(name).to(DEVICE), kv="paged", graphs=False)
    counting, uploads = steady(engine, 3, monkeypatch)
    assert counting.waits() == {}
    assert uploads == []


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_fused_step_launches_few_kernels_a_layer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two norms, four products, turning, attending, merging and gating, of three layers; drawing
    and what is outside of the layers takes as many at any depth, the angles of all one.
    """
    launches = []
    for n_layers in (1, 3):
        with torch.inference_mode(False):
            model = build(name).to(DEVICE)
            model.config.num_hidden_layers = n_layers
            model.model.layers = model.model.layers[:n_layers]
            weight_layout.merge_sibling_weights(model)
            engine = open_model(model, n_ctx=None, fingerprint="x", state_bytes=None, kv="paged")
        with monkeypatch.context() as patch:
            counting, _ = steady(engine, 3, patch)
        launches.append(counting.launches())
        assert (counting.counts["rotary_angles_kernel"], counting.counts["cos"]) == (1, 0)
    assert launches[1] - launches[0] == 2 * 10
    assert launches[0] + 31 * 10 <= 400  # of 32 layers, nothing captured


@pytest.mark.parametrize(
    ("name", "n_before", "max_n"),
    first_of([("gemma2", 237, 79), ("olmo2", 210, 72), ("phi3", 164, 77), ("gpt2", 88, 65),
              ("cohere", 167, 63), ("gpt_oss", 163, 85)]),
)  # fmt: skip
def test_step_of_a_models_own_modules_launches_less(
    name: str, n_before: int, max_n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three layers and what is around them; n_before: each by the operations that it writes."""
    with torch.inference_mode(False):
        model = build(name).to(DEVICE)
        weight_layout.merge_sibling_weights(model)
        engine = open_model(
            model, n_ctx=None, fingerprint="x", state_bytes=None, kv="paged", graphs=False
        )
    counting, _ = steady(engine, 3, monkeypatch)
    assert not counting.counts.keys() & {"rsqrt", "pow", "neg", "index_copy_"}
    assert counting.launches() <= max_n < 0.75 * n_before


def test_played_step_launches_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of what is captured: filling the frame, the head, and drawing."""
    engine = TorchEngine.adopt(build("llama").to(DEVICE), kv="paged", graphs=True)
    monkeypatch.setattr("weft.engines.torch.paged.capture._EagerStep.replay", lambda self: None)
    counting, uploads = steady(engine, 3, monkeypatch)
    assert engine.stats()["replayed"] > 3
    assert counting.waits() == {}
    assert uploads == []
    assert counting.counts["tree_attention_kernel"] == 0
    assert counting.counts["sample_tile_kernel"] == 1
    assert counting.counts["find_slots_kernel"] == counting.counts["copy_inputs_kernel"] == 1
    assert counting.launches() <= 12
