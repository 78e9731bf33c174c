"""Count breaches of the writing rules per package; no count may rise above `tools/prose.json`.

python -m tools.prose                  the counts, a line per package
python -m tools.prose src/weft/kv      every breach in files below this path
python -m tools.prose --check          exit 1 if a count is above the recorded one (`make lint`)
python -m tools.prose --update         record the counts that have fallen

Rules: `names` (words banned in identifiers), `words` (words banned in docstrings, comments,
messages and pages), `openings` (docstrings that begin with a clause), `sentences` (over 25 words).
The same rules apply to the page's TypeScript: its comments count as docstrings.
Subjects of commits after the recorded one have at most 72 characters.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.typescript_tokens import Token, tokens

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tools" / "prose.json"
MAX_WORDS = 25
MAX_SUBJECT = 72
RULES = ("names", "words", "openings", "sentences")

IN_NAMES = frozenset(
    "told tell tells said say says asked made found held seen met meet meets beside aside somebody"
    " nobody whoever letter letters whole most least lie lies lay laid stand stands come comes go"
    " goes again anew figures refuse refuses".split()
)
CONSTRUCTORS = frozenset({"of", "at", "begin"})
IN_PROSE = re.compile(
    r"(?i)(?<![\w.`/-])(?!tell me\b)"  # prompts in examples
    r"(told|tells?|said|asked|made|held|seen|met|meets?|beside|aside|somebody"
    r"|nobody|whoever|letters?|whole(?! numbers?\b)|anew|figures|refuse[sd]?"
    r"|(?<!not )(?<!be )(?<!never )found)(?![\w`(=/-])"
)
# Public names that cannot change, by file.
ALLOWED_NAMES = {
    "src/weft/engines/remote/engine.py": {"most"},  # documented option of `RemoteEngine.load`
    "src/weft/errors.py": {"NotFound"},  # documented error class
    "src/weft/service/api/jobs.py": {"asked", "says"},  # fields of responses
    "src/weft/service/api/nodes.py": {"made", "said", "whole"},  # fields of responses
    "src/weft/service/server/openai/protocol.py": {"asked"},  # field of responses
    "page/src/api/feed.ts": {"asked", "whole"},  # fields of events
    "page/src/model/operation.ts": {"say"},  # kind of an operation
    "page/src/ui/start/Hints.tsx": {"aside"},  # element of HTML
    "page/tests/*.ts": {"said"},  # field of responses
    "src/weft/service/server/timeouts.py": {"connection_made"},  # method of asyncio's protocols
}
OPENING = re.compile(r"(?:What|Who|Whose|Where|Wherever|Whether|Which)\b")
NAME_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
EACH_LOOP = re.compile(r"\bfor (?:await )?\((?:const|let) each of")
SENTENCE_END = re.compile(r"(?<=[.!?])(?:\s+|$)|\n\s*\n|\n\s*(?:[-*|]|\d+\.) |\n\s*[\w`, ]+: ")
# Files with strings that are data: training texts, questions of a task, the words above.
DATA = ("/recipe/corpus/", "/benchmarks/lm_eval/", "/tools/prose.py", "/test_prose.py")
NOT_PROSE = re.compile(
    r"(?s:```.*?```|<!--.*?-->)|^(?: {4,}|\||#)[^\n]*|`[^`\n]*`|\]\([^)\n]*\)", re.MULTILINE
)


class Breach(NamedTuple):
    """One place that breaks a rule. line: counted from 1."""

    rule: str
    path: Path
    line: int
    text: str


# -- Python ----------------------------------------------------------------------------------------

_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CHECKED_NODES = (*_WITH_DOCSTRING, ast.For, ast.AsyncFor, ast.Expr, ast.Constant)


def breaches_in_python(path: Path) -> Iterator[Breach]:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    allowed = next((n for end, n in ALLOWED_NAMES.items() if path.match(end)), set[str]())
    for line, name in [(1, path.stem), *bindings(tree)]:
        if name not in allowed and _has_banned_part(name):
            yield Breach("names", path, line, name)
    has_data = any(part in path.as_posix() for part in DATA)
    for node in ast.walk(tree):
        if isinstance(node, CHECKED_NODES):
            yield from _breaches_in_node(path, node, has_data=has_data)
    for line, comment in _comments(source):
        yield from _banned_words(path, line, comment)


def bindings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of everything that the module defines or assigns."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.alias(asname=str(name)):
                yield node.lineno, name


def _has_banned_part(name: str) -> bool:
    return bool(IN_NAMES & {part.lower() for part in NAME_PARTS.findall(name)})


def _breaches_in_node(path: Path, node: ast.AST, *, has_data: bool) -> Iterator[Breach]:
    if isinstance(node, ast.FunctionDef) and _is_constructor(node):
        yield Breach("names", path, node.lineno, f"{node.name} as a constructor")
    if isinstance(node, (ast.For, ast.AsyncFor)) and _is_each(node.target):
        yield Breach("names", path, node.lineno, "each outside a comprehension")
    if isinstance(node, _WITH_DOCSTRING):
        docstring = ast.get_docstring(node)
        if docstring and OPENING.match(docstring):
            first_line = docstring.partition("\n")[0]
            yield Breach("openings", path, node.body[0].lineno, first_line)
        if docstring:
            yield from _long_sentences(path, node.body[0].lineno, docstring)
    for line, text in _texts(node, has_data=has_data):
        yield from _banned_words(path, line, text)


def _texts(node: ast.AST, *, has_data: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, string to check): strings with a space; in files of data, docstrings only."""
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))) if has_data:
            yield node.lineno, text
        case ast.Constant(value=str(text)) if " " in text and not has_data:
            yield node.lineno, text


