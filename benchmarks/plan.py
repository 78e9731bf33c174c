"""The host's cost of the plan of a step over paged KV, as the shape of the tree changes.

512 leaves below 21 nodes, whose last slots are used up at different steps. A step here is
`PagedBackend.begin` and `PagedStep.work`, on a CPU's tensors, without the model: process CPU time,
medians of `--rounds` rounds in which all kinds of steps take turns. Milliseconds; "over steady" is
what the change costs.

  steady        every leaf goes on
  ended         one is no more
  joined        one is new, below a node that others are below
  replaced      both at once: one run ends, another begins
  16 replaced   the same of sixteen
  all new       the plan is created from nothing

`--below N` puts the tree below a path of N short nodes, as a search leaves one. Items a KV head and
parts of its query heads (64 rows of 128 numbers in float32 are 32 kB) are those of the last step.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from common import median, report
from gpu_model import Shape, shape_of, tree_rows

from weft.engines.base import Row
from weft.engines.torch.layout import LayerShape, Layout
from weft.engines.torch.paged import attention_metadata
from weft.engines.torch.paged.pool import GROW_BY, as_paged
from weft.engines.torch.paged.step import PagedBackend

TREE = "1,4,16,512;1024,256,128,32"
SHORT = 20  # tokens
GROUP = 4


def advance_slots(
    positions: torch.Tensor, n_on: int, bases: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """In the place of the one kernel, which the interpreter would take milliseconds for."""
    positions += n_on
    return table.index_select(0, bases + positions)


class Leaves:
    """The rows of a tree's leaves, that take a token a step."""

    def __init__(self, tree: str, below: int) -> None:
        half = torch.float16
        layout = Layout.from_shapes([LayerShape(8, 16, 16, half, half)], torch.device("cpu"))
        self.memory, self.random = PagedBackend(layout), random.Random(1)
        counts, lengths = shape_of(tree)
        shape = Shape((1,) * below + counts, (SHORT,) * below + lengths)
        self.rows, _ = tree_rows(shape, self.memory)
        for number, row in enumerate(self.rows):  # they need slots at different steps
            kv, n = as_paged(row.kv_out), number % GROW_BY
            self.memory.reserve(kv, n)
            self.memory.grew(kv, n)
            row.position += n

    def step(self) -> float:
        """Run a step without its model; return the CPU ms of what is timed."""
        began = time.process_time()
        step = self.memory.begin(self.rows)
        self.work = step.work(GROUP)
        took = time.process_time() - began
        step.commit()
        for row in self.rows:
            row.position += 1
        return took * 1e3

    def end(self) -> Row:
        row = self.rows.pop(self.random.randrange(len(self.rows)))
        self.memory.free(as_paged(row.kv_out))
        return row

    def join(self, sibling: Row) -> None:
        position = sum(span.length for span in sibling.prefix)
        self.rows.append(Row(sibling.prefix, [5], position, self.memory.new(None), (0,)))

    def replace(self, n: int = 1) -> None:
        gone = [self.end() for _ in range(n)]
        for row in gone:
            self.join(row)

    def forget(self) -> None:
        self.memory._plan = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tree", default=TREE, help="counts;lengths of its levels")
    parser.add_argument("--below", type=int, default=0, help="short nodes above the tree")
    options = parser.parse_args()
    torch.set_num_threads(1)
    attention_metadata.advance_slots = advance_slots
    leaves = Leaves(options.tree, options.below)
    gone: list[Row] = []
    changes: dict[str, Callable[[], object]] = {
        "steady": lambda: None,
        "ended": lambda: gone.append(leaves.end()),
        "joined": lambda: leaves.join(gone.pop()),
        "replaced": leaves.replace,
        "16 replaced": lambda: leaves.replace(min(16, len(leaves.rows) // 4)),
        "all new": leaves.forget,
    }
    taken: dict[str, list[float]] = {name: [] for name in changes}
    with torch.inference_mode():
        for _ in range(options.rounds + 3):
            for name, change in changes.items():
                change()
                taken[name].append(leaves.step())
                for _ in range(leaves.random.randrange(1, 4)):  # or kinds and slots keep in step
                    leaves.step()
    ms = {name: median(each[3:]) for name, each in taken.items()}
    rows = [
        {"step": name, "ms": each, "over steady": each - ms["steady"]} for name, each in ms.items()
    ]
    print(f"{sum(map(len, leaves.work.by_tile))} items, {leaves.work.n_parts} parts")
    report("plan", rows, **vars(options), group=GROUP, n_parts=leaves.work.n_parts)


if __name__ == "__main__":
    main()
