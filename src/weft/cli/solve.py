"""`weft solve`: search for the answer to a prompt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live

from .. import samples
from .._core.error_mapping import INTERRUPTED
from .._core.sampling.params import TEMPERATURE
from .._core.validation import check_int
from ..errors import ConfigError, FormatError, Unsupported
from ..search.strategies import (
    ANSWER_TOKENS,
    DEFAULT,
    FOR_TASKS,
    FULL_ANSWERS,
    LINE_TOKENS,
    STRATEGIES,
    WITHOUT_VERDICTS,
    Strategy,
    default_for,
    defaults,
    estimate,
    meanings,
)
from ..viz.outline import counted
from ..viz.terminal import TerminalWriter, write_object
from ..viz.text import Picture
from . import hints, options
from .backend import load_for_new_loom
from .failures import handle_errors, write
from .model import TINY

if TYPE_CHECKING:
    from ..loom import Heddle, Loom
    from ..search import AnswerGroup, Level, SearchResult
    from .backend import ModelHandle
    from .session import LoomSession

_TOP = 3  # children of a node that are drawn, in addition to those on the path
_VOTES = 5  # answers that are listed
_BAR = 20  # columns of a bar for all texts
_WIDTH = 40  # columns of an answer


SOLVE = "solve"  # key in a loom's meta: strategy and options of its search
_FLAGS = {
    "breadth": "-b",
    "n": "-n",
    "max_tokens": "--max-tokens",
    "temperature": "--temperature",
    "answer": "--answer",
    "judge": "--judge",
    "check": "--check",
}

# The allowed values of --strategy.
if TYPE_CHECKING:
    Name = str
else:
    Name = StrEnum("Name", {name: name for name in STRATEGIES})
By = Annotated[
    Name | None,
    typer.Option(
        "--strategy",
        help="; ".join(f"{name}: {each.summary}" for name, each in STRATEGIES.items()) + ".",
        show_default=f"{FOR_TASKS} for a known task, else {DEFAULT}",
    ),
]
Breadth = Annotated[
    int | None,
    typer.Option("-b", help=meanings("breadth"), show_default=defaults("breadth")),
]
Number = Annotated[
    int | None,
    typer.Option(
        "-n",
        help=meanings("n"),
        show_default="depends on the strategy and the prompt",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        help=f"Maximum number of tokens of an answer ({', '.join(FULL_ANSWERS)}), or of a line "
        "(all others).",
        show_default=f"{ANSWER_TOKENS} for answers, {LINE_TOKENS} for lines",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        *TEMPERATURE.names,
        help=TEMPERATURE.help,
        show_default="1; 0.8 for beam, best-of-n and weighted-best-of-n",
    ),
]
BudgetTokens = Annotated[
    int | None, typer.Option("--budget-tokens", help="Generate at most this many tokens.")
]
BudgetSeconds = Annotated[
    float | None, typer.Option("--budget-s", help="Search at most this many seconds.")
]
Answer = Annotated[
    str | None,
    typer.Option(
        "--answer",
        help="Read the answer in a text: last_number, last_line, or a regular expression.",
        show_default="the last number after 'answer is' or 'Answer:', else a short last line",
    ),
]
JudgePrompt = Annotated[
    str | None,
    typer.Option(
        "--judge",
        help="Score answers by a question that the model answers with yes or no; {text}, {answer} "
        "and {prompt} are replaced.",
    ),
]
Check = Annotated[
    str | None,
    typer.Option("--check", help="A regular expression that a correct answer matches fully."),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        help="Save the search to this file after each round. If the file exists, the search "
        "continues from it, and PROMPT, -b and -n can be omitted.",
        show_default=False,
        dir_okay=False,
    ),
]


@handle_errors
def solve(
    context: typer.Context,
    prompt: options.Prompt = None,
    strategy: By = None,
    breadth: Breadth = None,
    n: Number = None,
    max_tokens: MaxTokens = None,
    model: options.Model = TINY,
    engine: options.Engine = "auto",
    temperature: Temperature = None,
    seed: options.Seed = None,
    answer: Answer = None,
    judge: JudgePrompt = None,
    check: Check = None,
    budget_tokens: BudgetTokens = None,
    budget_s: BudgetSeconds = None,
    resume: Resume = None,
    text_or_tree: options.AsText = None,
    kv_budget: options.KvBudget = "auto",
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Search for an answer and show it with its path, scores and cost."""
    as_text = options.is_text(text_or_tree, json=as_json)
    saved = _saved_search(resume)
    words = prompt or ([saved["prompt"]] if saved else None)
    text = options.read_prompt(words, "solve", example=f'weft solve "{samples.game24}"')
    chosen = options.given(
        breadth=breadth,
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        answer=answer,
        judge=judge,
        check=check,
        budget_tokens=budget_tokens,
        budget_s=budget_s,
    )
    usual = default_for(text) if breadth is None else FOR_TASKS
    by = STRATEGIES[strategy or saved.get("strategy", usual)]
    chosen = {**saved.get("options", {}), **chosen}
    check_options(by, chosen)
    source = options.chosen_model(context, model)
    if not options.was_typed(context, "model"):
        source = saved.get("model", source)
    with load_for_new_loom(source, engine, kv_budget, resumes=resume is not None) as model_handle:
        if resume is not None and not model_handle.resumes:
            raise Unsupported("a search on a server cannot use --resume; leave it out")
        model = model_handle.source
        out = TerminalWriter.for_stream(sys.stdout)
        session = model_handle.create_loom(text, chat=None, system=None, special=False)
        loom = session.loom
        flags = {name: value for name, value in chosen.items() if name in _FLAGS}
        loom.meta[SOLVE] = {"strategy": by.name, "options": flags}
        arguments = {**chosen, **options.given(resume=resume)}
        if not as_json:
            _write_estimate(loom, by, chosen)
        is_drawn = not (as_json or as_text)
        result = _search_to_end(
            out, model_handle, session, by, arguments, is_drawn=is_drawn, as_json=as_json
        )
        session.at = result.best
        is_kept = session.try_save()
        if as_json:
            from ..service.store.json_output import search_object

            name, answer = session.name if is_kept else None, answer_of(result)
            report = search_object(
                by.name,
                result,
                answer,
                name,
                model=model,
                engine=model_handle.engine,
                stats=model_handle.stats(),
            )
            write_object(report)
        else:
            _report(
                out,
                model_handle,
                model,
                by,
                result,
                session.name if is_kept else "",
                as_text=as_text,
            )


