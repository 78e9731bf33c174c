"""The remote engine at Weft's own server, alone and behind a second Weft server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import weft
from serving import Served, serving
from shallow import TINY
from weft import Loom
from weft.constraints import GBNF, Choice, JsonSchema, Regex
from weft.lm.lm import LM
from weft.service.server import ServerConfig

pytestmark = pytest.mark.remote

PROMPT = "Tell me a story about a fox."
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture(scope="module")
def lm(server: Served) -> Iterator[LM]:
    with weft.load(f"{server.url}/v1", TINY) as lm:
        yield lm


@pytest.fixture(scope="module")
def plain() -> Iterator[LM]:
    with weft.load("tiny", engine="numpy") as lm:
        yield lm


@pytest.mark.parametrize(
    "options",
    [
        {"constraint": GBNF('root ::= "a" "b"')},
        {"constraint": Choice(["x y", "z"])},
        {"constraint": JsonSchema(SCHEMA)},
        {"constraint": Regex("[0-9]{3}")},
        {"repetition_penalty": 1.5, "penalty_last_n": 8},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "stop": "."},
        {"dry_multiplier": 5.0, "dry_allowed_length": 1},
        {"top_k": 1, "temperature": 1.0, "seed": 3},
        {"top_n_sigma": 1e-3, "temperature": 1.0, "seed": 3},
        {"typical_p": 1e-6, "min_p": 0.999, "temperature": 1.0, "seed": 3},
    ],
    ids=str,
)
def test_options_give_the_text_of_the_same_model_in_process(
    lm: LM, plain: LM, options: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"n": 1, "temperature": 0, "max_tokens": 16, **options}
    (node,) = Loom(lm, PROMPT).grow(**given)
    (want,) = Loom(plain, PROMPT).grow(**given)
    assert (node.tokens, node.finish_reason) == (want.tokens, want.finish_reason)


def test_server_of_a_remote_model_takes_constraints(server: Served) -> None:
    address = f"{server.url}/v1#tiny?tokenizer={TINY}"
    forms: dict[str, tuple[Any, str]] = {
        "guided_choice": (["x y", "x y z"], "x y"),
        "json_schema": (SCHEMA, '{"a":'),
        "grammar": ('root ::= "a" "b"', "ab"),
        "regex": ("7{3}", "777"),
    }
    with serving(ServerConfig(models=(address,), port=0)) as second:
        for field, (value, start) in forms.items():
            body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, field: value}
            answer = second.client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"].startswith(start)
