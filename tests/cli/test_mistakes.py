"""Mistakes of users end with a message, a hint and an exit code, without a traceback."""

from __future__ import annotations

import importlib
import inspect
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from weft import errors, samples
from weft._core.error_mapping import ERROR_MAPPINGS, map_error
from weft.cli.hints import quoted
from weft.service.store.database import Database

MISTAKES = [
    (["run", ""], 2, "the prompt is empty"),
    (["run"], 2, "there is no prompt"),
    (["solve"], 2, 'for example: weft solve "Use 4 9 10 13'),
    (["run", "hi", "-n", "0"], 2, "n is 0"),
    (["run", "hi", "-n", "two"], 2, "Invalid value for '-n'"),
    (["run", "hi", "--max-tokens", "0"], 2, "max_tokens is 0"),
    (["serve", "--max-n", "0"], 2, "--max-n is 0"),
    (["serve", "--max-tokens", "0"], 2, "--max-tokens is 0"),
    (["serve", "--max-jobs", "-1"], 2, "--max-jobs is -1"),
    (["run", "hi", "--temperature", "-1"], 2, "temperature is -1"),
    (["run", "hi", "--temperature", "nan"], 2, "temperature is nan"),
    (["run", "hi", "--top-p", "2"], 2, "top_p is 2"),
    (["run", "hi", "--top-k", "-1"], 2, "top_k is -1"),
    (["run", "hi", "--min-p", "-0.1"], 2, "min_p is -0.1"),
    (["run", "hi", "--stop", ""], 2, "stop"),
    (["run", "hi", "--bad-words", " "], 2, "bad_words is [' ']"),
    (["run", "hi", "--bad-words", r"\n"], 2, "bad_words is"),
    (["run", "hi", "--allowed-token-ids", "2048"], 2, "token id 2048; allowed are 0 to 2047"),
    (["run", "hi", "--stop-token-ids", "-1"], 2, "Invalid value for '--stop-token-ids'"),
    (["run", "hi", "--stop-token-ids", "x"], 2, "Invalid value for '--stop-token-ids'"),
    (["run", "hi", "--seed", "-3"], 2, "seed is -3"),
    (["run", "hi", "--raw", "-s", "be kind"], 2, "system needs a chat template"),
    (["run", "hi there " * 1500], 2, "the context is 2048"),
    (["run", "hi", "--kv-budget", "much"], 2, "kv_budget is 'much'"),
    (["run", "hi", "--kv-budget", "100kB"], 4, "KV budget"),
    (["run", "hi", "-m", "tini"], 3, "near it: tiny"),
    (["run", "hi", "-m", "nosuch/model"], 3, "nosuch/model"),
    (["run", "hi", "-m", "./missing"], 3, "there is no folder ./missing"),
    (["run", "hi", "-m", "model.gguf"], 3, "there is no file model.gguf"),
    (["run", "hi", "--engine", "steam"], 2, "allowed are auto, numpy, torch"),
    (["solve", "hi", "--strategy", "luck"], 2, "'tot', 'best-of-n', 'greedy'"),
    (["solve", "hi", "-b", "0"], 2, "breadth is 0"),
    (["solve", "hi", "-n", "0"], 2, "-n is 0"),
    (["solve", "hi", "--max-tokens", "0"], 2, "--max-tokens is 0"),
    (["solve", "hi", "--strategy", "greedy", "-b", "3"], 2, "-b cannot be used with"),
    (["solve", "hi", "--budget-s", "-1"], 2, "budget_s is -1"),
    (["solve", ""], 2, "the prompt is empty"),
    (["frobnicate"], 2, "No such command"),
    (["run", "hi", "-i", "--json"], 2, "exclude each other"),
    (["run", "-c", "hi"], 1, "there is no loom yet"),
    (["run", "hi", "--color", "red"], 2, "'prob', 'entropy'"),
    (["grow"], 2, "Missing argument"),
    (["grow", "1"], 1, "there is no loom yet"),
    (["tree"], 1, "there is no loom yet"),
    (["tree", "nosuch"], 2, "there is no loom 'nosuch'"),
    (["tree", "../../no/etc/passwd"], 2, "there is no loom"),
    (["tree", __file__], 1, f"{__file__}: it is no JSON"),
    (["read", "--loom", __file__], 1, f"{__file__}: it is no JSON"),
    (["tree", str(Path(__file__).parent)], 2, "there is no loom"),
    (["read"], 1, "there is no loom yet"),
    (["next"], 1, "there is no loom yet"),
    (["export", "a.md"], 1, "there is no loom yet"),
    (["rm"], 2, "give looms or nodes to remove"),
    (["rm", "nosuch"], 2, "there is no loom 'nosuch'"),
    (["rm", "1"], 1, "there is no loom yet"),
    (["rm", "1", "--undo"], 2, "or only --undo"),
    (["rm", "--undo"], 1, "nothing to restore"),
    (["chat", "-c"], 1, "there is no loom yet"),
    (["chat", "-m", "nosuch/model"], 3, "nosuch/model"),
    (["run", "hi", "--max-new-tokens", "3"], 2, "No such option"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "message"), MISTAKES, ids=[" ".join(m[0])[:40] for m in MISTAKES]
)
def test_mistake_writes_stderr_and_exit_code(
    weft, monkeypatch, arguments: list[str], code: int, message: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = weft(*arguments)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_mistake_leaves_stdout_empty(weft) -> None:
    assert weft("run", "hi", "-n", "0").stdout == ""


def test_mistake_in_a_process_has_no_traceback(command) -> None:
    done = command("run", "hi", "--temperature", "-1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "weft: temperature is -1.0; allowed is a finite number >= 0",
        "hint: weft run --help lists the options",
    ]


def test_undecodable_input_is_a_usage_error(weft) -> None:
    result = weft("run", stdin=b"\xff\xfe\x00")
    assert result.exit_code == 2
    assert "convert it" in result.stderr


def test_lone_surrogates_are_a_usage_error(weft) -> None:
    result = weft("run", "a\udcffb")
    assert result.exit_code == 2
    assert "convert it" in result.stderr


def test_every_error_class_has_a_mapping() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.WeftError)
    ]
    assert set(kinds) <= set(ERROR_MAPPINGS)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.WeftError("x"), 1),
        (errors.ConfigError("x"), 2),
        (errors.ContextOverflow("x"), 2),
        (errors.EngineUnavailable("x"), 3),
        (errors.ModelLoadError("x"), 3),
        (errors.Unsupported("x"), 3),
        (errors.ForwardError("x"), 1),
        (errors.KVFull("x"), 4),
        (MemoryError(), 4),
        (errors.Cancelled("x"), 130),
    ],
)
def test_exit_codes_are_those_of_the_manual(error: BaseException, code: int) -> None:
    assert map_error(error).exit_code == code