def _write_estimate(loom: Loom, strategy: Strategy, chosen: dict[str, Any]) -> None:
    """Write the expected cost of a search to stderr.

    For a prompt of numbers only, a note shows how to state a Game of 24.

    chosen: the options that were given.
    """
    from ..search import Game24

    out = TerminalWriter.for_stream(sys.stderr)
    out.line((f"{strategy.title}: {estimate(strategy, chosen, loom.user_prompt)}", "dim"))
    if Game24.read(loom.user_prompt) is not None:
        return
    numbers = loom.user_prompt.replace(",", " ").split()
    if len(numbers) > 1 and all(map(str.isdecimal, numbers)):
        puzzle = Game24(tuple(map(int, numbers))).prompt
        out.line(("write a Game of 24 like this: ", "dim"), (f'weft solve "{puzzle}"', "cyan"))


def _saved_search(resume: Path | None) -> dict[str, Any]:
    """Return prompt, model, strategy and options of a saved search.

    resume: the file of the search. Returns {} for None or a missing file.
    Raises: FormatError if the file is not a saved search.
    """
    if resume is None or not resume.exists():
        return {}
    from ..loom import Loom

    loom = Loom.open(resume)
    settings = loom.meta.get(SOLVE, {})
    source = {"prompt": loom.user_prompt, "model": loom.meta.get("model", TINY)}
    if not isinstance(settings, dict) or settings.get("strategy", FOR_TASKS) not in STRATEGIES:
        raise FormatError(f"{resume} is not a saved search; give --resume another file")
    return {**source, **settings}


