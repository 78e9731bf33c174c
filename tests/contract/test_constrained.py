"""Constrained generation on every engine and fake."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from contract.helpers import STORY, TOLERANCE
from weft import Branch, Loom
from weft.constraints import Allow, Choice, JsonSchema, Lazy, Regex
from weft.constraints.grammar import GrammarMatcher
from weft.errors import ConfigError, ConstraintError, DeadEnd, GrammarError
from weft.samples import record

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
        "animal": {"enum": ["owl", "fox", "otter"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 12},
    },
    "required": ["name", "animal", "age"],
    "additionalProperties": False,
}
WARM = {"temperature": 1.5, "show": False}


def test_every_text_fits_and_its_figures_are_the_raw_ones(make, kind, oracle) -> None:
    lm = make(kind)
    loom = Loom(lm, record)
    made = loom.grow(n=6, max_tokens=80, constraint=SCHEMA, seed=1, **WARM)
    for node in made:
        assert node.terminal
        assert node.finish_reason == "stop"
        assert list(node.parsed) == ["name", "animal", "age"]
        assert len(node.tokens) == len(node.logprobs) == len(node.entropies)
    assert lm.stats().steps < max(len(node.tokens) for node in made)  # what is forced runs together
    node = made[0]
    rows = oracle(node.get_prefix_tokens()).astype(np.float64)[len(loom.tokens) - 1 : -1]
    logp = rows - np.log(np.exp(rows).sum(1, keepdims=True))
    expected = logp[np.arange(len(node.tokens)), node.tokens]
    np.testing.assert_allclose(node.logprobs, expected, atol=TOLERANCE["float32"])
    entropies = -(np.exp(logp) * logp).sum(1)
    np.testing.assert_allclose(node.entropies, entropies, atol=10 * TOLERANCE["float32"])


@pytest.mark.parametrize("options", [{}, {"max_tokens": 7}, {"stop": '"animal"'}, {"n_batch": 8}])
def test_forced_tokens_change_no_text(make, kind, monkeypatch, options) -> None:
    """The twin: every token drawn under its mask, one at a time."""
    options = dict(options)
    limits = {"n_batch": options.pop("n_batch", 512)} if kind != "hidden" else {}
    options.pop("n_batch", None)
    grown = []
    for forces in (True, False):
        if not forces:
            monkeypatch.setattr(GrammarMatcher, "forced", lambda self: [])
        loom = Loom(make(kind, **limits), record)
        wanted = {"max_tokens": 80, **options}
        made = loom.grow(n=4, constraint=JsonSchema(SCHEMA), seed=4, **wanted, **WARM)
        grown.append(made)
    for one, two in zip(*grown, strict=True):
        assert one.tokens == two.tokens
        assert (one.finish_reason, one.terminal) == (two.finish_reason, two.terminal)
        assert one.stop_string == two.stop_string
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-3)


def test_many_constraints_and_none_share_a_batch(make, kind) -> None:
    lm = make(kind)
    loom = Loom(lm, STORY)
    alone = loom.grow(n=2, max_tokens=12, seed=1, **WARM)
    patterns = ["[0-9]{4}", "(ab)+c", None, "yes|no"]
    nodes = [loom.add(" ") for _ in patterns]
    made = []
    for node, pattern in zip(nodes, patterns, strict=True):
        options = {} if pattern is None else {"constraint": Regex(pattern)}
        made.append(node.grow(n=3, max_tokens=12, seed=2, **options, **WARM))
    for pattern, branches in zip(patterns, made, strict=True):
        if pattern is not None:
            ended = [branch.text for branch in branches if branch.terminal]
            assert all(re.fullmatch(pattern, text) for text in ended)
    again = loom.grow(n=2, max_tokens=12, seed=1, **WARM)
    assert [node.text for node in again] == [node.text for node in alone]


def test_a_text_that_was_cut_short_is_gone_on_with(make, kind) -> None:
    lm = make(kind)
    loom = Loom(lm, record)
    (begun,) = loom.grow(n=1, max_tokens=6, constraint=SCHEMA, seed=2, **WARM)
    assert begun.finish_reason == "length"
    with pytest.raises(ValueError, match=r"."):
        _ = begun.parsed
    for child in begun.grow(n=3, max_tokens=80, constraint=SCHEMA, seed=3, **WARM):
        assert child.parsed == json.loads(begun.text + child.text)
    # Another constraint begins anew.
    (other,) = begun.grow(n=1, max_tokens=8, constraint=Choice(["yes"]), **WARM)
    assert (other.text, other.parsed) == ("yes", "yes")
    with pytest.raises(ConfigError, match="without a constraint"):
        _ = loom.grow(n=1, max_tokens=2, **WARM)[0].parsed


def test_a_saved_loom_keeps_its_constraints(make, tmp_path) -> None:
    loom = Loom(make("numpy"), record)
    loom.grow(n=1, max_tokens=80, constraint=SCHEMA, seed=1, **WARM)
    loom.save(tmp_path / "a.loom.json")
    again = Loom.open(tmp_path / "a.loom.json").children[0]
    assert again.params.constraint == JsonSchema(SCHEMA)
    assert again.parsed == loom.children[0].parsed


def test_a_dead_end_fails_its_own_branch_only(make, kind) -> None:
    lm = make(kind)
    loom = Loom(lm, STORY)
    digits = {lm.tokenize(d, add_bos=False)[0]: -np.inf for d in "0123456789"}
    with pytest.raises(DeadEnd, match="no token after 0 new ones"):
        loom.grow(n=2, constraint=Regex("[0-9]"), logit_bias=digits, **WARM)
    letter = lm.tokenize("a", add_bos=False)[0]
    only = {**digits, **{end: -np.inf for end in lm.text.stop_ids}}
    with pytest.raises(DeadEnd, match=rf"no token after 1 new ones.*\[{letter}\]"):
        loom.grow(n=1, constraint=Regex("a[0-9][0-9]"), logit_bias=only, **WARM)
    assert loom.grow(n=1, max_tokens=4, **WARM)[0].text


def test_a_wrong_grammar_is_told_before_anything_runs(make) -> None:
    lm = make("numpy")
    loom = Loom(lm, STORY)
    with pytest.raises(GrammarError):
        loom.grow(n=2, constraint=Regex("((("))
    with pytest.raises(GrammarError):
        Branch.create(lm, grammar="root ::= (((")
    with pytest.raises(ConfigError, match="token id"):
        loom.grow(n=2, constraint=Allow({lm.info.n_vocab}))
    assert lm.stats().prefilled == 0
    assert not loom.children


def test_a_branch_under_a_grammar_forks_rewinds_and_refuses(make, kind) -> None:
    lm = make(kind)
    ids = Loom(lm, record).tokens
    branch = Branch.create(lm, grammar='root ::= "{" [a-z] [a-z] [a-z] "}"', seed=1)
    branch.prefill(ids)
    wrong = lm.tokenize("Z", add_bos=False)[0]
    assert not branch.is_legal(wrong)
    assert branch.legal().tolist() == [branch.is_legal(t) for t in range(lm.info.n_vocab)]
    with pytest.raises(ConstraintError):
        branch.commit(wrong)
    assert branch.tokens == ids
    while len(branch.text) < 3:
        branch.commit(branch.produce().token)
    forks = [branch.fork() for _ in range(3)]
    for each in (branch, *forks):
        assert list(each)
        assert re.fullmatch(r"\{[a-z]{3}\}", each.text)
    branch.rewind(len(branch.tokens) - len(ids))
    assert branch.is_legal(lm.tokenize("{", add_bos=False)[0])
    assert not branch.is_legal(wrong)
    branch.set_grammar(None)
    assert branch.is_legal(wrong)
    branch.set_grammar_lazy(r'root ::= "x" [0-9]', ["x"])
    assert branch.is_legal(wrong)


def test_a_lazy_grammar_in_a_run(make) -> None:
    lm = make("numpy")
    loom = Loom(lm, record)
    lazy = Lazy(Regex(r'"age": 99\}'), ['"age"'])
    texts = [node.text for node in loom.grow(n=4, max_tokens=60, constraint=lazy, seed=1, **WARM)]
    assert any('"age"' in text for text in texts)
    assert all(text.endswith('"age": 99}') for text in texts if '"age"' in text)


def test_fifty_records_of_fifty_are_valid(make) -> None:
    loom = Loom(make("numpy"), record)
    for node in loom.grow(n=50, max_tokens=80, constraint=SCHEMA, seed=9, **WARM):
        found = node.parsed
        assert re.fullmatch("[A-Z][a-z]{1,9}", found["name"])
        assert found["animal"] in ("owl", "fox", "otter")
        assert 1 <= found["age"] <= 12
