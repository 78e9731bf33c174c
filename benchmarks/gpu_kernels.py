"""The kernels on a card, alone: compared with what they replace, and their time.

  tree    the trees of `gpu_tree` in bfloat16, one layer: milliseconds, and what share of the card's
          measured copy rate the reads of the unique KV are
  prompt  2,048 tokens more of a long prompt, one layer, with tiles of 128 rows and without
  cut     the same trees, cut for fewer programs and for more
  tiles   all but the first with tiles that are compiled otherwise; only on request
  deep    trees below short nodes, which are handed down to what lies below them, and are not
  host    4,096 slots of eight layers to pinned memory and back
  kernel  head sizes, windows, caps, sinks, groups and dtypes over one small tree
  draw    tokens of rows of 128,256 logits, by the kernels
  experts the experts of one layer of a mixture in bfloat16, by the kernels and as Transformers has
          them in turn, and what share of the copy rate the reads of weights are
  router  a mixture's choice of experts by the kernel, and by the router's own code

Rows of attention each have their path gathered and attended by PyTorch in float32, drawn tokens are
those of the NumPy reference, and what experts make is compared with each pair alone: an error is a
failed result.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, product
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_model import (
    Record,
    Shape,
    copy_rate,
    device,
    synchronise,
    timed,
    timed_alone,
    tree_rows,
    trees,
)
from torch import Tensor
from torch.nn.functional import silu
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from weft._core.sampling.params import SamplingParams
from weft._core.sampling.rng import stream_of
from weft._core.sampling.sampler import BatchSampler, DrawBatch, Sampler
from weft.engines.base import Row
from weft.engines.torch.attention_hook import attach_context
from weft.engines.torch.fused.routers import fuse_routers
from weft.engines.torch.kv_backend import AttentionSpec, GatedActivation, MoEWeights
from weft.engines.torch.layout import LayerShape, Layout
from weft.engines.torch.paged import (
    attention_metadata,
    experts,
    kernel,
    prefix_index,
    routers,
    tiling,
)
from weft.engines.torch.paged.pool import as_paged
from weft.engines.torch.paged.step import PagedBackend, PagedStep
from weft.engines.torch.sampling.sampler import TorchSampler

COLD = 8  # layers that are timed in turn
# By rows of a tile. Those of few rows and 32 keys have enough registers next to one of 128 on a
# processor; the others wait for it to end.
OTHER_TILES: tuple[tuple[int, dict[str, Any]], ...] = (
    # Room for one of these next to a tile of 128 rows.
    (kernel.NARROW, {"num_stages": 2, "maxnreg": 128}),
    (kernel.BROAD, {"maxnreg": 192}),
    (kernel.NARROW, {"BN": 64, "num_stages": 5}),
    (kernel.NARROW, {"BN": 32, "num_stages": 2}),
    (kernel.NARROW, {"BN": 32, "num_stages": 3}),
    (kernel.NARROW, {"BN": 32, "num_stages": 4}),
    (kernel.WIDE, {"BN": 64, "num_stages": 2}),
    (kernel.WIDE, {"BN": 64, "num_stages": 3}),
)
# Largest error of an output, whose numbers are near one. What a model is mostly run in comes first:
# each case compiles its own kernels, for some seconds, and a part may be ended before the last.
NEAR = {torch.bfloat16: 4e-2, torch.float32: 1e-4, torch.float16: 5e-3}


class Case(NamedTuple):
    """One way to attend."""

    name: str
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


def cases(*, dry: bool) -> Iterator[Case]:
    dtypes = [d for d in NEAR if not (dry and d is torch.bfloat16)]
    for dtype in dtypes:
        n = None if dtype is torch.bfloat16 else 2
        for size in (64, 80, 96, 128, 256)[:n]:
            yield Case(f"head size {size}", dims=(size, size), dtype=dtype)
        for heads in ((4, 4), (8, 1), (32, 8))[:n]:
            yield Case(f"{heads[0]} heads over {heads[1]}", heads=heads, dtype=dtype)
        if dtype is torch.float16 and not dry:
            continue  # each case compiles its own kernels
        yield Case("keys of 192, values of 128", dims=(192, 128), dtype=dtype)
        yield Case("window", window=33, dtype=dtype)
        yield Case("cap", softcap=2.0, dtype=dtype)
        yield Case("sinks", has_sinks=True, dtype=dtype)
        yield Case("all of them", (6, 3), (80, 80), dtype, 50, 3.0, True)


class Tree:
    """A tree in a pool, its slots filled with random numbers.

    It is timed over several layers in turn, so that none is in the card's cache from the time
    before, as none is in a model.
    """

    def __init__(self, case: Case, shape: Shape, *, n_layers: int = 1) -> None:
        n_heads, n_kv = case.heads
        shape_of_layer = LayerShape(n_kv, *case.dims, case.dtype, case.dtype)
        layout = Layout.from_shapes([shape_of_layer] * n_layers, device())
        self._layers = cycle(range(n_layers))
        self.memory = PagedBackend(layout)
        self.case = case
        sinks = torch.linspace(-1, 2, n_heads, device=device()) if case.has_sinks else None
        self.spec = AttentionSpec(case.dims[0] ** -0.5, case.softcap, case.window, sinks)
        self.random = torch.Generator(device()).manual_seed(1)
        self.rows, _ = tree_rows(shape, self.memory)
        for tensor in (*self.memory.keys, *self.memory.values):
            tensor.normal_(generator=self.random)

    def fresh(self, n_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random queries, keys and values of the step's tokens: [1, heads, T, D]."""
        n_heads, n_kv = self.case.heads
        key_dim, value_dim = self.case.dims

        def normal(n: int, size: int) -> Tensor:
            numbers = torch.randn(1, n, n_tokens, size, device=device(), generator=self.random)
            return numbers.to(self.case.dtype)

        return normal(n_heads, key_dim), normal(n_kv, key_dim), normal(n_kv, value_dim)

    def seconds(self, step: PagedStep, fresh: Sequence[Tensor], min_s: float) -> dict[str, Any]:
        """How long a layer of a step takes."""
        seconds, is_alone = timed_alone(
            lambda: step.attend(next(self._layers), *fresh, self.spec), min_s
        )
        return {"ms": seconds * 1e3, "alone": is_alone}

    def softmax(self, row: Row, query: Tensor) -> Tensor:
        """Return the expected output of a row of one token: float32 [H, Dv]. query: [H, D]."""
        spec = self.spec
        assert row.kv_out is not None
        lists = [*row.prefix, (row.kv_out, row.kv_out.length + 1)]
        slots = np.concatenate([as_paged(kv).slots[:n] for kv, n in lists])
        if spec.window is not None:
            slots = slots[-spec.window :]
        at = torch.from_numpy(slots.astype(np.int64)).to(device())
        keys, values = self.memory.keys[0][at].float(), self.memory.values[0][at].float()
        group = len(query) // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("hd,nhd->hn", query.float(), keys) * spec.scale
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        if spec.sinks is not None:
            scores = torch.cat([scores, spec.sinks[:, None].float()], 1)
        return torch.einsum("hn,nhd->hd", scores.softmax(1)[:, : len(at)], values)


