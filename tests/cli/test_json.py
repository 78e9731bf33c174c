"""Output of --json: field names, their order, and values."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from cli.conftest import loom_of
from weft import Loom, samples
from weft._core.atomic_files import json_number
from weft.service.store import json_output

FEW = ("-n", "2", "--max-tokens", "6", "--seed", "1", "--temp", "1.2")
BRANCH = "branch node id text token_ids logprobs entropies mean_logprob finish_reason stop_string"
GROWTH = (
    "loom model engine prompt chat_template_used prompt_tokens params branches stats"  # and inside
)
NODE = " ".join(  # of a tree
    ("node id parent text n_tokens mean_p mean_logprob finish_reason ended score", "said")
)


@pytest.fixture
def json_of(weft):
    """`json_of("tree")`: return the object that a verb writes, with its order of fields."""

    def json_of(*arguments: str, stdin: str = "") -> dict[str, Any]:
        written = weft(*arguments, "--json", stdin=stdin).stdout
        assert written.count("\n") == 1
        result: dict[str, Any] = json.loads(written)
        assert written == json.dumps(result, ensure_ascii=False) + "\n"
        return result

    return json_of


def names(result: dict[str, Any]) -> str:
    return " ".join(result)


def test_sampler_flags_set_their_parameters_and_grow_keeps_them(json_of) -> None:
    options: dict[str, Any] = {
        "dry_multiplier": 3.0,
        "dry_base": 2.0,
        "dry_allowed_length": 1,
        "dry_penalty_last_n": 40,
        "top_n_sigma": 2.0,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.05,
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    breakers = ("--dry-sequence-breaker", r"\n", "--dry-sequence-breaker", ".")
    growth = json_of("run", "--raw", samples.story, *FEW, *flags, *breakers)
    options["dry_sequence_breakers"] = ["\n", "."]
    assert {name: growth["params"][name] for name in options} == options
    grown = json_of("grow", "0", "-n", "1")
    assert {name: grown["params"][name] for name in options} == options
    (plain, _) = json_of("run", "--raw", samples.story, *FEW)["branches"]
    assert plain["text"] != growth["branches"][0]["text"]


def test_min_tokens_delays_stop_strings(json_of, weft, tmp_path) -> None:
    few = ("-n", "1", "--max-tokens", "6", "--seed", "1")
    (plain,) = json_of("run", "--raw", "Once upon a time", *few)["branches"]
    stop = ("--stop", plain["text"][:1])
    (stopped,) = json_of("run", "--raw", "Once upon a time", *few, *stop)["branches"]
    assert len(stopped["token_ids"]) == 1
    for verb in (("run", "--raw", "Once upon a time"), ("grow", "0")):
        (branch,) = json_of(*verb, *few, *stop, "--min-tokens", "4")["branches"]
        assert len(branch["token_ids"]) >= 4
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    both = weft("run", "hi", "--json-schema", str(schema), "--min-tokens", "2")
    assert both.exit_code == 2
    assert "--min-tokens and --json-schema exclude each other" in both.stderr


def test_token_limits_apply_to_run_and_grow(json_of) -> None:
    few = ("-n", "1", "--max-tokens", "8", "--temp", "0")
    plain, *_ = json_of("run", "--raw", "Once upon a time", *few)["branches"]
    word, ids = max(plain["text"].split(), key=len), plain["token_ids"]
    for verb in (("run", "--raw", "Once upon a time"), ("grow", "0")):
        (without,) = json_of(*verb, *few, "--bad-words", word)["branches"]
        assert without["text"]
        assert word not in without["text"]
        stop = ("--stop-token-ids", "7", "--stop-token-ids", str(ids[-1]))
        (short,) = json_of(*verb, *few, *stop)["branches"]
        assert short["token_ids"] == ids[: ids.index(ids[-1])]
        allowed = ("--allowed-token-ids", str(ids[0]), "--allowed-token-ids", str(ids[1]))
        growth = json_of(*verb, *few, *allowed)
        (narrow,) = growth["branches"]
        assert len(narrow["token_ids"]) == 8
        assert set(narrow["token_ids"]) <= set(ids[:2])
        limits = growth["params"]["constraint"]["token_limits"]
        assert limits["allowed"] == sorted(ids[:2])


def test_bad_word_and_json_schema_both_apply(json_of, tmp_path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [3, 7]}')
    few = ("-n", "4", "--json-schema", str(schema))
    growth = json_of("run", "--raw", "Once upon a time", *few, "--bad-words", "3", "--seed", "1")
    assert {branch["text"] for branch in growth["branches"]} == {"7"}


def test_json_of_run_has_every_token(json_of) -> None:
    growth = json_of("run", samples.story, *FEW)
    assert names(growth) == GROWTH
    loom = loom_of(growth["loom"])
    for branch in growth["branches"]:
        node = loom.find(branch["id"])
        assert names(branch) == BRANCH
        assert branch == {
            "branch": node.lineage[0] + 1,
            "node": branch["branch"],
            "id": node.id,
            "text": node.text,
            "token_ids": node.tokens,
            "logprobs": node.logprobs,
            "entropies": node.entropies,
            "mean_logprob": node.mean_logprob,
            "finish_reason": node.finish_reason,
            "stop_string": node.stop_string,
        }
    unkept = json_of("run", samples.story, *FEW, "--no-keep")
    assert unkept["loom"] is None
    assert names(unkept["branches"][0]) == BRANCH.replace(" node id", "")
    assert names(json_of("grow", "0", *FEW)) == GROWTH


def test_json_of_chat_has_the_message_first(json_of) -> None:
    turn = json_of("chat", "--max-tokens", "4", "--seed", "1", stdin="hello\n")
    assert names(turn) == " ".join(("said", GROWTH))
    assert turn["said"] == "hello"


def test_json_of_tree_and_read_has_every_node(json_of) -> None:
    grown = json_of("run", samples.story, *FEW)
    tree, path = json_of("tree"), json_of("read", "1")
    assert names(tree) == "loom model prompt chat_template_used at nodes"
    assert names(path) == "loom node id prompt text ended path"
    nodes = list(loom_of(grown["loom"]).walk())
    numbers = {node.id: at for at, node in enumerate(nodes)}
    assert tree["nodes"] == [
        {
            "node": numbers[node.id],
            "id": node.id,
            "parent": None if node.parent is None else numbers[node.parent.id],
            "text": node.text,
            "n_tokens": len(node.tokens),
            "mean_p": node.mean_p if node.logprobs else None,
            "mean_logprob": node.mean_logprob if node.logprobs else None,
            "finish_reason": node.finish_reason,
            "ended": node.terminal,
            "score": node.score,
            "said": None,
        }
        for node in nodes
    ]
    assert {names(each) for each in tree["nodes"] + path["path"]} == {NODE}
    assert path["path"] == tree["nodes"][:2]


@pytest.mark.fluent
def test_json_of_next_and_solve_has_its_fields(json_of) -> None:
    json_of("run", samples.story, *FEW)
    candidates = json_of("next", "0", "--top", "3")
    assert names(candidates) == "loom node id next stats"
    assert {names(each) for each in candidates["next"]} == {"rank id text bytes p logprob"}
    solved = json_of("solve", samples.sum, "--strategy", "best-of-n", "-n", "2", "--seed", "1")
    assert names(solved) == (
        "loom strategy model engine prompt solved answer text path votes measure reason answers"
        " nodes cost stats"
    )
    assert {names(each) for each in solved["path"]} == {"text score"}
    assert {names(each) for each in solved["votes"]} == {"answer count"}


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_json_has_infinite_numbers_as_strings(value: float) -> None:
    assert json_number(value) == str(value)
    assert json_number(-0.5) == -0.5


def test_json_has_infinite_score_as_string() -> None:
    loom = Loom(None, "which?")
    node = loom.add("none of these")
    for score, name in ((-math.inf, "-inf"), (math.inf, "inf"), (math.nan, "nan"), (0.5, 0.5)):
        node.score = score
        assert json_output.scored_path(node) == [{"text": "none of these", "score": name}]
        assert json_output.node_object(node, {loom.id: 0, node.id: 1})["score"] == name