def test_error_caused_by_memory_error_has_exit_code_4() -> None:
    error = errors.ForwardError("the model call failed")
    error.__cause__ = MemoryError()
    assert map_error(error).exit_code == 4


def test_error_of_a_subclass_has_the_exit_code_of_its_parent() -> None:
    class Special(errors.KVFull):
        pass

    assert map_error(Special("x")).exit_code == 4


@pytest.fixture
def kept(weft, home: Path, shelves) -> Path:
    """A database whose last used loom is a small one."""
    verb = ("run", samples.story, "-n", "2", "--max-tokens", "4", "--seed", "1")
    shelves(home, "two", lambda: weft(*verb))
    return home / "weft.db"


def dumped(database: Path) -> list[str]:
    """Return the contents of a database."""
    with closing(sqlite3.connect(database)) as connection:
        return list(connection.iterdump())


def changed(database: Path, *statements: str) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        for statement in statements:
            assert connection.execute(statement).rowcount > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grow", "9"], "there is no node 9; allowed is 0 (the prompt) to 2"),
        (["grow", "x"], "NODE is 'x'"),
        (["grow", "--", "-1"], "NODE is '-1'"),
        (["grow", "9" * 400], "NODE is '999"),
        (["grow", "1", ""], "the text is empty"),
        (["grow", "1", "a\udcffb"], "convert it"),
        (["grow", "1", "-n", "0"], "n is 0"),
        (["read", "9"], "there is no node 9"),
        (["next", "9"], "there is no node 9"),
        (["next", "1", "--top", "0"], "top is 0"),
        (["rm", "9"], "there is no node 9"),
        (["rm", "0"], "node 0 is the prompt"),
        (["rm", "1", "tell-story-about-fox"], "cannot be removed in one call"),
        (["run", "-c", "-s", "be kind"], "-s cannot be used with -c"),
        (["chat", "-c", "-s", "be kind"], "-s cannot be used with -c"),
    ],
)
def test_mistake_on_a_saved_loom_changes_nothing(weft, kept, arguments, message: str) -> None:
    before = dumped(kept)
    result = weft(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert dumped(kept) == before


def test_removed_node_is_reported_as_removed(weft, kept) -> None:
    weft("rm", "2")
    result = weft("grow", "2")
    assert result.exit_code == 2
    assert "node 2 is not in the loom any more" in result.stderr


@pytest.mark.parametrize("verb", [("tree",), ("ls",), ("grow", "1"), ("read",), ("rm", "1")])
def test_broken_database_error_has_its_path(weft, kept, verb) -> None:
    for extra in ("-wal", "-shm"):
        Path(f"{kept}{extra}").unlink(missing_ok=True)
    kept.write_bytes(b"this was a database" * 500)
    result = weft(*verb)
    assert result.exit_code == 1, result.output
    assert str(kept) in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("verb", [("grow", "1"), ("next",), ("run", "-c"), ("chat", "-c")])
def test_another_model_is_rejected_and_the_right_one_named(weft, kept, verb) -> None:
    head = "json_set(head, '$[0][1]', 'another')"
    changed(kept, f"UPDATE looms SET head = {head}")
    result = weft(*verb)
    assert result.exit_code == 1
    assert "belongs to another model than tiny" in result.stderr
    result = weft(*verb, "-m", "tiny")
    assert result.exit_code == 1
    assert "hint: -m tiny" in result.stderr
    assert "force=True" not in result.stderr


@pytest.mark.parametrize("verb", [("run", "hi"), ("grow", "1")])
def test_impossible_number_of_branches_is_rejected(weft, kept, verb) -> None:
    """Nothing is allocated for that many branches, not even displays."""
    result = weft(*verb, "-n", str(10**20))
    assert result.exit_code == 2
    assert "allowed is an integer from 1 to 65536" in result.stderr


def test_negative_top_is_a_usage_error(weft, kept) -> None:
    result = weft("tree", "--top", "-3")
    assert result.exit_code == 2
    assert "--top is -3; allowed is an integer from 0 on" in result.stderr


@pytest.mark.parametrize("more", [(), ("-m", "tiny")])
@pytest.mark.parametrize("verb", [("grow", "0"), ("next", "0")])
def test_growing_texts_without_tokens_hints_at_import(weft, tmp_path: Path, verb, more) -> None:
    file = tmp_path / "talk.jsonl"
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]
    file.write_text(json.dumps({"messages": messages}))
    brought = weft("import", str(file), "--name", "talk")
    assert f"weft import {quoted(str(file))} -m MODEL" in " ".join(brought.stderr.split())
    result = weft(*verb, "--loom", "talk", *more)
    assert result.exit_code == 2
    assert "the loom talk has texts without tokens" in result.stderr
    assert "weft import FILE -m MODEL" in result.stderr
    assert weft("import", str(file), "--name", "again", "-m", "tiny").exit_code == 0
    assert weft("grow", "0", "--loom", "again", "-n", "1", "--max-tokens", "2").exit_code == 0
    ended = weft("grow", "1", "--loom", "again", "-n", "1", "--max-tokens", "2")
    assert ended.exit_code != 0
    typed = weft("chat", "--loom", "again", "--max-tokens", "2", stdin="Why?\n")
    assert typed.exit_code == 0


