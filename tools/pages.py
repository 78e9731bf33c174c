"""Pages that are written from the code: the command, errors with exit codes, engines, keys.

In all pages for users the install lines follow `weft.PIP_TARGET`.

python -m tools.pages            writes them
python -m tools.pages --check    exit code 1 and a message if one is not current
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from .page_keys import with_keys

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Pages with install lines for users. Decisions and the log describe the past.
WITH_INSTALL_LINES = sorted(
    {
        ROOT / "README.md",
        ROOT / "deploy" / "weft.service",
        *DOCS.glob("*.md"),
        *DOCS.glob("cookbook/*.md"),
        *DOCS.glob("tutorials/*.md"),
        *ROOT.glob("plugins/*/README.md"),
        *ROOT.glob("examples/*/README.md"),
    }
    - {DOCS / "log.md", DOCS / "release.md"}
)
COLUMNS = 80
_PIPES = """\
**In a pipe or a file** output has no colours. `weft run`, `weft grow` and `weft chat` write only
the texts, with a line `---` between two texts. `weft read` writes the prompt and the path. Numbers,
names and advice go to stderr. `--text` does this on a terminal, `--tree` draws the tree in a pipe.

**For programs** `--json` writes one object. All errors, also a wrong option, are
`{"error": {"type", "message", "hint", "exit_code"}}` on stderr.

**On a terminal** control characters in texts, names and errors are written as escapes (`\\x9b`). A
pipe or a file gets every text as it is.

**Words without quotes** are one text: `weft run tell me a story` works.""".splitlines()
_ENVIRONMENT = """\
## Environment variables

A flag overrides its variable.

