"""Trees on a card: milliseconds a step through engine and scheduler, and of other libraries.

A random model of the shape of Llama 3 8B in bfloat16. Parts, each a run of its own:

  trees    `Loom.grow` over each tree of the targets, sampling included: the median time between two
           forwards while all leaves grow; the floor (weights and unique KV by the card's own copy
           rate, or products by its own product rate); the engine alone, over the tree and with
           every path read on its own (flat)
  prefill  tokens a second of a long prompt, as a share of the measured product rate
  callers  full-vocabulary log-probabilities for many concurrent AsyncLM callers, and decode
  hf       Transformers' `generate`, and its continuous batching

Each figure is a JSON line in the file of `--json`; what fails is a line, and the rest goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from gpu_model import (
    GOALS,
    Record,
    Shape,
    copy_rate,
    device,
    llama,
    product_rate,
    prompt,
    read_bytes,
    synchronise,
    timed,
    tree_rows,
    trees,
    words,
)
from transformers import GenerationConfig, LlamaForCausalLM

import weft
from weft.engines.base import Row
from weft.engines.torch.engine import open_model
from weft.engines.torch.weight_layout import optimize_layout
from weft.lm.results import Distribution
from weft.loom.heddle import Heddle

TEMPERATURE = 0.8
N_BATCH = 2048
_SETTLES_S = 2.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of the workload."""

    last: int  # steps of a tree that are looked at
    prefill: int
    callers: int
    caller_tokens: int
    shared: int  # tokens that Transformers' branches share
    branches: int
    new: tuple[int, int]  # tokens that it makes, twice: what is between them is decoding


REAL = Sizes(24, 16384, 256, 12, 4096, 32, (8, 40))
DRY = Sizes(3, 40, 3, 2, 24, 2, (2, 4))


def settle() -> None:
    """Let a card's clocks come back, which it lowers for a second after a long prompt."""
    synchronise()
    if device().type == "cuda":
        time.sleep(_SETTLES_S)


