"""A tree that is gone on with anywhere, as Monte Carlo tree search and people at a loom do it.

A prompt of 256 tokens. Each round takes some nodes, half of them among the newest and half among
all, and grows two children of `each` tokens below each of them; every fourth round a node is
removed with all below it. Which nodes is the same on all sides. Sides, in turn in one run:

  numpy, torch  Loom.grow(at=those nodes) and Heddle.remove
  by hand       Transformers: every node keeps the DynamicCache of its path, copied for its
                children; a node's children are one batch, nodes of other lengths another
  generate      Transformers' generate over all rows of a round, their texts padded on the left

The embedded model, temperature 1, end tokens banned; CPU seconds of one thread for all rounds, the
median over the repeats, tokens a second, and the most KV at a time. x: by hand, by this side.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
from common import median, report
from transformers import AutoModelForCausalLM, DynamicCache

import weft
from weft.engines.torch.model import cache_name

N_PROMPT, N_CHILDREN, PRUNE_EVERY = 256, 2, 4
PROMPT = [(7 * i * i + 13 * i + 5) % 500 + 4 for i in range(N_PROMPT)]
TINY = files("weft") / "data" / "tiny"


class Walk:
    """The numbers of the nodes to grow and remove: the same on every side."""

    def __init__(self, rounds: int, at_once: int) -> None:
        self.rounds = rounds
        self.at_once = at_once

    def run(self, grow: Callable[[list[int]], None], remove: Callable[[list[int]], None]) -> None:
        """Nodes are numbered as they come; the root is 0."""
        chance = random.Random(7)
        parents: dict[int, int] = {}
        there, n_nodes = [0], 1
        for number in range(self.rounds):
            newest = there[-2 * self.at_once :]
            n = min(self.at_once, len(there))
            taken = [chance.choice(newest if i % 2 else there) for i in range(n)]
            taken = list(dict.fromkeys(taken))
            grow(taken)
            for parent in taken:
                for _ in range(N_CHILDREN):
                    parents[n_nodes] = parent
                    there.append(n_nodes)
                    n_nodes += 1
            if number % PRUNE_EVERY == PRUNE_EVERY - 1:
                gone = {chance.choice(there[1:])}
                for node in there:  # children come after their parents
                    if parents.get(node) in gone:
                        gone.add(node)
                there = [node for node in there if node not in gone]
                remove(sorted(gone))


class Ours:
    """The tree in a Loom."""

    def __init__(self, engine: str) -> None:
        self.lm = weft.load("tiny", engine=engine)
        self.no_end = {token: float("-inf") for token in self.lm.text.stop_ids}

    def run(self, walk: Walk, each: int) -> tuple[int, int]:
        self.lm.clear_cache()
        loom = weft.Loom(self.lm, PROMPT)
        nodes: list[weft.Heddle] = [loom]
        max_bytes = 0

        def grow(taken: list[int]) -> None:
            nonlocal max_bytes
            at = [nodes[number] for number in taken]
            nodes.extend(
                loom.grow(N_CHILDREN, at=at, max_tokens=each, logit_bias=self.no_end, **PLAIN)
            )
            max_bytes = max(max_bytes, self.lm.stats().kv_bytes)

        walk.run(grow, lambda gone: nodes[gone[0]].remove())
        return sum(len(node.tokens) for node in nodes[1:]), max_bytes


PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


class ByHand:
    """Each node keeps the cache of its path and the logits at its end."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(str(TINY)).eval()
        self.cache_name = cache_name(self.model)
        ends = self.model.generation_config.eos_token_id
        self.ends = [ends] if isinstance(ends, int) else list(ends or ())

    @torch.inference_mode()
    def run(self, walk: Walk, each: int) -> tuple[int, int]:
        config = self.model.config
        cache = DynamicCache(config=config)
        logits = self.model(torch.tensor([PROMPT]), **{self.cache_name: cache}).logits[0, -1]
        kept: dict[int, tuple[Any, torch.Tensor]] = {0: (cache, logits)}
        n_nodes, n_tokens, max_bytes = 1, 0, 0

        def grow(taken: list[int]) -> None:
            nonlocal n_nodes, n_tokens, max_bytes
            for number in taken:
                above, logits = kept[number]
                cache = copy.deepcopy(above)
                cache.batch_repeat_interleave(N_CHILDREN)
                rows = logits.expand(N_CHILDREN, -1)
                for _ in range(each):
                    ids = self.draw(rows)
                    rows = self.model(ids, **{self.cache_name: cache}).logits[:, -1]
                    n_tokens += N_CHILDREN
                for row in range(N_CHILDREN):
                    own = copy.deepcopy(cache)
                    own.batch_select_indices(torch.tensor([row]))
                    kept[n_nodes] = own, rows[row]
                    n_nodes += 1
            max_bytes = max(max_bytes, sum(n_bytes(cache) for cache, _ in kept.values()))

        def remove(gone: list[int]) -> None:
            for number in gone:
                del kept[number]

        walk.run(grow, remove)
        return n_tokens, max_bytes

    def draw(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[:, self.ends] = float("-inf")
        return torch.multinomial(rows.softmax(-1), 1)


def n_bytes(cache: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


class Generate(ByHand):
    """Nodes are texts: each round reads all of them."""

    @torch.inference_mode()
    def run(self, walk: Walk, each: int) -> tuple[int, int]:
        texts = {0: PROMPT}
        n_nodes, n_tokens = 1, 0

        def grow(taken: list[int]) -> None:
            nonlocal n_nodes, n_tokens
            rows = [texts[number] for number in taken for _ in range(N_CHILDREN)]
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
            outputs = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=each,
                suppress_tokens=self.ends,
                pad_token_id=0,
            )
            for row, out in zip(rows, outputs[:, width:].tolist(), strict=True):
                texts[n_nodes] = row + out
                n_nodes += 1
                n_tokens += len(out)

        walk.run(grow, lambda gone: None)
        return n_tokens, 0


def measured(walk: Walk, each: int, repeats: int, engines: list[str]) -> Iterator[dict[str, Any]]:
    sides: dict[str, Any] = {engine: Ours(engine) for engine in engines}
    sides |= {"by hand": ByHand(), "generate": Generate()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    results: dict[str, tuple[int, int]] = {}
    for side in sides.values():
        side.run(Walk(3, walk.at_once), each)
    for _ in range(repeats):
        for name, side in sides.items():
            began = time.process_time()
            results[name] = side.run(walk, each)
            times[name].append(time.process_time() - began)
    for name, took in times.items():
        n_tokens, max_bytes = results[name]
        yield {
            "rounds": walk.rounds,
            "nodes a round": walk.at_once,
            "tokens each": each,
            "side": name,
            "s": median(took),
            "tok/s": n_tokens / median(took),
            "KV MB": max_bytes / 1e6 if max_bytes else None,
            "x": median(a / b for a, b in zip(times["by hand"], took, strict=True)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", nargs="+", default=["numpy", "torch"])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--each", type=int, nargs="+", default=[12])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = [
        row
        for at_once in options.at_once
        for each in options.each
        for row in measured(Walk(options.rounds, at_once), each, options.repeats, options.engines)
    ]
    report("wild_trees", rows)


if __name__ == "__main__":
    main()