def _is_constructor(node: ast.FunctionDef) -> bool:
    decorators = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
    return node.name in CONSTRUCTORS and bool(decorators & {"classmethod", "staticmethod"})


def _is_each(target: ast.expr) -> bool:
    return any(isinstance(n, ast.Name) and n.id == "each" for n in ast.walk(target))


def _comments(source: str) -> Iterator[tuple[int, str]]:
    if "#" not in source:
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


# -- TypeScript ------------------------------------------------------------------------------------


def breaches_in_typescript(path: Path) -> Iterator[Breach]:
    source = path.read_text(encoding="utf-8")
    allowed = next((n for end, n in ALLOWED_NAMES.items() if path.match(end)), set[str]())
    names = [Token("name", 1, path.name.partition(".")[0])]
    for token in [*names, *tokens(source, jsx=path.suffix == ".tsx")]:
        if token.kind == "name":
            is_checked = not token.is_field and token.text not in allowed
            if is_checked and _has_banned_part(token.text):
                yield Breach("names", path, token.line, token.text)
        elif token.kind == "comment" or " " in token.text:
            yield from _banned_words(path, token.line, token.text)
        if token.kind == "comment":
            yield from _long_sentences(path, token.line, token.text)
            if OPENING.match(token.text.strip()):
                first_line = token.text.strip().partition("\n")[0]
                yield Breach("openings", path, token.line, first_line)
    for match in EACH_LOOP.finditer(source):
        line = 1 + source.count("\n", 0, match.start())
        yield Breach("names", path, line, "each outside a callback")


# -- prose -----------------------------------------------------------------------------------------


def breaches_in_page(path: Path) -> Iterator[Breach]:
    text = NOT_PROSE.sub(_blank, path.read_text(encoding="utf-8"))
    yield from _banned_words(path, 1, text)
    yield from _long_sentences(path, 1, text)


def _blank(match: re.Match[str]) -> str:
    """Return the line ends of the match alone, so that the lines after it keep their numbers."""
    return "\n" * match[0].count("\n") or " "


def _banned_words(path: Path, first_line: int, text: str) -> Iterator[Breach]:
    for match in IN_PROSE.finditer(text):
        line = first_line + text.count("\n", 0, match.start())
        context = " ".join(text[max(0, match.start() - 30) : match.end() + 30].split())
        yield Breach("words", path, line, f"{match[0]}: … {context} …")


def _long_sentences(path: Path, first_line: int, text: str) -> Iterator[Breach]:
    start = 0
    for end in [*SENTENCE_END.finditer(text), None]:
        sentence = text[start : end.start() if end else len(text)]
        n_words = len(re.findall(r"\w[\w'’.-]*", sentence))
        if n_words > MAX_WORDS:
            line = first_line + text.count("\n", 0, start)
            yield Breach("sentences", path, line, f"{n_words} words: {' '.join(sentence.split())}")
        start = end.end() if end else start


READERS = {
    ".py": breaches_in_python,
    ".ts": breaches_in_typescript,
    ".tsx": breaches_in_typescript,
}


# -- packages and their record ---------------------------------------------------------------------


