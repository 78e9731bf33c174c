"""A loom of 10,000 nodes in its database: opened, paged, searched, cut, undone, grown on.

Nodes have twenty tokens with logprobs and entropies, and a text of their own. In turn in one run on
SQLite and, with `--postgresql` (a URL, or "start" for one that is started here), on PostgreSQL;
milliseconds by the clock, medians over `--repeat`. Wanted: opened in under 2 s, a page of 100 in
under 50 ms, search in under 200 ms, 5,000 nodes removed in under 200 ms and back again. `page` is
read without opening the tree; `commit` is of four new nodes; `append` of four tokens in four nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common import median, report

from weft._core.sampling.params import SamplingParams
from weft.loom import Heddle, Loom
from weft.loom.node import child_list, growing_lists, new_child, set_text, set_tokens
from weft.service.store.library import Library
from weft.service.store.stored_loom import StoredLoom

N_TOKENS = 20
WANTED_MS = {"open": 2000.0, "page": 50.0, "subtree": 50.0, "find": 200.0, "remove": 200.0}
WORDS = "ant bee cat dog elk fox gnu hen ibis jay koi lark mole newt owl pig quail rat".split()


def filled(node: Heddle, rng: random.Random, params: SamplingParams) -> Heddle:
    """Give a node tokens, scores and a text."""
    set_tokens(node, [rng.randrange(30_000) for _ in range(N_TOKENS)])
    set_text(node, " ".join(rng.choice(WORDS) + str(rng.randrange(50)) for _ in range(12)))
    node.logprobs = [-rng.random() for _ in range(N_TOKENS)]
    node.entropies = [rng.random() for _ in range(N_TOKENS)]
    node.params, node.finish_reason = params, "length"
    return node


def big_loom(n_nodes: int) -> Loom:
    """Return a loom in which half of all nodes stand below the first child."""
    rng, params = random.Random(1), SamplingParams.resolve({"seed": 1, "max_tokens": N_TOKENS})
    loom = Loom(None, "a loom of many nodes")
    halves: list[list[Heddle]] = [[], []]
    for at in range(n_nodes - 1):
        half = halves[at % 2]
        parent = rng.choice(half[-400:]) if half else loom
        child = filled(new_child(parent), rng, params)
        child_list(parent).append(child)
        half.append(child)
    return loom


def ms_of(work: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def measured(url: str, n_nodes: int, repeat: int) -> dict[str, float]:
    """Return milliseconds by what was done."""
    took: dict[str, list[float]] = {}

    def time_it(name: str, work: Callable[[], object]) -> None:
        took.setdefault(name, []).append(ms_of(work))

    loom = big_loom(n_nodes)
    with Library(url) as library:
        time_it("create", lambda: library.create(loom))
        name = library.looms(limit=1)[0].name
        for turn in range(repeat):
            kept: list[StoredLoom] = []
            time_it("open", lambda kept=kept: kept.append(library.open(name)))
            one_turn(library, kept[0], turn, time_it)
    return {each: median(values) for each, values in took.items()}


def one_turn(
    library: Library,
    kept: StoredLoom,
    turn: int,
    time_it: Callable[[str, Callable[[], object]], None],
) -> None:
    """Do everything once."""
    n_nodes = kept.loom.count_children()
    time_it("page", lambda: library.nodes(kept.name, limit=100, after=n_nodes // 2))
    time_it("subtree", lambda: library.nodes(kept.name, under=1, limit=100))
    time_it("find", lambda: library.find(f"fox{turn} ow*"))
    time_it("find a common word", lambda: library.find("fox*"))
    leaf = kept.loom.leaves[turn]
    rng = random.Random(turn)
    new = [filled(new_child(leaf), rng, SamplingParams()) for _ in range(4)]
    child_list(leaf).extend(new)
    time_it("commit", lambda: kept.commit("grow"))
    growing = [new_child(leaf) for _ in range(4)]
    for step in range(3):
        for node in growing:
            for values, value in zip(growing_lists(node), (7, -0.5, 0.5), strict=True):
                values.extend([value] * 4)  # type: ignore[list-item]
        if step:
            time_it("append", lambda: kept.append(growing))
        else:
            kept.append(growing)
    for node in growing:
        node.finish_reason = "error"
    time_it("nothing", lambda: kept.commit("nothing"))
    top = kept.node(1)
    n_below = top.count_children()
    assert n_below > n_nodes / 3, n_below
    top.remove()
    time_it("remove", lambda: kept.commit("remove"))
    assert kept.loom.count_children() <= n_nodes + 4 - n_below
    time_it("undo", kept.undo)
    assert kept.loom.count_children() == n_nodes + 4
    time_it("redo", kept.redo)
    kept.undo()


@contextlib.contextmanager
def databases(postgresql: str | None) -> Iterator[dict[str, str]]:
    """Yield URLs of new databases, by name."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        urls = {"sqlite": f"sqlite:///{folder}/weft.db"}
        if postgresql == "start":
            sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
            from postgres import cluster

            urls["postgresql"] = stack.enter_context(cluster()).url("bench")
        elif postgresql:
            urls["postgresql"] = postgresql
        yield urls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--postgresql", metavar="URL")
    args = parser.parse_args()
    with databases(args.postgresql) as urls:
        times = {name: measured(url, args.nodes, args.repeat) for name, url in urls.items()}
    rows = [
        {
            "what": what,
            **{name: round(of[what], 1) for name, of in times.items()},
            "wanted": WANTED_MS.get(what, ""),
        }
        for what in times["sqlite"]
    ]
    report("store", rows, nodes=args.nodes)


if __name__ == "__main__":
    main()
