"""Weft's models in the real `llm`: its command and its library."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

llm = pytest.importorskip("llm", reason="llm is not installed; make test-plugins")
pytest.importorskip("llm_weft", reason="llm-weft is not installed; make test-plugins")

from click.testing import CliRunner, Result  # noqa: E402
from llm.cli import cli  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages' code
STORY = "Tell me a story about a fox."
Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    monkeypatch.delenv("LLM_RAISE_ERRORS", raising=False)
    return tmp_path / "llm"


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    from llm_weft.choices import EMBEDDED
    from llm_weft.model import Weft
    from llm_weft.talk import Speaker

    speaker = Speaker(EMBEDDED)
    yield Weft(EMBEDDED, speaker)
    speaker.lm.close()


@pytest.fixture(scope="module")
def async_model(model: Any) -> Any:
    from llm_weft.model import AsyncWeft

    return AsyncWeft(model.choice, model.speaker)


@pytest.fixture
def run() -> Run:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli, list(arguments), catch_exceptions=True)

    return run


def test_models_are_listed(run: Run) -> None:
    listed = run("models").output
    assert "Weft: weft/tiny (embedded; a small demo model)" in listed
    options = run("models", "--options", "-q", "weft/tiny").output
    assert "logprobs: int" in options
    assert "Features:" in options
    assert "schemas" in options
    assert "async" in options


def test_prompt_is_answered_as_by_weft_itself(run: Run) -> None:
    import weft

    done = run("-m", "weft/tiny", STORY, "-o", "seed", "1", "-o", "max_tokens", "12")
    assert done.exit_code == 0, done.output
    with weft.load("tiny") as lm:
        (node,) = weft.Loom(lm, STORY).grow(n=1, seed=1, max_tokens=12)
        assert done.output == f"{node.text}\n"


def test_answer_is_streamed_in_pieces(model: Any) -> None:
    response = model.prompt(STORY, max_tokens=12, seed=1)
    pieces = list(response)
    assert len(pieces) > 5
    assert "".join(pieces) == response.text()
    assert response.response_json["finish_reason"] == "length"
    assert response.response_json["seed"] == 1
    assert response.usage().output == 12
    assert model.prompt(STORY, max_tokens=12, seed=1, stream=False).text() == response.text()


def test_conversation_continues_without_recomputing(model: Any) -> None:
    talk = model.conversation()
    first = talk.prompt("Name three colours.", max_tokens=8, seed=1)
    first.text()
    used = first.usage()
    before = model.speaker.lm.stats().prefilled
    second = talk.prompt("And then?", max_tokens=4, seed=2)
    second.text()
    usage = second.usage()
    # All but the answer's last token, which was drawn and not run yet.
    assert usage.details == {"cached_tokens": used.input + used.output - 1}
    assert model.speaker.lm.stats().prefilled - before == usage.input - used.input - used.output + 1
    roles = [message.role for message in second.prompt.messages]
    assert roles == ["user", "assistant", "user"]


def test_changed_messages_of_a_conversation_are_used(model: Any) -> None:
    talk = model.conversation()
    talk.prompt(STORY, max_tokens=4, seed=1).text()
    history = [llm.user("Hi"), llm.assistant("Hello"), llm.user("Who are you?")]
    other = talk.prompt(messages=history, max_tokens=4, seed=1)
    other.text()
    node = model.speaker._tips[str(talk.id)].node
    assert "Who are you?" in node.get_prefix_text()
    assert "fox" not in node.get_prefix_text()


def test_another_process_loads_the_kept_kv(home: Path) -> None:
    """`llm -c` in processes of its own, as people use it."""

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-W", "ignore", "-m", "llm", "-m", "weft/tiny", *arguments]
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ, timeout=100)
        assert done.returncode == 0, done.stderr
        return done

    options = ("-o", "max_tokens", "8", "-o", "seed", "1", "-u")
    command(STORY, *options, "-o", "keep_kv", "1")
    kept = command("-c", "And then?", *options, "-o", "keep_kv", "1")
    assert '"cached_tokens": 0' not in kept.stderr
    assert "cached_tokens" in kept.stderr
    assert len(list((home / "weft-kv").glob("*.kv.safetensors"))) == 1
    for file in (home / "weft-kv").glob("*.kv.safetensors"):
        file.write_bytes(b"torn")
    third = command("-c", "Go on.", *options)
    assert '"cached_tokens": 0' in third.stderr  # computed again, and no harm done


def test_system_prompt_is_written_by_the_template(model: Any) -> None:
    response = model.prompt("Hello", system="Be kind.", max_tokens=4, seed=1)
    import weft

    lm = model.speaker.lm
    (node,) = weft.Loom(lm, "Hello", system="Be kind.").grow(n=1, max_tokens=4, seed=1)
    assert response.text() == node.text
    with pytest.raises(llm.ModelError, match="needs a chat template"):
        model.prompt("Hello", system="Be kind.", raw=True).text()


def test_raw_text_is_continued_without_a_template(model: Any) -> None:
    import weft

    lm = model.speaker.lm
    (node,) = weft.Loom(lm, "Once upon", template=False).grow(n=1, max_tokens=4, seed=1)
    assert model.prompt("Once upon", raw=True, max_tokens=4, seed=1).text() == node.text


def test_answer_fits_the_schema(run: Run) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    done = run(
        "-m", "weft/tiny", "A dog", "--schema", json.dumps(schema), "-o", "max_tokens", "80",
        "-o", "seed", "1",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    record = json.loads(done.output)
    assert isinstance(record["name"], str)
    assert isinstance(record["age"], int)


def test_logprobs_are_logged_with_alternatives(run: Run) -> None:
    run("-m", "weft/tiny", STORY, "-o", "max_tokens", "3", "-o", "logprobs", "2", "-o", "seed", "3")
    (logged,) = json.loads(run("logs", "-n", "1", "--json").output)
    rows = logged["response_json"]["logprobs"]
    assert len(rows) == 3
    assert "".join(row["token"] for row in rows) == logged["response"]
    for row in rows:
        assert row["logprob"] <= 0
        top = row["top_logprobs"]
        assert len(top) == 2
        assert top[0]["logprob"] >= top[1]["logprob"]
        by_id = {each["token_id"]: each["logprob"] for each in top}
        assert by_id.get(row["token_id"], row["logprob"]) == pytest.approx(row["logprob"], abs=1e-4)


def test_stop_split_over_pieces_is_not_in_the_text() -> None:
    from types import SimpleNamespace

    from llm_weft.model import StopBuffer

    def answered(pieces: list[str], stops: list[str], stopped_by: str | None) -> str:
        stop_buffer, text_so_far = StopBuffer(stops), ""
        for at, text in enumerate([*pieces, ""]):
            node = SimpleNamespace(stop_string=stopped_by if at == len(pieces) else None)
            reason = "stop" if at == len(pieces) else None
            text_so_far += stop_buffer.push(
                SimpleNamespace(node=node, text=text, finish_reason=reason)
            )
            assert not any(stop in text_so_far for stop in stops)
        return text_so_far

    assert answered(["ab", "c", "d"], ["bcd"], "bcd") == "a"
    assert answered(["abx", "bc", "e"], ["bcd"], None) == "abxbce"
    assert answered(["a\n", "\nb"], ["\n\n"], "\n\n") == "a"
    assert answered(["one two three"], ["two", "ree"], "two") == "one "
    assert answered(list("aaab"), ["aab"], "aab") == "a"
    assert answered(["x"], [], None) == "x"


def test_stops_end_an_answer(model: Any) -> None:
    full = model.prompt(STORY, max_tokens=40, seed=1).text()
    stop = full.split()[4]
    ended = model.prompt(STORY, max_tokens=40, seed=1, stop=json.dumps([stop]))
    assert ended.text() == full[: full.index(stop)]
    assert ended.response_json["finish_reason"] == "stop"
    assert model.prompt(STORY, max_tokens=40, seed=1, stop=stop).text() == ended.text()


@pytest.mark.parametrize(
    ("options", "error_text"),
    [
        (["-o", "temperature", "-1"], "temperature is -1"),
        (["-o", "max_tokens", "0"], "max_tokens is 0"),
        (["-o", "top_p", "2"], "top_p is 2"),
        (["-o", "dry_base", "0.5"], "dry_base is 0.5"),
        (["-o", "dry_sequence_breakers", '[""]'], "dry_sequence_breakers has"),
        (["-o", "logprobs", "99"], "less than or equal to 20"),
        (["-o", "heat", "1"], "Extra inputs are not permitted"),
        (["-a", __file__], "does not support attachments"),
        (["-T", "llm_version"], "does not support tools"),
        (["-o", "logit_bias", '{"999999": 1}'], "outside the vocabulary"),
        (["--schema", '{"type": "nonsense"}'], "nonsense"),
    ],
)
def test_invalid_option_fails_in_one_line(run: Run, options: list[str], error_text: str) -> None:
    done = run("-m", "weft/tiny", "Hello", *options)
    assert done.exit_code != 0
    assert error_text in done.output.replace("\n", " ")
    assert "Traceback" not in done.output


def test_dry_breakers_are_a_text_or_a_json_list() -> None:
    from llm_weft.model import WeftOptions

    assert WeftOptions(dry_sequence_breakers='["\\n", ":"]').dry_sequence_breakers == ["\n", ":"]
    assert WeftOptions(dry_sequence_breakers=".").dry_sequence_breakers == "."


def test_option_is_applied_or_rejected() -> None:
    """Each option of the draw is one of Weft's own, by its own name."""
    from llm_weft.model import _OWN, WeftOptions

    from weft._core.sampling.params import PARAMETERS

    ours = set(WeftOptions.model_fields) - _OWN
    assert ours <= set(PARAMETERS)
    assert set(PARAMETERS) - ours <= {"n", "constraint", "temperature_first", "draw_rule"}


