"""Report the size of each package and what a user's call runs through; check two rules.

python -m tools.sizes            files, code lines and all lines of each package
python -m tools.sizes --calls    also files, functions and classes that four calls run through
python -m tools.sizes --check    exit 1 if a file is too long or uses another file's private names

Code lines exclude docstrings, comments and blank lines.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import sys
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "weft"
MAX_LINES = 700
SOLVE = ["weft", "solve", "4 9 10 13", "--tree", "--budget-tokens", "400"]
# Private names that files may use although another file or library defines them, and why.
ALLOWED = {
    "_replace": "public in a NamedTuple",
    "_asdict": "public in a NamedTuple",
    "_fields": "public in a NamedTuple",
    "_mapping": "public in SQLAlchemy's rows (store/commit.py)",
    "_parser": "re has no public parser (constraints/patterns.py)",
    "_model_mapping": "Transformers has no public map from configurations (torch/classifier.py)",
    "_apply_gate": "Transformers' hook for the gate of experts (torch/weights/experts.py)",
    "_forward_hooks": "torch has no public list of hooks (torch/fused/decoder.py)",
    "_forward_pre_hooks": "torch has no public list of hooks (torch/fused/decoder.py)",
    "_modules": "torch has no public table of submodules (engines/torch/model.py)",
    "_parameters": "torch takes a microsecond to get a parameter by name (torch/fused/decoder.py)",
    "_buffers": "like _parameters (engines/torch/replaced.py)",
    "_non_persistent_buffers_set": "names of unsaved buffers (engines/torch/copied.py)",
    "_scaled_dot_product_flash_attention_for_cpu": "the one CPU product with its log-sum-exp",
    "_reorder_linear_weight": "packs weights for oneDNN (torch/weights/packed.py)",
    "_linear_pointwise": "the product with packed weights (torch/weights/packed.py)",
    "_is_mkldnn_bf16_supported": "bfloat16 support of oneDNN (torch/weights/packed.py)",
    "_is_mkldnn_fp16_supported": "float16 support of oneDNN (torch/weights/upcast.py)",
    "_cuda_endAllocateToPool": "like _C",
    "_cuda_releasePool": "like _C",
    "_C": "ends the allocations of a failed capture (engines/torch/paged/cuda_graph.py)",
    "_version": "torch's counter of a tensor's in-place changes",
}


class Size(NamedTuple):
    """Files and lines of a package. code: lines without docstrings, comments and blank lines."""

    files: int
    code: int
    lines: int


class CallPath(NamedTuple):
    """How many files, functions and classes of Weft one call runs through."""

    files: int
    functions: int
    classes: int


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def package_of(file: Path) -> str:
    """Return the package that a module is counted in; "weft" for modules at the top."""
    parts = file.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "weft"


def sizes() -> dict[str, Size]:
    by_package: dict[str, Size] = {}
    for file in files():
        text = file.read_text("utf-8")
        size = by_package.get(package_of(file), Size(0, 0, 0))
        by_package[package_of(file)] = Size(
            size.files + 1, size.code + count_code_lines(text), size.lines + text.count("\n")
        )
    return dict(sorted(by_package.items()))


def docstring_lines(text: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                lines.update(range(first, last + 1))
    return lines


def count_code_lines(text: str) -> int:
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(text))


# -- rules -----------------------------------------------------------------------------------------


def faults() -> Iterator[str]:
    for file in files():
        text = file.read_text("utf-8")
        name = file.relative_to(SOURCE)
        n_lines = text.count("\n") - len(docstring_lines(text))
        if n_lines > MAX_LINES:
            yield f"{name}: {n_lines} lines without docstrings; at most {MAX_LINES} are allowed"
        for line, use in foreign_privates(ast.parse(text)):
            yield f"{name}:{line}: {use} is private to another file"


def foreign_privates(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each use or import of another file's private name.

    `self._name` and `cls._name` are allowed: a class may use what it inherits.
    """
    own = {*_defined(tree), *ALLOWED}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if _is_private(alias.name):
                    yield node.lineno, f"{alias.name} from {node.module}"
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            inherits = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr not in own and not inherits:
                yield node.lineno, ast.unparse(node)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_repr_"))


def _defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names of functions, classes, variables, slots and attributes of `self`."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                yield name
            case ast.Name(name, ast.Store()):
                yield name
            case ast.Assign([ast.Name("__slots__")], value):
                yield from ast.literal_eval(value)


# -- calls -----------------------------------------------------------------------------------------


def call_path(call: Callable[[], object]) -> CallPath:
    visited, functions, classes = set[str](), set[str](), set[str]()
    prefix = str(SOURCE)

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(prefix):
            return
        visited.add(code.co_filename)
        functions.add(f"{code.co_filename}:{code.co_qualname}")
        if "self" in frame.f_locals:
            classes.add(type(frame.f_locals["self"]).__name__)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return CallPath(len(visited), len(functions), len(classes))


def call_paths() -> dict[str, CallPath]:
    """Measure four calls. Each runs once before, so that imports are not counted."""
    import weft

    if not Path(weft.__file__).is_relative_to(SOURCE):
        sys.exit(f"weft is imported from {weft.__file__}; calls are counted in {SOURCE}")
    # A given number of threads: choosing it depends on the clock and may run through another file.
    lm = weft.load("tiny", engine_options={"threads": 1})
    loom = weft.Loom(lm, "Use 4 9 10 13 to make 24.")
    root, store = weft.Branch.create(lm, seed=1), weft.BranchStore(lm)
    root.prefill(list(lm.text.encode("Once")))
    branches = [root.fork() for _ in range(4)]
    model = weft.AsyncLM(lm)
    numbers = iter(range(100))
    calls: dict[str, Callable[[], Any]] = {
        "grow": lambda: loom.grow(n=4, max_tokens=4, seed=next(numbers)),
        "commit": lambda: store.commit([(b, b.produce().token) for b in branches]),
        "logprobs": lambda: model.next_token_logprobs_sync([1, 2, 3, next(numbers)]),
        "solve": _solve,
    }
    paths = {}
    for name, call in calls.items():
        call()
        paths[name] = call_path(call)
    lm.close()
    return paths


def _solve() -> None:
    """Run `weft solve` in this process, with a home folder of its own and without output."""
    from weft.cli import main

    with (
        tempfile.TemporaryDirectory() as home,
        mock.patch.dict(os.environ, WEFT_HOME=home),
        mock.patch.object(sys, "argv", SOLVE),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        main()


# -- command ---------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", action="store_true", help="also measure four calls")
    parser.add_argument("--check", action="store_true", help="exit 1 if a rule is broken")
    args = parser.parse_args()
    by_package = sizes()
    total = Size(*(sum(column) for column in zip(*by_package.values(), strict=True)))
    print(f"{'package':14}{'files':>7}{'code':>8}{'lines':>8}")
    for name, size in {**by_package, "all": total}.items():
        print(f"{name:14}{size.files:7}{size.code:8}{size.lines:8}")
    if args.calls:
        print(f"\n{'call':14}{'files':>7}{'functions':>11}{'classes':>9}")
        for name, path in call_paths().items():
            print(f"{name:14}{path.files:7}{path.functions:11}{path.classes:9}")
    if args.check and (broken := list(faults())):
        sys.exit("\n".join(["", *broken]))


if __name__ == "__main__":
    main()
