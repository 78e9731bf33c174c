"""The house in figures: `python -m tools.house` prints sizes, trips and names.

Sizes are code lines (docstrings, comments and blank lines out) of each package. A trip is one call
of a user's, and how many of our files, functions and classes it runs through. Names: classes that
exist more than once, and private members that another file uses; `--check` fails on those that
have no reason below.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "weft"
GOALS = {"grow": 28, "commit": 28, "logprobs": 20, "solve": 60}
# What a trip may be at most. Threads are a noun of two engines, which came after the goals;
# `solve` keeps its loom in a database, and reads what is typed as letters.
MOST = {"grow": 29, "commit": 29, "logprobs": 21, "solve": 96}
SOLVE = ["weft", "solve", "4 9 10 13", "--tree", "--budget-tokens", "400"]
MOST_LINES = 700
# Private names that are not ours, or that stand for something public, and why they are used.
ALLOWED = {
    "_replace": "public in a NamedTuple",
    "_asdict": "public in a NamedTuple",
    "_fields": "public in a NamedTuple",
    "_mapping": "public in SQLAlchemy's rows (store/writing.py)",
    "_parser": "re has no public parser (constraints/patterns.py)",
    "_apply_gate": "how experts gate is told to others by it (torch/weights/experts.py)",
    "_forward_hooks": "torch has no public list of hooks (torch/fused/decoder.py)",
    "_forward_pre_hooks": "torch has no public list of hooks (torch/fused/decoder.py)",
    "_modules": "torch has no public table of a module's parts (engines/torch/model.py)",
    "_parameters": "torch takes a microsecond for a weight by its name (torch/fused/decoder.py)",
    "_buffers": "as of its parameters (engines/torch/replaced.py)",
    "_non_persistent_buffers_set": "which are saved (engines/torch/copied.py)",
    "_scaled_dot_product_flash_attention_for_cpu": "the one CPU product with its log-sum-exp",
    "_reorder_linear_weight": "packs for oneDNN, of private name only (torch/weights/packed.py)",
    "_linear_pointwise": "the product with what it packs (torch/weights/packed.py)",
    "_is_mkldnn_bf16_supported": "whether oneDNN knows bfloat16 here (torch/weights/packed.py)",
    "_is_mkldnn_fp16_supported": "the same of float16 (torch/weights/widened.py)",
    "_cuda_endAllocateToPool": "as _C",
    "_cuda_releasePool": "as _C",
    "_C": "ends the allocations of a failed capture (engines/torch/paged/graph.py)",
    "_version": "torch counts changes of a tensor there",
}
# Parts of packages that stand in another layer than the rest, so that they count as packages.
APART = {
    "engines.abilities": "what engines can do, which the next one says",
    "engines.base": "what an engine is; the engines themselves stand above sampling",
}
DOUBLED = {
    "Loom": "the known names of the existing tree library (compat/n8loom.py)",
    "Heddle": "the known names of the existing tree library (compat/n8loom.py)",
}


def files() -> list[Path]:
    """Return the package's modules."""
    return sorted(SOURCE.rglob("*.py"))


def package_of(file: Path) -> str:
    """Return the package that a module is counted in; "weft" for those at the top."""
    parts = file.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "weft"


def code_lines(text: str) -> int:
    """Return how many lines hold code: no docstrings, comments or blank lines."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                assert node.end_lineno is not None
                strings.update(range(node.lineno, node.end_lineno + 1))
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def sizes() -> dict[str, tuple[int, int, int]]:
    """Return files, code lines and all lines of each package."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for file in files():
        text = file.read_text("utf-8")
        of = found[package_of(file)]
        of[0] += 1
        of[1] += code_lines(text)
        of[2] += text.count("\n")
    return {name: (each[0], each[1], each[2]) for name, each in sorted(found.items())}


def doubled_classes() -> dict[str, list[str]]:
    """Return class names that stand in more than one place."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in files():
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(file.relative_to(SOURCE)))
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def foreign_privates() -> dict[str, list[str]]:
    """Return the uses of private members of other files' objects, and their imports, by file.

    A class uses what it inherits through `self` and `cls`.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for file in files():
        tree = ast.parse(file.read_text("utf-8"))
        own = {*_defined(tree), *ALLOWED}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                found[str(file.relative_to(SOURCE))] += [
                    f"{each.name} from {node.module} in line {node.lineno}"
                    for each in node.names
                    if _is_private(each.name)
                ]
            if not isinstance(node, ast.Attribute) or not _is_private(node.attr):
                continue
            inherits = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr not in own and not inherits:
                of = f"{ast.unparse(node)} in line {node.lineno}"
                found[str(file.relative_to(SOURCE))].append(of)
    return {file: uses for file, uses in found.items() if uses}


def circles() -> list[list[str]]:
    """Return packages that import each other, imports within functions counted.

    What type checkers alone read is no import, and `weft.doors` calls up by names.
    """
    imports: dict[str, set[str]] = defaultdict(set)
    for file in files():
        own = _unit(_module(file))
        for target in _imports(file):
            if _unit(target) != own:
                imports[own].add(_unit(target))
    reached = {unit: _reached(unit, imports) for unit in imports}
    found: list[list[str]] = []
    for unit in sorted(reached):
        circle = sorted(each for each in reached[unit] if unit in reached.get(each, ()))
        if circle and circle not in found:
            found.append(circle)
    return found


