"""A user's mistake ends with a message, a hint and its exit code; never with a traceback."""

from __future__ import annotations

import inspect

import pytest

from weft import errors
from weft.cli.failures import OUTCOMES, outcome_of

MISTAKES = [
    (["run", ""], 2, "the prompt is empty"),
    (["run"], 2, "there is no prompt"),
    (["run", "hi", "-n", "0"], 2, "n is 0"),
    (["run", "hi", "-n", "two"], 2, "Invalid value for '-n'"),
    (["run", "hi", "--max-tokens", "0"], 2, "max_tokens is 0"),
    (["run", "hi", "--temperature", "-1"], 2, "temperature is -1"),
    (["run", "hi", "--temperature", "nan"], 2, "temperature is nan"),
    (["run", "hi", "--top-p", "2"], 2, "top_p is 2"),
    (["run", "hi", "--top-k", "-1"], 2, "top_k is -1"),
    (["run", "hi", "--min-p", "-0.1"], 2, "min_p is -0.1"),
    (["run", "hi", "--stop", ""], 2, "stop"),
    (["run", "hi", "--seed", "-3"], 2, "seed is -3"),
    (["run", "hi", "--raw", "-s", "be kind"], 2, "system needs a chat template"),
    (["run", "hi there " * 1500], 2, "the context is 2048"),
    (["run", "hi", "--kv-budget", "much"], 2, "kv_budget is 'much'"),
    (["run", "hi", "--kv-budget", "100kB"], 4, "KV budget"),
    (["run", "hi", "-m", "tini"], 3, "near it: tiny"),
    (["run", "hi", "-m", "nosuch/model"], 3, "nosuch/model"),
    (["run", "hi", "-m", "./missing"], 3, "there is no folder ./missing"),
    (["run", "hi", "-m", "model.gguf"], 3, "GGUF"),
    (["run", "hi", "--engine", "steam"], 3, "allowed are auto, numpy, torch"),
    (["solve", "hi", "--strategy", "luck"], 2, "'tot', 'best-of-n', 'greedy'"),
    (["solve", "hi", "-b", "0"], 2, "breadth is 0"),
    (["solve", "hi", "-n", "0"], 2, "-n is 0"),
    (["solve", "hi", "--strategy", "greedy", "-b", "3"], 2, "-b has no meaning for"),
    (["solve", "hi", "--budget-s", "-1"], 2, "budget_s is -1"),
    (["solve", ""], 2, "the prompt is empty"),
    (["frobnicate"], 2, "No such command"),
    (["run", "hi", "--max-new-tokens", "3"], 2, "No such option"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "said"), MISTAKES, ids=[" ".join(m[0])[:40] for m in MISTAKES]
)
def test_a_mistake_is_told_on_stderr_with_its_exit_code(
    weft, monkeypatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = weft(*arguments)
    assert result.exit_code == code, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_a_mistake_leaves_stdout_empty(weft) -> None:
    assert weft("run", "hi", "-n", "0").stdout == ""


def test_a_mistake_in_a_process_of_its_own_has_no_traceback(command) -> None:
    done = command("run", "hi", "--temperature", "-1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "weft: temperature is -1.0; allowed is a finite number >= 0",
        "hint: weft run --help lists the options",
    ]


def test_bytes_that_are_no_text_are_a_mistake(weft) -> None:
    result = weft("run", stdin=b"\xff\xfe\x00")
    assert result.exit_code == 2
    assert "text; convert it" in result.stderr


def test_lone_surrogates_are_a_mistake(weft) -> None:
    result = weft("run", "a\udcffb")
    assert result.exit_code == 2
    assert "text; convert it" in result.stderr


def test_every_error_has_its_line_in_the_table() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.WeftError)
    ]
    assert set(kinds) <= set(OUTCOMES)


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
    assert outcome_of(error).code == code


def test_a_failure_caused_by_too_little_memory_is_one_of_memory() -> None:
    error = errors.ForwardError("the model call failed")
    error.__cause__ = MemoryError()
    assert outcome_of(error).code == 4


def test_an_error_of_a_subclass_gets_the_line_of_its_parent() -> None:
    class Special(errors.KVFull):
        pass

    assert outcome_of(Special("x")).code == 4