def test_ctrl_c_before_first_token_leaves_no_loom(weft, monkeypatch) -> None:
    module = importlib.import_module("weft.cli.run")

    def interrupted(kept, *_: object, **__: object) -> None:
        kept.save()
        raise KeyboardInterrupt

    monkeypatch.setattr(
        module, "grow_and_show", lambda out, kept, *rest, **named: interrupted(kept)
    )
    assert weft("run", "hi").exit_code == 130
    assert json.loads(weft("ls", "--json").stdout)["looms"] == []


def test_missing_model_error_has_a_hint(weft, kept) -> None:
    meta = "json_set(meta, '$.model', './gone')"
    changed(
        kept,
        "UPDATE looms SET model = './gone'",
        f"UPDATE nodes SET meta = {meta} WHERE number = 0",
    )
    result = weft("grow", "1")
    assert result.exit_code == 3
    assert "belongs to the model ./gone: there is no folder ./gone" in result.stderr
    assert "-m PATH gives the model's new place" in result.stderr
    assert weft("grow", "1", "-m", "tiny", "-n", "1", "--max-tokens", "2").exit_code == 0
    assert weft("grow", "1", "-n", "1", "--max-tokens", "2").exit_code == 0


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch) -> Path:
    """An impossible WEFT_HOME: even root cannot create a folder below a file."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "file" / "home"))
    return tmp_path / "file" / "home"


@pytest.mark.fluent
@pytest.mark.parametrize(
    "verb", [("run", samples.sum, "-n", "1"), ("solve", samples.sum, "--strategy", "greedy")]
)
def test_unsaved_result_is_shown(weft, nowhere, verb) -> None:
    result = weft(*verb)
    assert result.exit_code == 0
    assert "95." in result.stdout
    assert "saved as" not in result.stdout
    assert "not saved: cannot save looms in" in result.stderr
    assert "set WEFT_HOME to a folder that you can write" in result.stderr
    result_object = json.loads(weft(*verb, "--json").stdout)
    assert result_object["loom"] is None


@pytest.mark.parametrize("verb", [("tree",), ("ls",), ("grow", "1"), ("rm", "x")])
def test_unreadable_home_has_exit_code_1(weft, nowhere, verb) -> None:
    result = weft(*verb)
    assert result.exit_code == 1
    assert "set WEFT_HOME to a folder that you can write" in result.stderr


def test_doctor_reports_unwritable_home(weft, nowhere) -> None:
    result = weft("doctor")
    assert result.exit_code == 0
    assert "set WEFT_HOME" in result.stdout


def test_full_disk_leaves_the_loom_unchanged(weft, kept, monkeypatch) -> None:
    before = weft("tree", "--json").stdout
    set_up = Database._configure

    def small(self, connection, record) -> None:
        set_up(self, connection, record)
        connection.execute("PRAGMA max_page_count = 1")  # no page more than there are

    monkeypatch.setattr(Database, "_configure", small)
    result = weft("grow", "1", "-n", "4", "--max-tokens", "100")
    assert result.exit_code == 0
    assert "not saved: " in result.stderr
    assert "full" in result.stderr
    assert "free space on the disk" in result.stderr
    assert result.stdout
    monkeypatch.setattr(Database, "_configure", set_up)
    assert weft("tree", "--json").stdout == before
    assert weft("grow", "1", "-n", "1", "--max-tokens", "2").exit_code == 0


def test_json_error_is_one_object_on_stderr(weft) -> None:
    result = weft("run", "hi", "--engine", "steam", "--json")
    error = json.loads(result.stderr)["error"]
    assert (result.exit_code, result.stdout) == (2, "")
    assert error["exit_code"] == 2
    assert error["type"] == "ConfigError"
    assert "allowed are auto" in error["message"]
    assert error["hint"].startswith("weft doctor")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "hi", "-n", "two", "--json"],
        ["run", "hi", "--color", "red", "--json"],
        ["run", "hi", "--nope", "--json"],
        ["grow", "--json"],
        ["frobnicate", "--json"],
        ["--json", "ls"],
        ["rm", "--json", "--undo", "--nope"],
    ],
    ids=" ".join,
)
def test_json_usage_error_is_one_object_on_stderr(weft, arguments: list[str]) -> None:
    result = weft(*arguments)
    error = json.loads(result.stderr)["error"]
    assert (result.exit_code, result.stdout) == (2, "")
    assert error["type"] == "UsageError"
    assert error["exit_code"] == 2
    assert error["message"]
    assert error["hint"].startswith("weft ")
    assert "--help lists the " in error["hint"]


def test_usage_error_has_the_format_of_other_errors(weft) -> None:
    lines = weft("run", "hi", "--max-token", "3").stderr.splitlines()
    assert lines[0].startswith("weft: No such option: --max-token")
    assert "--max-tokens" in lines[0]
    assert lines[1:] == ["hint: weft run --help lists the options"]
    for arguments in (["run", "hi", "-n"], ["run", "-n"]):  # without the option's value
        assert weft(*arguments).stderr.splitlines()[1:] == lines[1:]
    # Arguments after -- are no options.
    assert weft("run", "hi", "-n", "two", "--", "--json").stderr.startswith("weft: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "hi", "--color", "red"], ": 'red' is not one of 'prob', 'entropy'"),
        (["solve", "x", "--strategy", "luck"], ": 'luck' is not one of 'tot'"),
    ],
)
def test_wrong_choice_error_has_no_library_prefix(weft, arguments, message: str) -> None:
    stderr = weft(*arguments).stderr
    assert message in stderr
    assert "Value error" not in stderr


def test_unknown_loom_error_names_similar_looms(weft) -> None:
    weft("run", samples.story, "-n", "1", "--max-tokens", "2")
    assert "near it: tell-story-about-fox" in weft("tree", "tell-story-about-fix").stderr
    far = weft("tree", "zzz").stderr
    assert "there are tell-story-about-fox" in far
    assert "near" not in far


def test_equal_branches_at_temperature_0_print_a_note(weft) -> None:
    stderr = weft("run", samples.sum, "-n", "2", "--temperature", "0", "--no-keep").stderr
    assert "--temperature 0 takes the likeliest token" in stderr
    assert "try --temperature" not in stderr
