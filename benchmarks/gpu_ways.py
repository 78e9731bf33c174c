"""What it is worth on a card to launch kernels early, and to ask for weights ahead.

A random model of the shape of Llama 3 8B in bfloat16, and trees of few leaves, their KV as it lies
in memory. A step of a tree is captured once for each of `weft.engines.torch.paged.launches.Ways`,
over the same state; the captured steps are then played in turn, so that a clock which drifts does
so for all of them. A figure is a JSON line in the file of `--json`: microseconds a step of the
layers, without the output layer and draws, and how many times the step as it is: medians of the
rounds. What the layers make must be the same to the bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from common import median
from gpu_check import LOST
from gpu_model import Record, Shape, is_lost, llama, timed, tree_rows, trees
from gpu_tree import Ours
from torch import Tensor

from weft.engines.torch.paged import launches
from weft.engines.torch.paged.capture import Replay
from weft.engines.torch.paged.cuda_graph import CudaGraphRunner
from weft.engines.torch.paged.launches import Ways

_MB = 1 << 20
_PLAIN = "as it is"
# Those that are launched early come by themselves: a driver may not like them.
WAYS: list[dict[str, Ways]] = [
    {
        "norms and gates ask for 8 MB": Ways(short=8 * _MB),
        "norms and gates ask for 16 MB": Ways(short=16 * _MB),
        "the same, of the first rows": Ways(short=16 * _MB, by_row=False),
        "the turn asks for 16 MB": Ways(turn=16 * _MB),
        "the merge asks for 16 MB": Ways(merge=16 * _MB),
        "norms, gates and the merge": Ways(short=16 * _MB, merge=16 * _MB),
        "norms, gates and the turn": Ways(short=16 * _MB, turn=16 * _MB),
    },
    {
        "early": Ways(is_early=True),
        "early, norms, gates and the merge": Ways(True, short=16 * _MB, merge=16 * _MB),
    },
]
_STEPS = 4  # two alike are run, one is captured, and one is played
_MOST_LEAVES = 64


class Ready:
    """A tree, and a step of it captured for each way."""

    def __init__(self, ours: Ours, shape: Shape) -> None:
        self._engine, self._shape = ours.engine, shape
        self._memory = ours.engine.fragments
        self._rows, self._held = tree_rows(shape, self._memory)
        self._graphs: list[CudaGraphRunner] = []
        self.replays: dict[str, Replay] = {}
        self._made: Tensor | None = None

    def capture(self, name: str, ways: Ways) -> dict[str, Any]:
        """Capture a step, play it, and compare what it makes. Returns whether it is the same."""
        before: CudaGraphRunner = self._engine._graphs
        graphs = CudaGraphRunner(before._call, self._memory, before._record, before._weights_lie)
        self._graphs.append(graphs)
        self._rewind()
        launches.use(ways)
        self._engine._graphs = graphs
        try:
            for _ in range(_STEPS):
                n_moves = self._memory.n_moves
                self._engine.forward(self._rows)
                for row in self._rows:
                    row.position += 1
        finally:
            launches.use(Ways())
        if not graphs.n_played:
            raise RuntimeError(f"no step was captured: {graphs.why_eager}")
        if self._memory.n_moves != n_moves:
            raise RuntimeError("the pool has moved")
        ((_, replay),) = graphs._frames.values()
        replay.play()
        made = replay.hidden.clone()
        self._made = made if self._made is None else self._made
        is_same = bool((made.view(torch.int8) == self._made.view(torch.int8)).all())
        self.replays[name] = replay
        return {"is_same": is_same, **graphs.told()}

    def _rewind(self) -> None:
        for row in self._rows:
            self._memory.trim(row.kv_out, self._shape.lengths[-1])
            row.position = self._shape.depth

    def close(self) -> None:
        for graphs in self._graphs:
            graphs.forget()
        for fragment in self._held:
            self._memory.free(fragment)


@torch.inference_mode()
def compare(ours: Ours, shape: Shape, ways: dict[str, Ways], record: Record, **of: Any) -> None:
    """Note what each way takes beside the step as it is."""
    ready = Ready(ours, shape)
    n_rounds, least_s = (7, 0.1) if torch.cuda.is_available() else (1, 0.0)
    try:
        for name, chosen in {_PLAIN: Ways(), **ways}.items():
            try:
                record.add("capture", way=name, **ready.capture(name, chosen), **of)
            except Exception as error:
                record.add("capture", way=name, error=told(error), **of)
                if is_lost():
                    sys.exit(LOST)
        took: dict[str, list[float]] = {name: [] for name in ready.replays}
        for _ in range(n_rounds):
            for name, replay in ready.replays.items():
                took[name].append(timed(replay.play, least_s))
        for name, each in took.items():
            ratios = [mine / plain for mine, plain in zip(each, took[_PLAIN], strict=True)]
            record.add("way", way=name, us=median(each) * 1e6, x=median(ratios), **of)
    finally:
        ready.close()


def run(record: Record, names: Sequence[str] | None, *, dry: bool) -> None:
    ours = Ours(llama(dry=dry), options={})
    first = ours.engine._graphs
    for ways in WAYS:
        for name, shape in trees(dry=dry).items():
            if name in names if names is not None else shape.n_leaves <= _MOST_LEAVES:
                try:
                    compare(ours, shape, ways, record, tree=name)
                except Exception as error:
                    record.add("way", tree=name, error=told(error))
                ours.engine._graphs = first
    ours.lm.close()


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", required=True, help="the file that gets a JSON line a figure")
    parser.add_argument("--trees", nargs="+", help="by their names; those of few leaves otherwise")
    parser.add_argument("--dry", action="store_true", help="toy sizes, on any machine")
    options = parser.parse_args()
    run(Record(options.json), options.trees, dry=options.dry)


if __name__ == "__main__":
    main()