class SharedPrefix:
    """A stretch of a card's work; of a CPU's where there is none."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self._is_there = device().type == "cuda"
        self._marks: list[Any] = []

    def __enter__(self) -> Self:
        self._mark()
        return self

    def __exit__(self, *_: object) -> None:
        self._mark()

    def _mark(self) -> None:
        if self._is_there:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self._marks.append(mark)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> float:
        first, last = self._marks
        return float(first.elapsed_time(last) / 1e3 if self._is_there else last - first)


class Ours:
    """The engine and an LM over it; notes when forwards begin, and how long the card takes."""

    def __init__(self, model: LlamaForCausalLM, *, options: dict[str, Any]) -> None:
        self.n_vocab = model.config.vocab_size
        if device().type == "cuda":  # as `TorchEngine.load` does with a model of its own
            optimize_layout(model, None)
        else:
            options = {"graphs": True, **options}
        self.engine: Any = open_model(
            model, n_ctx=None, fingerprint="random", state_bytes=None, **{"kv": "paged", **options}
        )
        free = self.engine.info.extra.get("free_bytes")
        self.lm = weft.LM(
            self.engine,
            words(self.n_vocab),
            n_batch=N_BATCH,
            kv_bytes=None if free is None else int(0.8 * free),
        )
        self.calls: list[tuple[float, int]] = []  # when, and how many rows
        self.forwards: list[SharedPrefix] = []
        forward = self.engine.forward

        def noted(rows: Sequence[Row]) -> Any:
            self.calls.append((time.perf_counter(), len(rows)))
            with SharedPrefix(len(rows)) as stretch:
                output = forward(rows)
            self.forwards.append(stretch)
            return output

        self.engine.forward = noted

    def forward_s(self, n_rows: int) -> float:
        """Median seconds of the forwards of so many rows, from the call to the card's end of it."""
        some = sorted(each.seconds() for each in self.forwards if each.n_rows == n_rows)
        if not some:
            raise RuntimeError(f"no step had {n_rows} rows")
        return some[len(some) // 2]

    def step_s(self, n_rows: int, last: int) -> float:
        """Median seconds between the last forwards of all `n_rows` rows."""
        gaps = [
            later[0] - call[0]
            for call, later in zip(self.calls, self.calls[1:], strict=False)
            if call[1] == later[1] == n_rows
        ]
        if len(gaps) < 2:
            raise RuntimeError(f"{len(gaps)} steps in a row had {n_rows} rows")
        some = sorted(gaps[-last:])
        return some[len(some) // 2]

    def looms(self, n: int, length: int) -> list[Heddle]:
        """Return n prompts of so many tokens, read; several where nothing is shared."""
        heads = [weft.Loom(self.lm, prompt(length, self.n_vocab, number)) for number in range(n)]

        async def read() -> list[Distribution]:
            return await asyncio.gather(*(head.anext(1) for head in heads))

        asyncio.run(read())
        return list(heads)

    def grow(self, shape: Shape, last: int) -> dict[str, Any]:
        """Grow a tree, level by level; return how long its last steps took."""
        n_above, length = shape.counts[0], shape.lengths[0]
        counts, lengths = list(shape.counts[1:]), list(shape.lengths[1:])
        if not counts or n_above > 1:  # the prompts' last tokens are grown
            n_grown = min(3 * last, length // 2)
            counts, lengths, length = [n_above, *counts], [n_grown, *lengths], length - n_grown
        level = self.looms(n_above, length)
        settle()
        began = time.perf_counter()
        for count, length in zip(counts, lengths, strict=True):
            self.calls.clear()
            n_each = count // n_above

            async def more(level: list[Heddle] = level, n: int = n_each, k: int = length) -> Any:
                return await asyncio.gather(
                    *(node.agrow(n=n, max_tokens=k, temperature=TEMPERATURE) for node in level)
                )

            level = [child for grown in asyncio.run(more()) for child in grown]
            n_above = count
        took = time.perf_counter() - began
        step_s = self.step_s(shape.n_leaves, last)
        n_tokens = sum(len(node.tokens) for node in level)
        return {"ms": step_s * 1e3, "grown_s": took, "last_level_tokens": n_tokens}

    def alone(self, shape: Shape, *, flat: bool) -> float:
        """Seconds of a forward of the engine alone, logits included, draws not."""
        memory = self.engine.fragments
        rows, fragments = tree_rows(shape, memory, flat=flat)
        try:

            def step() -> None:
                self.engine.forward(rows)
                for row in rows:
                    row.position += 1

            for _ in range(3):
                step()
            return timed(step, 0.05)
        finally:
            for fragment in fragments:
                memory.free(fragment)

    def forget(self) -> None:
        self.lm.clear_cache()


def floor_ms(model: Any, shape: Shape, kv_bytes: int, rates: dict[str, float]) -> dict[str, float]:
    """The least a step can take, by what it reads and by what it multiplies."""
    n_bytes = model.read_bytes + shape.n_slots * kv_bytes
    products = 2 * model.n_numbers * shape.n_leaves
    by_bytes, by_products = n_bytes / rates["copy"], products / rates["product"]
    return {"floor_ms": max(by_bytes, by_products) * 1e3, "read_bytes": n_bytes}


class Weights:
    """The parts of a model that a step reads and multiplies."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.read_bytes = read_bytes(model)
        self.n_numbers = self.read_bytes // model.lm_head.weight.itemsize


def rates_of(record: Record, *, dry: bool) -> dict[str, float]:
    dtype = torch.float32 if dry else torch.bfloat16
    rates = {"copy": copy_rate(dry=dry), "product": product_rate(dtype, dry=dry)}
    record.add("rates", copy_bytes_s=rates["copy"], product_flop_s=rates["product"])
    return rates


def run_trees(record: Record, sizes: Sizes, options: Any) -> None:
    dry = options.dry
    rates = rates_of(record, dry=dry)
    model = llama(dry=dry)
    weights = Weights(model)
    ours = Ours(model, options=options.given)
    kv_bytes = ours.engine.info.kv_bytes_per_token

    def one(name: str, shape: Shape) -> dict[str, Any]:
        result = {**ours.grow(shape, sizes.last), **floor_ms(weights, shape, kv_bytes, rates)}
        result["share_of_floor"] = result["floor_ms"] / result["ms"]
        goal = GOALS.get(name)
        return {**result, **(goal._asdict() if goal else {}), **_engine_stats(ours.engine)}

    def alone(shape: Shape, *, flat: bool) -> dict[str, Any]:
        return {"ms": ours.alone(shape, flat=flat) * 1e3}

    shapes = trees(dry=dry)
    for name, shape in shapes.items():
        record.attempt("tree", partial(one, name, shape), tree=name, leaves=shape.n_leaves)
        ours.forget()
    for number in range(2):  # the first captures steps
        record.attempt("complete job", partial(complete_job, ours, sizes, number), round=number)
    ours.forget()
    for name, shape in shapes.items():
        record.attempt("engine alone", partial(alone, shape, flat=False), tree=name)
        record.attempt("flat reads", partial(alone, shape, flat=True), tree=name)
    ours.lm.close()


def _engine_stats(engine: Any) -> dict[str, Any]:
    """Return the engine's statistics of its steps, if it has any."""
    stats = getattr(engine, "stats", None)
    return {} if stats is None else {"engine": stats()}


def complete_job(ours: Ours, sizes: Sizes, number: int) -> dict[str, Any]:
    """Run the job of `run_hf`: read a prompt and grow its branches."""
    n, n_new = sizes.branches, sizes.new[1]
    began = time.perf_counter()
    loom = weft.Loom(ours.lm, prompt(sizes.shared, ours.n_vocab, 100 + number))
    loom.grow(n=n, max_tokens=n_new, temperature=1.0)
    took = time.perf_counter() - began
    return {"n": n, "prompt": sizes.shared, "s": took, "tok_s": n * n_new / took}


def run_prefill(record: Record, sizes: Sizes, options: Any) -> None:
    rates = rates_of(record, dry=options.dry)
    model = llama(dry=options.dry)
    weights = Weights(model)
    ours = Ours(model, options=options.given)

    def read(number: int) -> dict[str, Any]:
        ids = prompt(sizes.prefill, ours.n_vocab, number)
        synchronise()
        began = time.perf_counter()
        weft.Loom(ours.lm, ids).next(1)
        took = time.perf_counter() - began
        config = model.config
        # Weights without the output layer's, which one token uses; and half of the keys and values.
        n_numbers = weights.n_numbers - config.vocab_size * config.hidden_size
        width = config.num_attention_heads * config.head_dim
        attended = 2 * config.num_hidden_layers * width * sizes.prefill**2
        done = 2 * n_numbers * sizes.prefill + attended
        share = done / took / rates["product"]
        return {"s": took, "tok_s": sizes.prefill / took, "share_of_products": share, "must": 0.6}

    # The first compiles kernels and makes the pool grow.
    for number in range(4):
        record.attempt("prefill", partial(read, number), tokens=sizes.prefill, round=number)
    ours.lm.close()


def run_callers(record: Record, sizes: Sizes, options: Any) -> None:
    ours = Ours(llama(dry=options.dry), options=options.given)
    ids = prompt(64, ours.n_vocab)
    n, n_new = sizes.callers, sizes.caller_tokens

    def sampled() -> dict[str, Any]:
        loom = weft.Loom(ours.lm, ids)
        loom.next(1)
        ours.calls.clear()
        ours.forwards.clear()
        loom.grow(n=n, max_tokens=n_new + 2, temperature=1.0)
        synchronise()
        return {"ms": ours.step_s(n, n_new) * 1e3, "engine_ms": ours.forward_s(n) * 1e3}

    def logprobs(way: dict[str, bool], n_before: int) -> dict[str, Any]:
        model = weft.AsyncLM(ours.lm, **way)

        async def one(number: int) -> None:
            path = list(ids)
            for step in range(n_new):
                row = await model.next_token_logprobs(path)
                assert len(row) == ours.n_vocab
                path.append((7 * number + 31 * step + 1 + n_before) % ours.n_vocab)

        async def all_of_them() -> None:
            await asyncio.gather(*(one(number) for number in range(n)))

        ours.forwards.clear()
        began = time.perf_counter()
        asyncio.run(all_of_them())
        took = time.perf_counter() - began
        synchronise()
        return {
            "s": took,
            "steps": len(ours.forwards),
            "ms": took / n_new * 1e3,
            "engine_ms": ours.forward_s(n) * 1e3,
        }

    record.attempt("sampled decode", sampled, callers=n)
    ours.forget()
    for way in ({"on_device": True}, {"as_torch": True}, {"as_torch": False}):
        for number in range(2):  # the first captures steps, and makes the pool grow
            job = partial(logprobs, way, number)
            record.attempt("callers", job, callers=n, tokens=n_new, round=number, **way)
        ours.forget()
    ours.lm.close()


def run_hf(record: Record, sizes: Sizes, options: Any) -> None:
    """Transformers on its own: nothing of Weft's has touched the model."""
    model = llama(dry=options.dry)
    n_vocab = model.config.vocab_size

    def generate(n: int, length: int) -> dict[str, Any]:
        ids = torch.tensor([prompt(length, n_vocab)] * n, device=device())
        times = []
        for new in (2, *sizes.new):  # the first warms up
            synchronise()
            began = time.perf_counter()
            with torch.inference_mode():
                model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new,
                    min_new_tokens=new,
                    do_sample=True,
                    pad_token_id=0,
                )
            synchronise()
            times.append(time.perf_counter() - began)
        step_s = (times[2] - times[1]) / (sizes.new[1] - sizes.new[0])
        return {"ms": step_s * 1e3, "s": times[2], "tok_s": n * sizes.new[1] / times[2]}

    short = 12 if options.dry else 128
    for n, length in ((1, short), (sizes.branches, sizes.shared)):
        record.attempt("generate", partial(generate, n, length), n=n, prompt=length)

    def batching() -> dict[str, Any]:
        ids = prompt(sizes.shared, n_vocab)
        config = GenerationConfig(
            max_new_tokens=sizes.new[1], do_sample=True, eos_token_id=-1, pad_token_id=0
        )
        brief = copy.deepcopy(config)
        brief.max_new_tokens = 4
        took, outputs = 0.0, {}
        for n, given in ((2, brief), (sizes.branches, config)):  # the first warms up
            synchronise()
            began = time.perf_counter()
            outputs = model.generate_batch(
                inputs=[ids] * n, generation_config=given, progress_bar=False
            )
            synchronise()
            took = time.perf_counter() - began
        n_tokens = sum(len(each.generated_tokens) for each in outputs.values())
        if not n_tokens:
            raise RuntimeError("continuous batching returned no tokens")
        return {"s": took, "tokens": n_tokens, "tok_s": n_tokens / took}

    record.attempt("continuous batching", batching, n=sizes.branches, prompt=sizes.shared)


PARTS = {"trees": run_trees, "prefill": run_prefill, "callers": run_callers, "hf": run_hf}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--json", required=True, help="the file that gets a JSON line a figure")
    parser.add_argument("--dry", action="store_true", help="toy sizes, on any machine")
    parser.add_argument("--option", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    options = parser.parse_args()
    options.given = dict(options.option)
    record = Record(options.json)
    for part in options.parts:
        try:
            PARTS[part](record, DRY if options.dry else REAL, options)
        except Exception as error:
            record.add(part, error=f"{type(error).__name__}: {error}"[:500])


if __name__ == "__main__":
    main()