def sources() -> list[Path]:
    """Return the tracked Python and TypeScript files and pages, except generated ones and logs."""
    command = ["git", "ls-files", "*.py", "*.md", "page/*.ts", "page/*.tsx"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    excluded = (
        "docs/log.md",
        "docs/command.md",
        "docs/errors.md",
        "tests/test_prose.py",
        "src/weft/service/server/static",
        "page/src/api/schema.d.ts",
    )
    paths = [name for name in listed.stdout.splitlines() if not name.startswith(excluded)]
    return [ROOT / name for name in paths if (ROOT / name).is_file()]


def package_of(path: Path) -> str:
    """Return `src/weft/NAME` for files below `src/weft`, the top folder for all others.

    Packages of `src/weft/_core` and `src/weft/service` count one by one.
    """
    parts = path.relative_to(ROOT).parts[:-1]
    if parts[:1] != ("src",):
        return "/".join(parts[:1]) or "."
    return "/".join(parts[: 4 if parts[2:3] in (("_core",), ("service",)) else 3])


def breaches(paths: list[Path]) -> Iterator[Breach]:
    for path in paths:
        yield from READERS.get(path.suffix, breaches_in_page)(path)


def counts_of(every: list[Breach]) -> dict[str, dict[str, int]]:
    counter = Counter((package_of(breach.path), breach.rule) for breach in every)
    packages = sorted({package for package, _ in counter})
    return {package: {rule: counter[package, rule] for rule in RULES} for package in packages}


def increases(
    counts: dict[str, dict[str, int]], recorded: dict[str, dict[str, int]]
) -> list[tuple[str, str]]:
    """Return the packages and rules whose count is above the record, 0 for unknown packages."""
    return [
        (package, rule)
        for package, by_rule in counts.items()
        for rule, count in by_rule.items()
        if count > recorded.get(package, {}).get(rule, 0)
    ]


def long_subjects(since: str) -> list[str]:
    """Return the subjects over 72 characters after `since`; none in a clone without that commit."""
    command = ["git", "log", "--format=%h %s", f"{since}..HEAD"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    subjects = [line.partition(" ") for line in listed.stdout.splitlines()]
    return [f"{commit} {text}" for commit, _, text in subjects if len(text) > MAX_SUBJECT]


# -- command ---------------------------------------------------------------------------------------


def check(every: list[Breach]) -> int:
    record = json.loads(RECORD.read_text())
    risen = increases(counts_of(every), record["counts"])
    changed_paths = _changed_since(record["since"]) if risen else set()
    for package, rule in risen:
        limit = record["counts"].get(package, {}).get(rule, 0)
        shown = [b for b in every if (package_of(b.path), b.rule) == (package, rule)]
        print(f"{package}: {len(shown)} {rule}, at most {limit} are allowed")
        changed = [b for b in shown if b.path in changed_paths]
        for breach in (changed or shown)[:20]:
            print(f"  {_line(breach)}")
    subjects = long_subjects(record["since"])
    for subject in subjects:
        print(f"{len(subject.partition(' ')[2])} characters, at most {MAX_SUBJECT}: {subject}")
    return 1 if risen or subjects else 0


def _changed_since(commit: str) -> set[Path]:
    command = ["git", "diff", "--name-only", commit]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {ROOT / name for name in listed.stdout.splitlines()}


def update(every: list[Breach]) -> None:
    """Lower the recorded counts to today's. Raises: SystemExit, if one of today's is higher."""
    counts = counts_of(every)
    record = json.loads(RECORD.read_text())
    if increases(counts, record["counts"]):
        raise SystemExit("some counts have risen: python -m tools.prose --check lists them")
    RECORD.write_text(json.dumps({**record, "counts": counts}, indent=1) + "\n")


def _line(breach: Breach) -> str:
    return f"{breach.path.relative_to(ROOT)}:{breach.line} {breach.rule}: {breach.text:.100}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", nargs="?", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args()
    below = args.path.resolve() if args.path else ROOT
    every = list(breaches([path for path in sources() if path.is_relative_to(below)]))
    if args.check:
        return check(every)
    if args.update:
        update(every)
    elif args.path:
        print("\n".join(map(_line, every)))
    else:
        print(f"{'':24}" + "".join(f"{rule:>10}" for rule in RULES))
        for package, by_rule in counts_of(every).items():
            print(f"{package:24}" + "".join(f"{by_rule[rule]:10}" for rule in RULES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