def faults() -> list[str]:
    """Return what stands against the rules of the house."""
    found = [
        f"{file}: {use} is private to another file"
        for file, uses in foreign_privates().items()
        for use in uses
    ]
    found += [
        f"class {name} stands in {' and in '.join(places)}"
        for name, places in doubled_classes().items()
        if name not in DOUBLED
    ]
    found += [f"packages import each other: {', '.join(circle)}" for circle in circles()]
    for file in files():
        n_lines = file.read_text("utf-8").count("\n")
        if n_lines > MOST_LINES:
            found.append(f"{file.relative_to(SOURCE)}: {n_lines} lines; {MOST_LINES} are allowed")
    return found


def _module(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(("weft", *parts)).removesuffix(".__init__")


def _unit(module: str) -> str:
    """Return the package that a module stands in, or the part of it that stands apart."""
    inside = module.removeprefix("weft").removeprefix(".")
    apart = next((part for part in APART if f"{inside}.".startswith(f"{part}.")), None)
    return apart or inside.partition(".")[0] or "weft"


def _imports(file: Path) -> Iterator[str]:
    """Yield the modules of ours that a file imports, wherever in it, as if run."""
    package = _module(file) if file.name == "__init__.py" else _module(file).rpartition(".")[0]
    waiting: list[ast.AST] = [ast.parse(file.read_text("utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] == "weft")
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            if base == "weft":
                yield from (f"weft.{each.name}" for each in node.names if _exists(each.name))
            elif base.startswith("weft."):
                yield from (f"{base}.{each.name}" for each in node.names)


def _exists(name: str) -> bool:
    return (SOURCE / f"{name}.py").exists() or (SOURCE / name).is_dir()


def _reached(unit: str, imports: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [unit]
    while waiting:
        new = imports.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not name.startswith("_repr_")


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from ast.literal_eval(node.value)


def trip(call: Callable[[], object]) -> tuple[int, int, int]:
    """Return how many of our files, functions and classes a call runs through."""
    seen_files, functions, classes = set[str](), set[str](), set[str]()
    prefix = str(SOURCE)

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(prefix):
            return
        seen_files.add(code.co_filename)
        functions.add(f"{code.co_filename}:{code.co_qualname}")
        if "self" in frame.f_locals:
            classes.add(type(frame.f_locals["self"]).__name__)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(seen_files), len(functions), len(classes)


def trips() -> dict[str, tuple[int, int, int]]:
    """Return the four trips; each was made once before, so that imports are not in it.

    The number of threads is given: when it is chosen anew is up to the clock, and with it whether
    one file more (share.py) is run through.
    """
    import contextlib

    import weft
    from weft.cli import main

    if not Path(weft.__file__).is_relative_to(SOURCE):
        sys.exit(f"weft is imported from {weft.__file__}; trips are counted in {SOURCE}")
    lm = weft.load("tiny", engine_options={"threads": 1})
    loom = weft.Loom(lm, "Use 4 9 10 13 to make 24.")
    root, store = weft.Branch.create(lm, seed=1), weft.BranchStore(lm)
    root.prefill(list(lm.text.encode("Once")))
    branches = [root.fork() for _ in range(4)]
    model = weft.AsyncLM(lm)
    numbers = iter(range(100))

    def commit() -> None:
        store.commit([(branch, branch.produce().token) for branch in branches])

    def solve() -> None:
        with (
            tempfile.TemporaryDirectory() as home,
            mock.patch.dict(os.environ, WEFT_HOME=home),
            mock.patch.object(sys, "argv", SOLVE),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.suppress(SystemExit),
        ):
            main()

    calls: dict[str, Callable[[], Any]] = {
        "grow": lambda: loom.grow(n=4, max_tokens=4, seed=next(numbers)),
        "commit": commit,
        "logprobs": lambda: model.next_token_logprobs_sync([1, 2, 3, next(numbers)]),
        "solve": solve,
    }
    found = {}
    for name, call in calls.items():
        call()
        found[name] = trip(call)
    lm.close()
    return found


def long_trips() -> list[str]:
    """Name the calls that run through more files than they may."""
    return [
        f"{name} runs through {made[0]} files; at most {MOST[name]}"
        for name, made in trips().items()
        if made[0] > MOST[name]
    ]


def report() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", action="store_true", help="the sizes only; runs nothing")
    parser.add_argument(
        "--check", action="store_true", help="sizes and trips, and fail on broken rules"
    )
    asked = parser.parse_args()
    of = sizes()
    print(f"{'package':14}{'files':>7}{'code':>8}{'lines':>8}")
    for name, (n_files, code, lines) in of.items():
        print(f"{name:14}{n_files:7}{code:8}{lines:8}")
    total = [sum(each[i] for each in of.values()) for i in range(3)]
    print(f"{'all':14}{total[0]:7}{total[1]:8}{total[2]:8}")
    if asked.check and (broken := [*faults(), *long_trips()]):
        sys.exit("\n".join(["", *broken]))
    if asked.sizes or asked.check:
        return
    doubled, private = doubled_classes(), foreign_privates()
    print(f"\nclass names that stand twice: {len(doubled)}")
    for name, places in doubled.items():
        print(f"  {name}: {', '.join(places)}")
    print(f"uses of others' private members: {sum(map(len, private.values()))}")
    for file, uses in private.items():
        print(f"  {len(uses):3}  {file}")
    made = trips()
    print(f"\n{'trip':10}{'files':>7}{'functions':>11}{'classes':>9}{'wanted':>8}")
    for name, (n_files, functions, classes) in made.items():
        print(f"{name:10}{n_files:7}{functions:11}{classes:9}{GOALS[name]:8}")
    print(json.dumps({"files": total[0], "code": total[1], "lines": total[2], "trips": made}))


if __name__ == "__main__":
    report()
