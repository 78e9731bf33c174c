"""Constrained generation on every engine and fake."""

from __future__ import annotations

import asyncio
import json
import re

import numpy as np
import pytest

from contract.conftest import KINDS
from contract.helpers import STORY, TOLERANCE
from weft import Branch, BranchStore, Loom, load
from weft.constraints import Allow, Choice, JsonSchema, Lark, Lazy, Regex
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


def test_constrained_texts_fit_and_their_scores_are_raw(make, kind, oracle) -> None:
    lm = make(kind)
    loom = Loom(lm, record)
    nodes = loom.grow(n=6, max_tokens=80, constraint=SCHEMA, seed=1, **WARM)
    for node in nodes:
        assert node.terminal
        assert node.finish_reason == "stop"
        assert list(node.parsed) == ["name", "animal", "age"]
    if lm.info.own_random:  # and masks of its own: it reports no scores of constrained runs
        return
    for node in nodes:
        assert len(node.tokens) == len(node.logprobs) == len(node.entropies)
    assert lm.stats().steps < max(
        len(node.tokens) for node in nodes
    )  # what is forced runs together
    node = nodes[0]
    rows = oracle(node.get_prefix_tokens()).astype(np.float64)[len(loom.tokens) - 1 : -1]
    logp = rows - np.log(np.exp(rows).sum(1, keepdims=True))
    expected = logp[np.arange(len(node.tokens)), node.tokens]
    np.testing.assert_allclose(node.logprobs, expected, atol=TOLERANCE["float32"])
    entropies = -(np.exp(logp) * logp).sum(1)
    np.testing.assert_allclose(node.entropies, entropies, atol=10 * TOLERANCE["float32"])


def test_legal_logmass_is_the_mass_of_all_allowed_tokens(make, kind, oracle) -> None:
    """One per token, and one for an end token that was not forced. Forced tokens: their logprob."""
    lm = make(kind)
    loom = Loom(lm, record)
    pattern = Regex("(owl|fox)(es ?)*")
    nodes = loom.grow(n=8, max_tokens=12, constraint=pattern, seed=3, **WARM)
    if lm.info.own_random:
        assert not any(node.legal_logmass for node in nodes)
        return
    for node in nodes:
        rows = oracle(node.get_prefix_tokens()).astype(np.float64)[len(loom.tokens) - 1 :]
        matcher = lm.constraints.matcher(pattern)
        expected = []
        for row, token in zip(rows, [*node.tokens, None], strict=True):
            legal = [each for each in range(lm.info.n_vocab) if matcher.is_allowed(each)]
            top = row.max()
            total = np.log(np.exp(row - top).sum())
            ids = [legal, [token] if matcher.forced()[:1] == [token] else legal]
            expected.append([np.log(np.exp(row[each] - top).sum()) - total for each in ids])
            if token is not None:
                matcher.accept(token)
        n = len(node.tokens) + (node.terminal and not matcher.must_end)
        assert len(node.legal_logmass) == n
        for got, allowed in zip(node.legal_logmass, expected, strict=False):
            assert min(abs(got - value) for value in allowed) < 1e-3
    assert any(node.terminal and len(node.legal_logmass) > len(node.tokens) for node in nodes)
    (free,) = loom.grow(n=1, max_tokens=3, seed=1, **WARM)
    assert free.legal_logmass == []


@pytest.mark.parametrize("options", [{}, {"max_tokens": 7}, {"stop": '"animal"'}, {"n_batch": 8}])
def test_forced_tokens_change_no_text(make, kind, monkeypatch, options) -> None:
    """The twin: every token drawn under its mask, one at a time."""
    options = dict(options)
    n_batch = options.pop("n_batch", 512)
    limits = {"n_batch": n_batch} if make(kind).info.kv != "hidden" else {}
    grown = []
    for forces in (True, False):
        if not forces:
            monkeypatch.setattr(GrammarMatcher, "forced", lambda self, *sets: [])
        loom = Loom(make(kind, **limits), record)
        wanted = {"max_tokens": 80, **options}
        nodes = loom.grow(n=4, constraint=JsonSchema(SCHEMA), seed=4, **wanted, **WARM)
        grown.append(nodes)
    for one, two in zip(*grown, strict=True):
        assert one.tokens == two.tokens
        assert (one.finish_reason, one.terminal) == (two.finish_reason, two.terminal)
        assert one.stop_string == two.stop_string
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-3)


def test_different_constraints_and_none_share_a_batch(make, kind) -> None:
    lm = make(kind)
    loom = Loom(lm, STORY)
    alone = loom.grow(n=2, max_tokens=12, seed=1, **WARM)
    patterns = ["[0-9]{4}", "(ab)+c", None, "yes|no"]
    nodes = [loom.add(" ") for _ in patterns]
    groups = []
    for node, pattern in zip(nodes, patterns, strict=True):
        options = {} if pattern is None else {"constraint": Regex(pattern)}
        groups.append(node.grow(n=3, max_tokens=12, seed=2, **options, **WARM))
    for pattern, branches in zip(patterns, groups, strict=True):
        if pattern is not None:
            ended = [branch.text for branch in branches if branch.terminal]
            assert all(re.fullmatch(pattern, text) for text in ended)
    repeated = loom.grow(n=2, max_tokens=12, seed=1, **WARM)
    assert [node.text for node in repeated] == [node.text for node in alone]