def check_options(strategy: Strategy, chosen: dict[str, Any]) -> None:
    """Raise ConfigError for a number below 1, or for an option that the strategy does not use.

    chosen: the options that were given.
    """
    for name in strategy.rejected(chosen):
        raise ConfigError(
            f"{_FLAGS[name]} cannot be used with --strategy {strategy.name}; leave it out"
        )
    for name in ("n", "max_tokens"):
        if (number := chosen.get(name)) is not None:
            check_int(_FLAGS[name], number, 1)


def picture_of(out: TerminalWriter, loom: Loom, best: Heddle | None = None) -> Group:
    """Return a drawing of a search's tree: the path to the best node, and some other nodes.

    best: the node whose path is always drawn, in bold. None for no path.
    """
    path = frozenset(node.id for node in best.path) if best is not None else frozenset[str]()
    return Group(*Picture(out, path=path, top=_TOP).lines(loom))


def run_with_display(
    out: TerminalWriter, loom: Loom, work: Callable[[Callable[[Level], object]], Any]
) -> Any:
    """Run a search and return its result. On a terminal, redraw its tree after each level.

    loom: the loom that is drawn before the first level.
    work: runs the search. It gets a function that it must call after each level.
    """
    if not out.is_live:
        return work(lambda level: None)
    with Live(console=out.console, auto_refresh=False, transient=True) as live:
        live.update(picture_of(out, loom), refresh=True)

        def redraw(level: Level) -> None:
            best = level.kept[0] if level.kept else None
            live.update(picture_of(out, root_of(level, loom), best), refresh=True)

        return work(redraw)


def root_of(level: Level, loom: Loom) -> Loom:
    """Return the loom that a search's level belongs to.

    A resumed search grows the loom of its file instead of `loom`. `loom` is returned for a level
    without candidates.
    """
    return level.candidates[0].path[0] if level.candidates else loom  # type: ignore[return-value]


def answer_of(result: SearchResult) -> str:
    """Return the answer: as `--answer` reads it, else the last line of the result's text.

    Returns "" if a budget ended the search before an answer.
    """
    return "" if result.answer is None else str(result.answer)


def verdict(result: SearchResult) -> tuple[str, str]:
    """Return (text, style) that says if the task's checker accepts the answer.

    The text is "" without a checker or without an answer.
    """
    if not answer_of(result):
        return ("", "")
    return {
        None: ("", ""),
        True: ("  ✓ checked: right", "green"),
        False: ("  checked: not a right answer", "yellow"),
    }[result.solved]


def _search_to_end(
    out: TerminalWriter,
    model_handle: ModelHandle,
    session: LoomSession,
    strategy: Strategy,
    chosen: dict[str, Any],
    *,
    is_drawn: bool,
    as_json: bool,
) -> SearchResult:
    """Run the search, draw its tree meanwhile, and save the result."""
    quiet = out if is_drawn else TerminalWriter(out.console, False, out.is_ascii)

    def on_level(level: Level, show: Callable[[Level], object]) -> None:
        root = root_of(level, session.loom)
        if root is not session.loom:  # the loom of the file that the search resumes
            session.loom, session.at = root, root
        show(level)

    try:
        result: SearchResult = run_with_display(
            quiet,
            session.loom,
            lambda show: model_handle.search(
                session, strategy, chosen, lambda level: on_level(level, show)
            ),
        )
        session.loom = result.loom
    except KeyboardInterrupt:
        is_kept = session.try_save()
        if is_drawn:
            out.console.print(picture_of(out, session.loom))
            out.facts(
                str(model_handle.stats()) + (f" · saved as {session.name}" if is_kept else "")
            )
        where = "above" if is_drawn else f"saved as {session.name}" if is_kept else "not saved"
        write("Cancelled", f"interrupted; the tree so far is {where}", "", INTERRUPTED, as_json)
        raise typer.Exit(INTERRUPTED) from None
    return result


