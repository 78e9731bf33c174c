"""`weft demo`: a puzzle that greedy decoding fails at, and a tree search that solves it."""

from __future__ import annotations

import io
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..viz.terminal import TerminalWriter, write_object
from . import hints, options, solve
from .failures import handle_errors
from .model import TINY, load_model

if TYPE_CHECKING:
    from ..search import SearchResult

SEED = 1
# The width of a column on a terminal of 80 columns.
_WIDTH = 36


@handle_errors
def demo(as_json: options.Json = False, verbose: options.Verbose = 0) -> None:
    """Compare greedy decoding with a tree search on a puzzle."""
    from .. import samples
    from ..loom import Loom
    from ..search import adaptive, greedy

    out = TerminalWriter.for_stream(io.StringIO() if as_json else sys.stdout)
    began = time.perf_counter()
    with load_model(TINY) as lm:
        out.line(
            ("weft demo", "bold"),
            " · the embedded model of 6.8 million parameters, on this CPU",
        )
        out.line()
        out.line((samples.hard24, "bold"), "  Each number once; the value must be 24.")
        out.line()
        likeliest = greedy(lm, samples.hard24)
        loom: Loom = Loom(lm, samples.hard24)
        searched = solve.run_with_display(
            out, loom, lambda progress: adaptive(lm, loom, seed=SEED, progress=progress)
        )
        if as_json:
            from ..service.store.json_output import stats_object

            arms = {"greedy": report(likeliest), "tree_search": report(searched)}
            seconds = time.perf_counter() - began
            stats = stats_object(lm.stats())
            write_object(
                {
                    "model": TINY,
                    "prompt": samples.hard24,
                    **arms,
                    "seconds": seconds,
                    "stats": stats,
                }
            )
            return
        out.console.print(side_by_side(out, likeliest, searched))
        out.line()
        out.line(("the tree of the search", "bold"), "; scores: the model's verdict on each step")
        out.line()
        out.console.print(solve.picture_of(out, searched.loom, searched.best))
        out.line()
        out.line((f"chosen because {searched.reason}", "dim"))
        out.facts(str(lm.stats()), "bold")
    hints.suggest(
        ["weft", "run", samples.story, "-n", "4"],
        ["weft", "solve", samples.game24],
        ["weft", "doctor"],
    )


def side_by_side(out: TerminalWriter, likeliest: SearchResult, searched: SearchResult) -> Table:
    """Return a table of two columns: text, verdict of the task's check, tokens and seconds."""
    table = Table.grid(padding=(0, 4))
    table.add_column(width=_WIDTH)
    table.add_column(width=_WIDTH)
    table.add_row(out.text(("greedy decoding", "bold")), out.text(("tree search", "bold")))
    results = (likeliest, searched)
    table.add_row(*(out.text(result.text.strip()) for result in results))
    table.add_row(*(out.text(verdict(result)) for result in results))
    table.add_row(*(out.text((cost(result), "dim")) for result in results))
    return table


def verdict(result: SearchResult) -> tuple[str, str]:
    """Return (text, style): whether the answer passes the task's check."""
    return ("✓ checked: right", "green") if result.solved else ("✗ checked: wrong", "red")


def cost(result: SearchResult) -> str:
    return f"{result.cost.tokens} tokens · {result.cost.seconds:.2f} s"


def report(result: SearchResult) -> dict[str, Any]:
    """Return one result for --json."""
    from ..service.store.json_output import scored_path

    return {
        "text": result.text,
        "solved": result.solved,
        "reason": result.reason,
        "path": scored_path(result.best),
        "tokens": result.cost.tokens,
        "seconds": result.cost.seconds,
    }