def test_truncated_text_is_continued_under_its_constraint(make, kind) -> None:
    lm = make(kind)
    loom = Loom(lm, record)
    (begun,) = loom.grow(n=1, max_tokens=6, constraint=SCHEMA, seed=2, **WARM)
    assert begun.finish_reason == "length"
    with pytest.raises(ValueError, match=r"."):
        _ = begun.parsed
    for child in begun.grow(n=3, max_tokens=80, constraint=SCHEMA, seed=3, **WARM):
        assert child.parsed == json.loads(begun.text + child.text)
    # Another constraint starts from its beginning.
    (other,) = begun.grow(n=1, max_tokens=8, constraint=Choice(["yes"]), **WARM)
    assert (other.text, other.parsed) == ("yes", "yes")
    with pytest.raises(ConfigError, match="without a constraint"):
        _ = loom.grow(n=1, max_tokens=2, **WARM)[0].parsed


def test_saved_loom_keeps_its_constraints(make, tmp_path) -> None:
    loom = Loom(make("numpy"), record)
    loom.grow(n=1, max_tokens=80, constraint=SCHEMA, seed=1, **WARM)
    loom.save(tmp_path / "a.loom.json")
    repeated = Loom.open(tmp_path / "a.loom.json").children[0]
    assert repeated.params.constraint == JsonSchema(SCHEMA)
    assert repeated.parsed == loom.children[0].parsed
    assert repeated.legal_logmass == loom.children[0].legal_logmass != []


def test_dead_end_fails_its_own_branch_only(make, kind) -> None:
    lm = make(kind)
    loom = Loom(lm, STORY)
    digits = {lm.tokenize(d, add_bos=False)[0]: -np.inf for d in "0123456789"}
    with pytest.raises(DeadEnd, match="no token after 0 new ones"):
        loom.grow(n=2, constraint=Regex("[0-9]"), logit_bias=digits, **WARM)
    token = lm.tokenize("a", add_bos=False)[0]
    only = {**digits, **{end: -np.inf for end in lm.text.stop_ids}}
    with pytest.raises(DeadEnd, match=rf"no token after 1 new ones.*\[{token}\]"):
        loom.grow(n=1, constraint=Regex("a[0-9][0-9]"), logit_bias=only, **WARM)
    assert loom.grow(
        n=1, max_tokens=4, logit_bias=dict.fromkeys(lm.text.stop_ids, -np.inf), **WARM
    )[0].text


def test_invalid_grammar_raises_before_anything_runs(make) -> None:
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


def test_branch_with_a_grammar_forks_rewinds_and_rejects_tokens(make, kind) -> None:
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
    for one in (branch, *forks):
        assert list(one)
        assert re.fullmatch(r"\{[a-z]{3}\}", one.text)
    branch.rewind(len(branch.tokens) - len(ids))
    assert branch.is_legal(lm.tokenize("{", add_bos=False)[0])
    assert not branch.is_legal(wrong)
    branch.set_grammar(None)
    assert branch.is_legal(wrong)
    branch.set_grammar_lazy(r'root ::= "x" [0-9]', ["x"])
    assert branch.is_legal(wrong)


def test_lazy_grammar_in_a_run() -> None:
    lazy = Lazy(Regex(r'"age": 99\}'), ['"age"'])
    with load("tiny") as lm:  # which writes such a record by itself
        grown = Loom(lm, record).grow(n=4, max_tokens=60, constraint=lazy, seed=1, **WARM)
        texts = [node.text for node in grown]
    assert any('"age"' in text for text in texts)
    assert all(text.endswith('"age": 99}') for text in texts if '"age"' in text)


def test_fifty_records_of_fifty_are_valid(make) -> None:
    loom = Loom(make("numpy"), record)
    for node in loom.grow(n=50, max_tokens=80, constraint=SCHEMA, seed=9, **WARM):
        result = node.parsed
        assert re.fullmatch("[A-Z][a-z]{1,9}", result["name"])
        assert result["animal"] in ("owl", "fox", "otter")
        assert 1 <= result["age"] <= 12


# The library stops at 2,000 items in a row: after "a" and "b" this grammar has two a rule.
_MANY = " | ".join(f"r{i}" for i in range(1050))
_RULES = "\n".join(f'r{i}: "x" r{i} | "y{i}"' for i in range(1050))
TOO_MANY = Lark(f'start: "c" | "a" "b" ({_MANY})\n{_RULES}')
CHOSEN = Lark(f'start: "c" | "a" ("b" | "d") ({_MANY})\n{_RULES}')