@torch.inference_mode()
def check(
    case: Case, shape: Shape, *, n_checked: int = 1 << 20, min_s: float = 0.2, n_layers: int = 1
) -> dict[str, Any]:
    """Run one layer of a step over a tree, and check about `n_checked` rows of it.

    min_s: minimum time of the measurement. n_layers: over which it is.
    """
    tree = Tree(case, shape, n_layers=n_layers)
    step = tree.memory.start_step(tree.rows)
    fresh = tree.fresh(len(tree.rows))
    out = step.attend(0, *fresh, tree.spec)[0].float()
    worst = 0.0
    for number in range(0, len(tree.rows), max(1, len(tree.rows) // n_checked)):
        start = step.starts[number]
        want = tree.softmax(tree.rows[number], fresh[0][0, :, start])
        worst = float(np.maximum(worst, (out[start] - want).abs().max().item()))  # keeps NaN
    _check_repeats(tree, step, fresh, out)
    took = tree.seconds(step, fresh, min_s)
    step.commit()
    is_right = worst < NEAR[case.dtype]
    if not is_right:
        raise AssertionError(f"an output is {worst:.3g} off")
    n_parts = step.work(case.heads[0] // case.heads[1]).n_parts
    return {"worst": worst, **took, "parts": n_parts}


def _check_repeats(tree: Tree, step: PagedStep, fresh: Sequence[Tensor], out: Tensor) -> None:
    """Repeat the step: sums have one order, so a difference shows a read before a write."""
    for _ in range(1 if tree.memory.layout.device.type == "cpu" else 20):
        repeated = step.attend(0, *fresh, tree.spec)[0].float()
        if not torch.equal(repeated, out):
            raise AssertionError(f"once more it is {(repeated - out).abs().max().item():.3g} off")


RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 0.8": {"temperature": 0.8},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_k 40, top_p 0.95": {"top_k": 40, "top_p": 0.95},
}
FLAT = 0.6  # deviation of a random model's logits


@torch.inference_mode()
def draw(rule: str, n: int, *, dry: bool) -> dict[str, Any]:
    """Draw n tokens by one rule; compare some rows with the reference."""
    n_vocab = 5000 if dry else 128256
    random = torch.Generator(device()).manual_seed(n)
    shape = (n, n_vocab)
    numbers = torch.randn(shape, device=device(), generator=random) * FLAT
    logits = numbers if dry else numbers.bfloat16()
    params = SamplingParams(**RULES[rule])
    samplers = [Sampler(params, stream_of(1, (i,))) for i in range(n)]
    batch = DrawBatch(np.arange(n), BatchSampler(samplers), np.full(n, 7, np.uint64))
    result: dict[str, Any] = {}
    some = min(n, 16)
    few = DrawBatch(batch.rows[:some], BatchSampler(samplers[:some]), batch.positions[:some])
    want = few.on_host(logits[:some].float().cpu().numpy())
    sampler = TorchSampler(device(), kernels=True)
    got = sampler.draw(logits, batch).result()
    job = partial(sampler.packed, logits, batch)
    seconds, is_alone = timed_alone(job, 0.05)
    result |= {"kernels_ms": seconds * 1e3, "kernels_alone": is_alone}
    result["kernels_launched_ms"] = timed(job, 0.05) * 1e3
    n_others = int((got.ids[:some] != want.ids).sum())
    off = float(np.abs(got.logprobs[:some] - want.logprobs).max())
    if n_others or not off < 1e-3:
        raise AssertionError(f"{n_others} of {some} differ, logprobs by {off:.3g}")
    return result


@torch.inference_mode()
def read_on(case: Case, before: int, n: int, *, has_broad: bool) -> dict[str, Any]:
    """Run one layer of n more tokens of a prompt, and look at some of them."""
    was, tiling.BROAD_FROM = tiling.BROAD_FROM, tiling.BROAD_FROM if has_broad else 1 << 30
    try:
        tree = Tree(case, Shape((1, 1), (before, 0)), n_layers=COLD)
        (row,) = tree.rows
        row.tokens = [5] * n
        step = tree.memory.start_step(tree.rows)
        n_broad = len(step.work(case.heads[0] // case.heads[1]).broad)  # tiles are chosen here
    finally:
        tiling.BROAD_FROM = was
    fresh = tree.fresh(n)
    out = step.attend(0, *fresh, tree.spec)[0].float()
    assert row.kv_out is not None
    worst = 0.0
    for at in range(0, n, max(1, n // 4)):
        row.kv_out.length = at  # the slots before it are there
        want = tree.softmax(row, fresh[0][0, :, at])
        worst = float(np.maximum(worst, (out[at] - want).abs().max().item()))
    row.kv_out.length = 0
    if not worst < NEAR[case.dtype]:
        raise AssertionError(f"an output is {worst:.3g} off")
    took = tree.seconds(step, fresh, 0.1)
    n_attended = n * before + n * (n + 1) // 2
    done = 2 * n_attended * case.heads[0] * sum(case.dims)
    flop_s = done / took["ms"] * 1e3
    return {"worst": worst, **took, "flop_s": flop_s, "broad_items": n_broad}


@torch.inference_mode()
def cut(case: Case, shape: Shape, n_programs: int) -> dict[str, Any]:
    """Time one layer of a step over a tree that is cut for about so many programs."""
    was, attention_metadata._PROGRAMS = attention_metadata._PROGRAMS, n_programs
    try:
        tree = Tree(case, shape, n_layers=COLD)
        step = tree.memory.start_step(tree.rows)
        items = [len(each) for each in step.work(case.heads[0] // case.heads[1]).by_tile]
    finally:
        attention_metadata._PROGRAMS = was
    return {**tree.seconds(step, tree.fresh(len(tree.rows)), 0.1), "items": items}


@torch.inference_mode()
def handed_down(case: Case, shape: Shape, worth: int) -> dict[str, Any]:
    """Time one layer of a step over a tree whose parts are worth so many slots."""
    was, prefix_index._PART = prefix_index._PART, worth
    try:
        result = check(case, shape, n_checked=2, n_layers=COLD)
    finally:
        prefix_index._PART = was
    return result


@torch.inference_mode()
def tiled(case: Case, shape: Shape, n_rows: int, options: dict[str, int]) -> dict[str, Any]:
    """Time one layer of a step over a tree, one class of tiles compiled otherwise."""
    chosen = kernel.tile_config

    def other(*sizes: int, n_programs: int) -> dict[str, Any]:
        config = chosen(*sizes, n_programs=n_programs)
        return {**config, **options} if config["BM"] == n_rows else config

    kernel.tile_config = other
    try:
        tree = Tree(case, shape, n_layers=COLD)
        step = tree.memory.start_step(tree.rows)
        return tree.seconds(step, tree.fresh(len(tree.rows)), 0.1)
    finally:
        kernel.tile_config = chosen


@torch.inference_mode()
def to_host_and_back(case: Case, n_slots: int) -> dict[str, Any]:
    """How fast KV leaves for the host and comes back; it must be what it was."""
    tree = Tree(case, Shape((1, 1), (n_slots, 0)), n_layers=COLD)
    memory, (row,) = tree.memory, tree.rows
    fragment, n_bytes = row.prefix[0].fragment, n_slots * memory.layout.slot_bytes
    result: dict[str, Any] = {"bytes": n_bytes}
    for _ in range(3):  # pinned memory is allocated the first time, and kept
        synchronise()
        began = time.perf_counter()
        data = memory.export(fragment)
        left = time.perf_counter()
        back = memory.load(data, None)
        synchronise()
        result["out_bytes_s"] = n_bytes / (left - began)
        result["in_bytes_s"] = n_bytes / (time.perf_counter() - left)
        exported = memory.export(back)
        wrong = [name for name in data if not np.array_equal(data[name], exported[name])]
        if wrong:
            raise AssertionError(f"other bytes come back: {', '.join(wrong)}")
        memory.free(back)
    return result


def run_attention(record: Record, *, dry: bool) -> None:
    rate = record.attempt("copy", lambda: {"bytes_s": copy_rate(dry=dry)})
    llama = Case("llama", (4, 2), dtype=torch.float16) if dry else Case("llama", (32, 8))

    def one(shape: Shape) -> dict[str, Any]:
        result = check(llama, shape, n_checked=8, n_layers=COLD)
        n_bytes = shape.n_slots * llama.heads[1] * sum(llama.dims) * llama.dtype.itemsize
        share = n_bytes / rate["bytes_s"] / result["ms"] * 1e3 if rate else None
        return {**result, "read_bytes": n_bytes, "share_of_copy_rate": share}

    for name, shape in trees(dry=dry).items():
        record.attempt("tree", partial(one, shape), tree=name)

    before, n = (30, 260) if dry else (12288, 2048)
    for has_broad in (True, False):
        job = partial(read_on, llama, before, n, has_broad=has_broad)
        record.attempt("prompt", job, before=before, tokens=n, has_broad=has_broad)

    small = Shape((1, 3), (40, 5)) if dry else Shape((1, 4, 12), (300, 70, 9))
    for case in cases(dry=dry):
        named = {"case": case.name, "dtype": str(case.dtype).removeprefix("torch.")}
        record.attempt("kernel", partial(check, case, small, min_s=0.02), **named)

    # What follows decides numbers that were guessed; a run that takes long may end before them.
    record.attempt("host", partial(to_host_and_back, llama, 60 if dry else 4096))
    wide = list(trees(dry=dry).items())[1:]
    for name, shape in wide:
        for n_programs in (132, 264):
            job = partial(cut, llama, shape, n_programs)
            record.attempt("cut", job, tree=name, programs=n_programs)
    n_deep, n_leaves = (6, 4) if dry else (100, 32)
    chain = Shape((1,) * n_deep + (n_leaves,), (20,) * n_deep + (32,))
    forked = Shape((1, n_leaves // 4, 2 * n_leaves), (60, 40, 32))
    for shape, worth in product(
        (chain, forked), (-1, prefix_index._PART, 16)
    ):  # each alone at first
        job = partial(handed_down, llama, shape, worth)
        record.attempt("deep", job, leaves=shape.n_leaves, depth=len(shape.counts), worth=worth)


def run_tiles(record: Record, *, dry: bool) -> None:
    """Time tiles as they are and otherwise, in turn; not a part of `make gpu-check`."""
    llama = Case("llama", (4, 2), dtype=torch.float16) if dry else Case("llama", (32, 8))
    for name, shape in list(trees(dry=dry).items())[1:]:
        for n_rows, options in ((kernel.NARROW, {}), *OTHER_TILES):
            job = partial(tiled, llama, shape, n_rows, options)
            record.attempt("tiles", job, tree=name, tile=n_rows, **options)


def run_draws(record: Record, *, dry: bool) -> None:
    for rule in RULES:
        for n in (1, 3) if dry else (1, 64, 512):
            record.attempt("draw", partial(draw, rule, n, dry=dry), rule=rule, rows=n)


class Mixture(NamedTuple):
    """The experts of one layer: how many, of them a token's; numbers of a token, and between."""

    n_experts: int
    top_k: int
    size: int
    between: int


MIXTURES = {
    "Qwen3 30B-A3B": Mixture(128, 8, 2048, 768),
    "Mixtral 8x7B": Mixture(8, 2, 4096, 14336),
}

ROUTERS = {
    "Qwen3 30B-A3B": (
        Qwen3MoeTopKRouter,
        partial(Qwen3MoeConfig, hidden_size=2048, num_experts=128, norm_topk_prob=True),
    ),
    "DeepSeek V3": (DeepseekV3TopkRouter, DeepseekV3Config),
}


@torch.inference_mode()
def mix(module: Any, of: Mixture, n: int, rate: float | None) -> dict[str, Any]:
    """Let n tokens go through their experts both ways; hold some of them against each pair."""
    random = torch.Generator(device()).manual_seed(n)
    dtype = module.down_proj.dtype
    x = torch.randn(n, of.size, device=device(), generator=random).to(dtype)
    logits = torch.rand(n, of.n_experts, device=device(), generator=random)
    shares, chosen = logits.softmax(-1).topk(of.top_k, -1)
    shares = (shares / shares.sum(-1, keepdim=True)).to(dtype)
    weights = MoEWeights(module.gate_up_proj, module.down_proj, gate=GatedActivation("silu"))
    ours = partial(experts.fused_experts, x, chosen, shares, weights)
    theirs = partial(module, x, chosen, shares)
    result: dict[str, Any] = {}
    for name, job in (("kernels", ours), ("transformers", theirs)):
        seconds, is_alone = timed_alone(job, 0.05)
        result |= {f"{name}_ms": seconds * 1e3, f"{name}_captured": is_alone}
    n_bytes = len(chosen.unique()) * 3 * of.size * of.between * dtype.itemsize
    if rate:
        result["share_of_copy_rate"] = n_bytes / rate / result["kernels_ms"] * 1e3
    some = slice(0, min(n, 8))
    want = each_pair(x[some], chosen[some], shares[some], weights)
    for name, job in (("kernels", ours), ("transformers", theirs)):
        result[f"{name}_off"] = float(((job()[some] - want).std() / want.std()).cpu())
    if not result["kernels_off"] <= max(1e-5, 1.5 * result["transformers_off"]):
        raise AssertionError(f"experts are {result['kernels_off']:.3g} off")
    return result


def each_pair(x: Tensor, chosen: Tensor, shares: Tensor, weights: MoEWeights) -> Tensor:
    """Return what experts make of tokens, pair by pair in float32."""
    out = torch.zeros(x.shape, device=x.device)
    for token, ids in enumerate(chosen.tolist()):
        for n, share in zip(ids, shares[token], strict=True):
            gate, up = (weights.up[n].float() @ x[token].float()).chunk(2)
            out[token] += weights.down[n].float() @ (silu(gate) * up) * share.float()
    return out


def run_experts(record: Record, *, dry: bool) -> None:
    rate = record.attempt("copy", lambda: {"bytes_s": copy_rate(dry=dry)})
    for name, of in ({"toy": Mixture(6, 2, 48, 40)} if dry else MIXTURES).items():
        config = MixtralConfig(
            hidden_size=of.size, intermediate_size=of.between, num_local_experts=of.n_experts
        )
        config._experts_implementation = "grouped_mm"
        with torch.device(device()):
            module = MixtralExperts(config).to(torch.float32 if dry else torch.bfloat16)
        for weight in module.parameters():
            torch.nn.init.normal_(weight, std=of.size**-0.5)
        for n in (1, 7) if dry else (1, 8, 32, 256, 2048):
            job = partial(mix, module, of, n, rate and rate["bytes_s"])
            record.attempt("experts", job, mixture=name, rows=n)
        del module


class Choosing:
    """The parts of a step that a router uses."""

    has_fused_ops = True
    supports_routing = staticmethod(routers.supports_routing)
    select_experts = staticmethod(routers.select_experts)


def router_of(name: str, *, dry: bool) -> Any:
    """Return a router with random weights, as our copy of a model has it, and its seats' call."""
    kind, config = ROUTERS[name]
    module = kind(config()).to(device(), torch.float32 if dry else torch.bfloat16)
    torch.nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
    box = torch.nn.ModuleList([module])
    call = attach_context(box)
    if not fuse_routers(box, module.weight.dtype):
        raise AssertionError(f"the router of {name} is not known")
    return module, call


@torch.inference_mode()
def route(module: Any, call: Any, n: int) -> dict[str, Any]:
    """Let a router choose for n tokens both ways: it all, the product for its logits, too."""
    random = torch.Generator(device()).manual_seed(n)
    weight = module.weight
    x = torch.randn(n, weight.shape[1], device=device(), generator=random).to(weight.dtype)
    result: dict[str, Any] = {}
    chosen: list[Tensor] = []
    for name, step in (("transformers", None), ("kernel", Choosing())):
        call.step = step
        seconds, is_alone = timed_alone(partial(module, x), 0.05)
        result |= {f"{name}_ms": seconds * 1e3, f"{name}_captured": is_alone}
        chosen.append(module(x)[2].sort(-1).values)
    call.step = None
    result["same"] = float((chosen[0] == chosen[1]).all(-1).float().mean())
    if result["same"] < 0.9:  # logits round to the same number here and there
        raise AssertionError(f"a router chooses the same for {result['same']:.0%} of the rows")
    return result


def run_routers(record: Record, *, dry: bool) -> None:
    for name in ROUTERS:
        module, call = router_of(name, dry=dry)
        for n in (1, 7) if dry else (1, 32, 2048):
            record.attempt("router", partial(route, module, call, n), router=name, rows=n)


PARTS = {
    "attention": run_attention,
    "draws": run_draws,
    "experts": run_experts,
    "routers": run_routers,
    "tiles": run_tiles,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS)[:-1])
    parser.add_argument("--json", required=True, help="the file that gets a JSON line a figure")
    parser.add_argument("--dry", action="store_true", help="toy sizes, on any machine")
    options = parser.parse_args()
    record = Record(options.json)
    for part in options.parts:
        PARTS[part](record, dry=options.dry)


if __name__ == "__main__":
    main()
