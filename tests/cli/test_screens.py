"""Suggested commands exist and work; shell completion offers existing names."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable

import pytest
import typer.main

import forks
from weft import samples
from weft.cli.app import app

VERBS = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def commands_in(text: str) -> list[list[str]]:
    """Return the commands of `next:` lines, hints and the first screen."""
    commands = re.findall(r'\bweft (?:[a-z]+)(?: (?:"[^"]*"|\'[^\']*\'|[\w./-]+))*', text)
    return [shlex.split(each)[1:] for each in commands]


def screens(weft) -> str:
    """Return all output of a first walk through the verbs."""
    walk = [
        (),
        ("ls",),
        ("run", samples.sum, "-n", "2", "--temp", "0"),
        ("run", samples.sum, "-n", "1", "--no-keep"),
        ("run", samples.story, "-n", "2", "--max-tokens", "8", "--seed", "1"),
        ("grow", "1", "-n", "1", "--max-tokens", "8"),
        ("tree",),
        ("read", "1"),
        ("next", "0"),
        ("ls",),
        ("solve", samples.game24, "--strategy", "greedy"),
        ("solve", samples.sum, "--strategy", "best-of-n", "-n", "2"),
        ("models",),
        ("doctor",),
        ("rm", "1"),
        ("rm", "--undo"),
    ]
    results = [weft(*arguments) for arguments in walk]
    assert [result.exit_code for result in results] == [0] * len(walk)
    return "\n".join(f"{result.stdout}\n{result.stderr}" for result in results)


@pytest.mark.programs
@pytest.mark.fluent
def test_suggested_commands_exist_and_prompts_are_samples(weft) -> None:
    commands = [
        each for each in commands_in(screens(weft)) if each[0] in VERBS or each[0].isalpha()
    ]
    assert {each[0] for each in commands} <= VERBS | {"help"}
    assert {"run", "grow", "read", "next", "tree", "solve", "export", "rm"} <= {
        each[0] for each in commands
    }
    prompts = {each[1] for each in commands if each[0] in ("run", "solve") and len(each) > 1}
    prompts = {prompt for prompt in prompts if " " in prompt}
    assert prompts <= set(samples.ALL.values())
    assert samples.story in prompts


@pytest.mark.programs
def test_suggested_commands_succeed(weft, tmp_path, monkeypatch) -> None:
    """Each `next:` command of each verb succeeds."""
    monkeypatch.chdir(tmp_path)
    walk = [
        ("run", samples.story, "-n", "2", "--max-tokens", "8", "--seed", "1"),
        ("grow", "1", "-n", "2", "--max-tokens", "8", "--seed", "1"),
        ("next", "0"),
        ("tree",),
        ("read", "1"),
        ("run", samples.sum, "-n", "2", "--temp", "0"),
        ("tree",),
        ("ls",),
    ]
    for arguments in walk:
        stderr = weft(*arguments).stderr
        for line in stderr[stderr.index("next: ") :].splitlines():
            command = shlex.split(line.removeprefix("next:"))
            assert command[0] == "weft"
            result = weft(*command[1:], *(["--max-tokens", "8"] if command[1] == "grow" else []))
            assert result.exit_code == 0, (command, result.output)


@pytest.mark.programs
@pytest.mark.fluent
@pytest.mark.parametrize("name", sorted(samples.ALL))
def test_the_embedded_model_answers_every_sample(weft, name: str) -> None:
    raw = ["--raw"] if name == "opening" else []
    options = ["-n", "3", "--max-tokens", "40", "--seed", "1", "--no-keep", "--json", *raw]
    result = json.loads(weft("run", samples.ALL[name], *options).stdout)
    texts = [branch["text"].strip() for branch in result["branches"]]
    assert all(texts)
    if name in ("story", "game24", "word_problem", "opening"):
        # Shown with branches: they differ.
        assert len(set(texts)) >= 2


def test_help_of_every_verb_fits_on_one_line_of_the_list(command) -> None:
    listed = command("--help", COLUMNS="80").stdout
    assert VERBS <= set(re.findall(r"^  (\w+) ", listed, re.MULTILINE))
    assert "..." not in listed.partition("Commands:")[2]


def test_json_of_every_reading_verb_is_one_object(weft) -> None:
    weft("run", samples.story, "-n", "1", "--max-tokens", "4")
    for verb in ("ls", "tree", "read", "next", "models", "doctor"):
        result = weft(verb, "--json")
        assert result.exit_code == 0, result.output
        assert isinstance(json.loads(result.stdout), dict)
        assert result.stdout.count("\n") == 1
        assert result.stderr == ""


@pytest.mark.fluent
def test_demo_json_has_a_wrong_greedy_answer_and_a_right_one_of_the_search(weft) -> None:
    result = json.loads(weft("demo", "--json").stdout)
    greedy, searched = result["greedy"], result["tree_search"]
    assert (greedy["solved"], searched["solved"]) == (False, True)
    assert greedy["tokens"] < searched["tokens"] < 1000
    assert searched["path"]


OFFERED = {
    "weft tr": {"tree"},
    "weft run -m ti": {"tiny"},
    "weft tree ": {"what-37-58"},
    "weft rm w": {"what-37-58"},
    "weft grow ": {"0", "1", "2"},
    "weft read 1": {"1"},
    "weft export a.md --node ": {"0", "1", "2"},
    "weft export a.md --scope ": {"path", "subtree", "tree"},
}
# Asks as a shell does, all in one process.
ASK = """
import json, os, sys
from weft.cli import main
for typed in json.loads(sys.argv.pop()):
    words = typed.split()
    at = len(words) if typed.endswith(" ") else len(words) - 1
    os.environ.update(_WEFT_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(at))
    sys.argv = ["weft"]
    try:
        main()
    except SystemExit:
        pass
    print("=====", flush=True)
"""


@pytest.fixture
def offered(command_environment) -> Callable[[list[str]], list[set[str]]]:
    """`offered(["weft tr", …])`: return the completions for each input."""

    def ask(typed: list[str]) -> list[set[str]]:
        done = forks.run(ASK, json.dumps(typed), env=command_environment())
        assert (done.returncode, done.stderr) == (0, "")
        return [set(part.split()) for part in done.stdout.split("=====")[:-1]]

    return ask


def test_completion_offers_verbs_models_looms_and_nodes(weft, command, offered) -> None:
    weft("run", samples.sum, "-n", "2", "--max-tokens", "4")
    assert dict(zip(OFFERED, offered(list(OFFERED)), strict=True)) == OFFERED
    # The same through the command itself.
    done = command(_WEFT_COMPLETE="complete_bash", COMP_WORDS="weft tr", COMP_CWORD="1")
    assert done.stdout.split() == ["tree"]


@pytest.mark.programs
def test_completion_without_looms_is_empty(home, offered) -> None:
    shutil.rmtree(home)
    (home.parent / "weft-home").write_text("no folder")
    assert offered(["weft grow ", "weft tree ", "weft rm "]) == [set(), set(), set()]