def _report(
    out: TerminalWriter,
    model_handle: ModelHandle,
    model: str,
    strategy: Strategy,
    result: SearchResult,
    name: str,
    *,
    as_text: bool,
) -> None:
    """Write the answer, the tree and the cost of a search."""
    if as_text:
        out.write(f"{result.text}\n")
        out = TerminalWriter.for_stream(sys.stderr)
        if result.reason:
            out.facts(f"chosen because {result.reason}", "")
    else:
        _draw_result(out, result)
    if result.solved is None:
        note = "not verified: give the right answer with --check, as a regular expression"
        out.line((note, "yellow"))
    out.facts(f"{strategy.title} · {result.cost}", "")
    out.facts(str(model_handle.stats()) + (f" · saved as {name}" if name else ""))
    views = [["weft", "tree", "--top", "3"], ["weft", "read"]] if name else []
    hints.suggest(*_alternative(model_handle, model, strategy, result), *views)


def _draw_result(out: TerminalWriter, result: SearchResult) -> None:
    """Draw the tree of a finished search."""
    out.console.print(picture_of(out, result.loom, result.best))
    out.line()
    groups = [group for group in result.answers if group.answer is not None]
    if len(groups) > 1:
        _draw_answers(out, result, groups)
    out.line((answer_of(result) or "no answer yet", "bold"), verdict(result))
    if answer_of(result):
        out.line((f"chosen because {result.reason}", "dim"))


def _draw_answers(out: TerminalWriter, result: SearchResult, groups: Sequence[AnswerGroup]) -> None:
    """Write a line for each distinct answer, with a bar for its texts, its score and its check."""
    total = sum(group.count for group in result.answers)
    out.line((f"answers by {result.measure}", "dim"))
    width = max(len(_short(group.answer)) for group in groups[:_VOTES])
    for place, group in enumerate(groups[:_VOTES]):
        bar = "█" * max(1, round(_BAR * group.count / total))
        score = "" if group.score is None else f" · {group.score:.2f}"
        checked = {None: "", True: " · right", False: " · wrong"}[group.solved]
        style = "green" if place == 0 else "dim"
        text = f" {group.count} of {total}{score}{checked}"
        out.line(f"  {_short(group.answer):>{width}}  ", (bar, style), text)
    if (rest := len(groups) - _VOTES) > 0:
        out.line((f"  … {counted(rest, 'more answer')}", "dim"))
    if (unread := total - sum(group.count for group in groups)) > 0:
        out.line((f"  {counted(unread, 'text')} without an answer", "dim"))
    out.line()


def _short(answer: object) -> str:
    text = str(answer)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def _alternative(
    model_handle: ModelHandle, model: str, strategy: Strategy, result: SearchResult
) -> list[list[str]]:
    """Return commands to suggest: the same search with another strategy or more candidates."""
    prompt, same = result.loom.user_prompt, hints.model_flags(model)
    if not hints.can_repeat(prompt):
        return hints.for_model(model)
    usual = default_for(prompt)
    if usual == DEFAULT:  # for unknown tasks, intermediate steps are not scored
        more = ["-n", "32"] if strategy.name == usual else []
        return [["weft", "solve", prompt, *more, *same]]
    can = list(STRATEGIES) if model_handle.has_next else list(WITHOUT_VERDICTS)
    if result.solved is False and "adaptive" in can:
        surest = ["--strategy", "adaptive"] if strategy.name != "adaptive" else ["-b", "8"]
        return [["weft", "solve", prompt, *surest, *same]]
    other = next(name for name in can if name != strategy.name)
    return [["weft", "solve", prompt, "--strategy", other, *same]]