| variable | sets |
| --- | --- |
| `WEFT_MODEL`, `WEFT_ENGINE`, `WEFT_KV_BUDGET` | defaults of `-m`, `--engine` and `--kv-budget` |
| `WEFT_HOME` | the folder of [saved looms](kept.md); by default the system's folder for user data |
| `WEFT_DB` | the [database](kept.md#where-looms-are) of saved looms, if it is not in `WEFT_HOME` |
| `WEFT_LOG` | the lowest level that is logged on stderr: `debug` (as `-vv`), `info` (as `-v`), \
`warning` (the default) or `error` |
| `WEFT_HOST`, `WEFT_PORT` | the address at which [`weft serve`](server.md) listens and clients \
connect: `host`, `host:port` or a URL |
| `WEFT_API_KEY` | the key that `weft serve` requires, and the key for a \
[remote server](remote.md#the-key); for the latter also `OPENAI_API_KEY` |
| `WEFT_API_KEY_FILE`, `WEFT_DB_FILE` | in [the container](scale.md#containers-and-services): \
files with the values of `WEFT_API_KEY` and `WEFT_DB` |
| `NO_COLOR` | no colours |
| `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` | variables of the Hub's client |
| `OPENBLAS_NUM_THREADS`, `OMP_NUM_THREADS` | [threads](install.md#threads) of \
NumPy and torch |""".splitlines()
_EXITS = {
    0: "success",
    1: "any other failure",
    2: "a usage mistake: a wrong option or value, or a prompt that is too long",
    3: "a model or an engine is not available, or does not support the request",
    4: "out of memory",
    130: "interrupted with Ctrl-C",
}


def command_page() -> str:
    """Return the command reference: what `--help` says, verb by verb."""
    verbs = dict(_verbs())
    lines = [
        "# The command",
        "",
        "<!-- Written by `make pages` from the command's own help. Changes here are lost. -->",
        "",
        "`weft` without arguments shows first steps. `python -m weft` is the same command.",
        "Results go to stdout, everything else to stderr. [Saved looms](kept.md) ·",
        "[exit codes](errors.md) · [environment variables](#environment-variables)",
        "",
        *_PIPES,
        "",
        "| command | does |",
        "| --- | --- |",
        *(f"| [`weft {verb}`](#weft-{verb}) | {what} |" for verb, what in verbs.items()),
        *_help("weft", []),
    ]
    for verb in verbs:
        lines += _help(f"weft {verb}", [verb])
    lines += ["", *_ENVIRONMENT]
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    """Return the page of errors: the tree, then each class with its exit code and hint."""
    from weft import errors

    doc = inspect.getdoc(errors) or ""
    tree = doc[doc.index("WeftError") : doc.index("The built-in in brackets")].rstrip()
    lines = [
        "# Errors and exit codes",
        "",
        "<!-- Written by `make pages` from weft.errors and the command's table. Changes here are"
        " lost. -->",
        "",
        "Every error of Weft is a `WeftError`. The classes are in `weft.errors`. A message gives",
        "the value, what is allowed and what to do; `error.hint` is this last part. The built-in",
        "class in brackets is a second parent: catch either.",
        "",
        f"```text\n{tree}\n```",
        "",
        "The command exits with one of these codes:",
        "",
        "| exit code | means |",
        "| ---: | --- |",
        *(f"| {code} | {what} |" for code, what in _EXITS.items()),
        "",
        "[The server](server.md) returns an HTTP status and a code in OpenAI's form.",
        "A path that is longer than the full KV budget gives 400 instead of 503.",
        "",
        "| error | raised when | exit code | HTTP | the command's hint |",
        "| --- | --- | ---: | --- | --- |",
        *_error_rows(),
    ]
    return "\n".join(lines) + "\n"


def engines_page() -> str:
    """Return the page of engines: what each can do, from what they say of themselves."""
    from weft import PIP_TARGET
    from weft._core.installation import pip_install
    from weft.engines import capabilities

    own = capabilities.OWN
    lines = [
        "# Engines",
        "",
        "<!-- Written by `make pages` from weft.engines.capabilities. Changes here are lost. -->",
        "",
        "An engine runs the model. Trees, branches, search and constraints have one API on all.",
        "`weft.load` and `-m` choose the engine by the model; `engine=` and `--engine` set it.",
        "`weft doctor` shows which engines are installed. An empty cell means no: the call raises",
        "`Unsupported`. [Write an engine](write-an-engine.md).",
        "",
        "*Single steps*: the engine returns all logits after each token. Branches, `next`, AsyncLM",
        "and Weft's own constraints need them. `remote` generates full sequences. It has single",
        "steps, in spite of the empty cell, on [a vLLM server](remote.md#what-works) with",
        "`steps=yes`.",
        "",
        "| engine | takes | install |",
        "| --- | --- | --- |",
    ]
    for name, engine in own.items():
        command = f"`{pip_install(PIP_TARGET, name)}`"
        needs = "nothing more" if name in capabilities.BASE else command
        page = f" ([more]({name}.md))" if (DOCS / f"{name}.md").exists() else ""
        lines.append(f"| `{name}` | {engine.takes}{page} | {needs} |")
    heads = [f"`{name}`" for name in own]
    lines += ["", f"| what | {' | '.join(heads)} |", f"| --- |{' --- |' * len(own)}"]
    for title, field in capabilities.ROWS:
        lines.append(f"| {title} | {' | '.join(capabilities.cells(field, own))} |")
    return "\n".join(lines) + "\n"


def keys_page() -> str:
    """Return the reference of the web page with its table of keys from the code."""
    return with_keys((DOCS / "page-keys.md").read_text(encoding="utf-8"))


PAGES: dict[str, Callable[[], str]] = {
    "command.md": command_page,
    "errors.md": errors_page,
    "engines.md": engines_page,
    "page-keys.md": keys_page,
}


def install_lines(text: str, target: str) -> str:
    """Return a text with its install lines for a pip target.

    target: "." (a clone's folder, where `pip install . ./plugins/NAME` also installs a plugin), or
        the name of the distribution on PyPI.
    """
    from weft import DISTRIBUTION

    plugin = r"\1\2" if target == DISTRIBUTION else rf"\1{target} ./plugins/\2"
    for pattern, replacement in (
        (rf"""(["'])(?:\.|{DISTRIBUTION})(\[[\w,]+\])\1""", rf"\1{target}\2\1"),
        (r"(\binstall )(?:\. \./plugins/)?((?:llm|lm-eval)-weft)(?![\w/-])", plugin),
        (rf"(\binstall (?:--\S+ )*)(?:\.|{DISTRIBUTION})(?=[\s`)]|$)", rf"\1{target}"),
    ):
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def with_stale_install_lines() -> list[Path]:
    """Return the pages with an install line of another target than `weft.PIP_TARGET`."""
    from weft import PIP_TARGET

    return [
        page
        for page in WITH_INSTALL_LINES
        if install_lines(text := page.read_text("utf-8"), PIP_TARGET) != text
    ]


def stale(folder: Path = DOCS) -> list[str]:
    """Return the names of the pages that are not what the code says."""
    return [name for name, page in PAGES.items() if _read(folder / name) != page()]


def main(arguments: list[str]) -> int:
    """Write the pages, or with --check say which are not current."""
    if arguments not in ([], ["--check"]):
        print(f"unknown: {' '.join(arguments)}; allowed is nothing, or --check", file=sys.stderr)
        return 2
    from weft import PIP_TARGET

    names = stale()
    if not arguments:
        for name in names:
            (DOCS / name).write_text(PAGES[name](), encoding="utf-8", newline="\n")
            print(f"wrote docs/{name}")
        for page in with_stale_install_lines():
            text = install_lines(page.read_text("utf-8"), PIP_TARGET)
            page.write_text(text, encoding="utf-8", newline="\n")
            print(f"wrote the install lines of {page.relative_to(ROOT)}")
        return 0
    names = [f"docs/{name}" for name in names]
    names += [page.relative_to(ROOT).as_posix() for page in with_stale_install_lines()]
    for name in names:
        print(f"{name} is not current; run `make pages` and commit it", file=sys.stderr)
    return 1 if names else 0


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _verbs() -> Iterator[tuple[str, str]]:
    """Yield (verb, first sentence of its help), in the order of the command's own list."""
    from weft.cli.app import app

    for info in app.registered_commands:
        if info.callback is not None and not info.hidden:
            name = info.name or info.callback.__name__.replace("_", "-")
            yield name, (inspect.getdoc(info.callback) or "").partition("\n\n")[0]


def _help(title: str, arguments: list[str]) -> list[str]:
    from typer.testing import CliRunner

    from weft.cli.app import app

    result = CliRunner().invoke(
        app, [*arguments, "--help"], prog_name="weft", terminal_width=COLUMNS, color=False
    )
    if result.exit_code:
        raise RuntimeError(f"{title} --help ends with {result.exit_code}: {result.output}")
    text = "\n".join(line.rstrip() for line in result.output.rstrip().splitlines())
    return ["", f"## {title}", "", f"```text\n{text}\n```"]


def _error_rows() -> Iterator[str]:
    from weft._core.error_mapping import ERROR_MAPPINGS

    for kind, outcome in ERROR_MAPPINGS.items():
        summary = (inspect.getdoc(kind) or "").partition("\n")[0].replace("|", "\\|")
        if kind is MemoryError:
            summary = "Python's own, or the device's: no memory is left."
        hint = outcome.hint.format(verb="COMMAND")
        http = f"{outcome.status} `{outcome.code}`"
        yield f"| `{kind.__name__}` | {summary} | {outcome.exit_code} | {http} | {hint} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