def test_async_model_gives_the_same_answers(model: Any, async_model: Any) -> None:
    async def both() -> list[str]:
        responses = [async_model.prompt(STORY, max_tokens=6, seed=seed) for seed in (1, 2)]
        return list(await asyncio.gather(*(each.text() for each in responses)))

    assert asyncio.run(both()) == [
        model.prompt(STORY, max_tokens=6, seed=seed).text() for seed in (1, 2)
    ]


def test_answer_that_is_not_read_to_its_end_leaves_the_model_usable(model: Any) -> None:
    pieces = iter(model.prompt(STORY, max_tokens=200, seed=1))
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert model.prompt(STORY, max_tokens=4, seed=1).text()


def test_models_are_added_listed_and_removed(run: Run, tmp_path: Path, home: Path) -> None:
    from weft.engines.hub import resolve

    folder = tmp_path / "mine.model"
    folder.symlink_to(resolve("tiny"))
    added = run("weft", "add", str(folder), "--name", "mine", "--engine", "numpy")
    assert added.output == "added weft/mine: llm -m weft/mine 'Hello'\n"
    assert [choice.model_id for choice in _kept()] == ["weft/mine"]
    assert "weft/mine" in run("weft", "list").output
    model = llm.get_model("weft/tiny")
    assert str(model).startswith("Weft: weft/tiny")
    for arguments, error_text in (
        (("add", "x", "--name", "a/b"), "a name is 'a/b'"),
        (("add", "tiny"), "is the embedded model"),
        (("remove", "other"), "no model 'other' was added; there are: mine"),
    ):
        done = run("weft", *arguments)
        assert done.exit_code == 1
        assert error_text in done.output
    assert run("weft", "remove", "weft/mine").output == "removed weft/mine\n"
    assert _kept() == []
    (home / "weft-models.json").write_text("{")
    assert run("weft", "add", str(folder)).exit_code == 1
    assert (home / "weft-models.json").read_text() == "{"
    assert "weft/tiny" in run("weft", "list").output


def _kept() -> list[Any]:
    from llm_weft.choices import kept

    return kept()


def test_nothing_of_weft_is_loaded_before_a_model_is_used() -> None:
    code = "import sys, llm; llm.get_models(); print([m for m in sys.modules if m == 'weft'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
