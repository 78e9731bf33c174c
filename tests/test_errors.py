"""Hints of errors: where a reader sees them."""

from __future__ import annotations

import pickle
import traceback

import pytest

import weft
from weft import errors
from weft.cli.failures import print_error


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("kind", [errors.WeftError, errors.ConfigError, errors.KVFull])
def test_traceback_shows_the_hint_once(kind: type[errors.WeftError]) -> None:
    error = kind("it is wrong", hint="do this")
    assert shown(error).count("do this") == 1
    assert str(error) == "it is wrong"
    assert shown(pickle.loads(pickle.dumps(error))).count("do this") == 1


def test_hint_in_the_message_is_no_note() -> None:
    assert shown(errors.ConfigError("wrong; do this", hint="do this")).count("do this") == 1


def test_full_kv_names_the_page_about_memory() -> None:
    error = errors.KVFull("all 4 sequences are leased", needed=1, capacity=4)
    assert "docs/troubleshooting.md#out-of-memory" in shown(error)


def test_command_shows_the_hint_once(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(errors.ConfigError("it is wrong", hint="do this"), "grow")
    assert capsys.readouterr().err.count("do this") == 1


@pytest.mark.parametrize(
    ("text", "guess"), [("[0-9]+", "Regex('[0-9]+')"), ("hello", "Choice(['hello'])")]
)
def test_grammar_text_without_rules_is_rejected_with_a_guess(text: str, guess: str) -> None:
    lm = weft.load("tiny")
    with pytest.raises(errors.GrammarError, match="allowed is GBNF") as caught:
        weft.Branch.create(lm, grammar=text)
    assert guess in shown(caught.value)