@pytest.mark.parametrize(
    ("kind", "grammar"),
    [
        pytest.param(
            each, TOO_MANY, id=f"{each}-forced", marks=[pytest.mark.slow] * (each == "paged")
        )
        for each in KINDS
    ]
    + [
        pytest.param(each, CHOSEN, id=f"{each}-drawn", marks=[pytest.mark.slow] * (each != "numpy"))
        for each in KINDS
    ],
)
def test_failure_inside_the_grammar_library_raises_an_error(make, kind, grammar) -> None:
    lm = make(kind)
    loom = Loom(lm, STORY)
    b = lm.tokenize("b", add_bos=False)[0]
    only_ab = {lm.tokenize("c", add_bos=False)[0]: -np.inf}
    calls = {"constraint": grammar, "logit_bias": only_ab, "max_tokens": 8, **WARM}
    with pytest.raises(ConstraintError, match="the grammar library gave up.*2000") as caught:
        loom.grow(n=2, **calls)
    assert not isinstance(caught.value, DeadEnd)
    assert len(str(caught.value)) < 400
    assert not loom.children
    # Live runs next to it continue.
    other = Loom(lm, record)
    plain = {"n": 3, "max_tokens": 20, "seed": 1}
    alone = [node.text for node in other.grow(**plain)]

    async def run_both():
        del calls["show"]
        both = (loom.agrow(n=2, **calls), other.agrow(**plain))
        return await asyncio.gather(*both, return_exceptions=True)

    failed, fine = asyncio.run(run_both())
    assert isinstance(failed, ConstraintError)
    assert [node.text for node in fine] == alone
    with Branch.create(lm, grammar=grammar) as branch:
        branch.prefill(loom.tokens)
        branch.commit(lm.tokenize("a", add_bos=False)[0])
        with pytest.raises(ConstraintError, match="gave up"):
            branch.commit(b)
        assert branch.text == "a"


def test_branch_without_a_legal_token_fails_alone_in_its_call(make, kind, caplog) -> None:
    lm = make(kind)
    loom = Loom(lm, STORY)
    digits = {lm.tokenize(d, add_bos=False)[0]: -np.inf for d in "0123456789"}
    # Some first characters require a capital, the others a digit.
    halves = Regex("[a-m][A-Z]|[n-z][0-9]")
    calls = {"constraint": halves, "logit_bias": digits, "temperature": 100, "show": False}
    nodes = loom.grow(n=8, seed=5, **calls)
    assert 0 < len(nodes) < 8
    assert len(nodes) + len(nodes.failed) == 8
    assert all(isinstance(error, DeadEnd) for error in nodes.failed)
    assert all(node.text[0] < "n" and node.terminal for node in nodes)
    assert loom.children == list(nodes)
    assert "failed" in repr(nodes)
    assert "failed" in nodes._repr_html_()
    assert f"{len(nodes.failed)} of 8 branches failed" in caplog.text
    # Streamed, it is the same.
    del calls["show"]
    reported = {}
    for delta in loom.stream(n=8, seed=5, **calls):
        reported[delta.branch] = delta.finish_reason or reported.get(delta.branch)
    assert sorted(reported.values()) == ["error"] * len(nodes.failed) + ["stop"] * len(nodes)
    leaves = [loom.add(" x"), loom.add(" y")]
    loom.apply_at_leaves(lambda leaf: leaf.ramify(n=6, seed=5, **calls))
    assert all(0 < len(leaf.children) < 6 for leaf in leaves)


def test_continued_and_new_greedy_texts_differ(make, kind) -> None:
    """Both stand at the same place of the token tree, with equal parameters."""
    lm = make(kind)
    loom = Loom(lm, STORY)
    cold = {"temperature": 0, "show": False, "constraint": Regex("ab{3}|ab{3}ab{3}")}
    (begun,) = loom.grow(n=1, max_tokens=1, **cold)
    begins = loom.add("a")
    assert begun.tokens == begins.tokens
    nodes = loom.grow(n=1, at=[begun, begins], max_tokens=9, **cold)
    assert nodes[0].text.startswith("bbb")
    assert nodes[1].text.startswith("abbb")


def test_forced_end_needs_no_end_token(make, kind) -> None:
    """An end token that a bias forbids is not missed where the text is over anyway."""
    lm = make(kind)
    loom = Loom(lm, STORY)
    no_end = {end: -np.inf for end in lm.text.stop_ids}
    for constraint in (Choice(["yes, all of it"]), Regex("[0-9]{3}"), JsonSchema({"const": "é🙂"})):
        for node in loom.grow(n=3, constraint=constraint, logit_bias=no_end, max_tokens=40, **WARM):
            assert (node.finish_reason, node.terminal) == ("stop", True)


def test_dead_branch_of_a_batch_takes_no_draw_of_the_others(make, kind) -> None:
    lm = make(kind)
    ids = Loom(lm, STORY).tokens
    digits = {lm.tokenize(d, add_bos=False)[0]: -np.inf for d in "0123456789"}
    alive = Branch.create(lm, grammar=Regex("[a-z]+"), seed=1)
    dead = Branch.create(lm, grammar=Regex("[0-9]"), logit_bias=digits, seed=1)
    for branch in (dead, alive):
        branch.prefill(ids)
    store = BranchStore(lm)
    with pytest.raises(DeadEnd):
        store.produce([dead, alive])
    drawn = alive.drawn
    assert drawn is not None
    assert store.produce([alive]) == [drawn]
    alive.prune()
    dead.prune()
