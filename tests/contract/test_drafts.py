"""Speculative decoding on every engine with KV of its own: the same texts, scores and KV."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import numpy as np
import pytest

import weft
from contract.helpers import STORY, assert_close, logits_at, prompt_ids, within
from rig import FreeSteps, verify_always
from shallow import shallow
from weft import Branch, BranchStore, Loom
from weft._core.sched.draft_model import DraftModel
from weft.errors import ConfigError, Unsupported
from weft.lm.lm import LM
from weft.samples import record

SCHEMA = {
    "type": "array",
    "minItems": 2,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [1, 2, 3]}},
        "required": ["name", "age"],
    },
}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"n": 3, "temperature": 0.6, "seed": 1},
    "filtered": {"n": 2, "temperature": 1.1, "top_p": 0.6, "min_p": 0.05, "seed": 2},
    "penalised": {"n": 2, "temperature": 0.5, "repetition_penalty": 1.2, "seed": 3},
    "window": {"temperature": 0.4, "frequency_penalty": 0.4, "penalty_last_n": 8, "seed": 4},
    "dry": {"n": 2, "temperature": 0.5, "dry_multiplier": 0.8, "seed": 3},
    "stopped": {"n": 2, "temperature": 0.5, "stop": ["the", "."], "seed": 5},
    "constrained": {"n": 2, "temperature": 0.8, "constraint": SCHEMA, "seed": 6},
    "biased": {"temperature": 0.6, "logit_bias": {40: 1.5, 50: float("-inf")}, "seed": 7},
}


def grow(lm: LM, options: dict[str, Any]) -> list[Any]:
    """Grow two looms of different prompts, one after the other; return all nodes."""
    looms = [Loom(lm, record), Loom(lm, STORY)]
    options = {"n": 1, "max_tokens": 20, "show": False, **options}
    return [node for loom in looms for node in loom.grow(**options)]


@pytest.mark.parametrize("call", CALLS)
def test_drafts_change_no_text_and_no_record(make: Any, kv_kind: str, call: str) -> None:
    """The second half of the calls finds the texts of the first half as drafts."""
    lm: LM = make(kv_kind)
    expected = grow(lm, CALLS[call])
    lm.clear_cache()
    verify_always(lm.scheduler)
    for nodes in (grow(lm, CALLS[call]), grow(lm, CALLS[call])):
        for node, plain in zip(nodes, expected, strict=True):
            assert node.tokens == plain.tokens
            assert node.finish_reason == plain.finish_reason
            assert node.stop_string == plain.stop_string
            np.testing.assert_allclose(node.logprobs, plain.logprobs, atol=within())
            np.testing.assert_allclose(node.entropies, plain.entropies, atol=10 * within())
            np.testing.assert_allclose(node.legal_logmass, plain.legal_logmass, atol=within())
    stats = lm.stats()
    assert stats.draft_accepted
    assert stats.drafted >= stats.draft_accepted


def test_kv_of_verified_tokens_is_that_of_a_plain_forward(
    make: Any, kv_kind: str, oracle: Any
) -> None:
    lm: LM = make(kv_kind)
    verify_always(lm.scheduler)
    loom = Loom(lm, STORY)
    for seed in (1, 2, 3, 4):
        nodes = loom.grow(n=2, max_tokens=30, temperature=0.9, seed=seed, show=False)
    assert lm.stats().drafted > lm.stats().draft_accepted > 0
    for node in nodes:
        ids = node.get_prefix_tokens()
        assert_close(logits_at(lm, [*ids, 7]), oracle([*ids, 7])[-1])


def test_streamed_tokens_with_drafts_are_those_of_grow(make: Any, kv_kind: str) -> None:
    lm: LM = make(kv_kind)
    verify_always(lm.scheduler)
    options: dict[str, Any] = {"n": 2, "max_tokens": 30, "temperature": 0.6, "seed": 3}
    expected = [node.tokens for node in Loom(lm, STORY).grow(show=False, **options)]
    streamed: dict[int, list[int]] = {0: [], 1: []}
    for delta in Loom(lm, STORY).stream(**options):
        streamed[delta.branch] += delta.token_ids
    assert list(streamed.values()) == expected


def test_assigned_draft_is_used_and_removed(make: Any, kv_kind: str) -> None:
    lm: LM = make(kv_kind, draft="lookup")
    assert lm.draft == "lookup"
    assert lm.tree.on_insert is not None
    lm.draft = None
    assert lm.tree.on_insert is None
    with pytest.raises(ConfigError, match="draft is 'ngram'; allowed are"):
        lm.draft = "ngram"  # type: ignore[assignment]


@pytest.mark.parametrize("kind", ["hidden"], indirect=True)
def test_engine_that_hides_its_kv_rejects_drafts(make: Any, kind: str) -> None:
    with pytest.raises(Unsupported, match="verifies no drafts"):
        make(kind, draft="lookup")
    assert make(kind).draft is None


# Branches -----------------------------------------------------------------------------------------


def decode(lm: LM, options: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Decode two branches, with a fork, a rewind, a foreign token and a prune between commits.

    Returns: of each branch its tokens, perplexities, and last logits.
    """
    options = {name: value for name, value in options.items() if name not in ("n", "stop")}
    store, root = BranchStore(lm), Branch.create(lm, **{"seed": 1, **options})
    root.prefill(prompt_ids(lm, STORY))
    branches, records = [root.fork(), root.fork()], []
    for number in range(24):
        if number == 10:
            branches.append(branches[0].fork(seed=9))
        if number == 15:
            branches[1].rewind(4)
        if number == 18:
            branches.pop().prune()
        live = [branch for branch in branches if not branch.produce().is_stop]
        pieces = store.produce(live)
        records += [(piece.token, piece.logprob, piece.kept_logprob) for piece in pieces]
        tokens = [piece.token for piece in pieces]
        if number == 12 and root.params.constraint is None:
            tokens[0] = 77
        store.commit(list(zip(live, tokens, strict=True)))
    ends = [(b.tokens, b.perplexity, b.sampling_perplexity, b.logits) for b in branches]
    root.prune_subtree()
    return [tuple(zip(*records, strict=True)), *ends]


@pytest.mark.parametrize("call", [name for name in CALLS if name != "stopped"])
def test_drafts_change_no_token_and_no_logits_of_branches(
    make: Any, kv_kind: str, call: str
) -> None:
    lm: LM = make(kv_kind)
    (tokens, logprobs, kept), *ends = decode(lm, CALLS[call])
    verify_always(lm.scheduler)
    for _ in range(2):
        own, *branches = decode(lm, CALLS[call])
        assert own[0] == tokens
        np.testing.assert_allclose(own[1], logprobs, atol=within())
        np.testing.assert_allclose(own[2], kept, atol=within())
        for branch, end in zip(branches, ends, strict=True):
            assert branch[0] == end[0]
            np.testing.assert_allclose(branch[1:3], end[1:3], rtol=within())
            assert_close(branch[3], end[3])
        lm.tree.check()
    assert lm.stats().draft_accepted


# A draft model -----------------------------------------------------------------------------------


@pytest.fixture
def small(text: Any) -> Iterator[LM]:
    """A model that is often right: the shallow one, in another engine."""
    from weft.engines.numpy import NumpyEngine

    lm = LM(NumpyEngine.load(shallow()), text)
    yield lm
    lm.tree.check()
    lm.close()


@pytest.mark.parametrize("kv_kind", ["numpy", "torch"], indirect=True)
@pytest.mark.parametrize("call", ["greedy", "sampled", "penalised", "constrained"])
def test_draft_model_changes_no_text_and_no_record(
    make: Any, kv_kind: str, call: str, small: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm: LM = make(kv_kind)
    expected = grow(lm, CALLS[call])
    lm.clear_cache()
    lm.draft = small
    draft_always(lm, monkeypatch)
    for node, plain in zip(grow(lm, CALLS[call]), expected, strict=True):
        assert node.tokens == plain.tokens
        assert (node.finish_reason, node.stop_string) == (plain.finish_reason, plain.stop_string)
        np.testing.assert_allclose(node.logprobs, plain.logprobs, atol=within())
        np.testing.assert_allclose(node.legal_logmass, plain.legal_logmass, atol=within())
    assert lm.stats().draft_accepted


def draft_always(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the draft model draw four tokens for each run in each step."""
    monkeypatch.setattr(DraftModel, "_n_draft", four_tokens)
    speculation = lm.scheduler.queues.speculation
    assert speculation is not None
    speculation.costs, speculation.min_gain = FreeSteps(), 1.0


def four_tokens(model: Any, run: Any, drafts: Any, *_: Any) -> int:
    is_free = run.can_verify and not drafts.draft(1)
    return max(min(4, run.room(2000) - 1), 0) if is_free else 0


def test_draft_model_frees_the_kv_of_rejected_tokens(
    make: Any, small: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It draws without the run's penalties, so that many drafts are rejected."""
    lm: LM = make("numpy")
    lm.draft = small
    draft_always(lm, monkeypatch)
    loom = Loom(lm, STORY)
    options: dict[str, Any] = {"n": 1, "max_tokens": 60, "seed": 4, "show": False}
    (node,) = loom.grow(temperature=0.5, repetition_penalty=2, presence_penalty=1, **options)
    stats = lm.stats()
    assert stats.drafted - stats.draft_accepted > 20
    n_path = len(node.get_prefix_tokens())
    assert small.stats().kv_tokens <= n_path + 8  # the last drafts are freed before the next ones


def test_failed_draft_model_is_not_used_any_more(
    make: Any, small: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm: LM = make("numpy")
    lm.draft = small
    draft_always(lm, monkeypatch)
    small.close()
    nodes = grow(lm, CALLS["greedy"])
    assert all(node.tokens for node in nodes)
    assert not lm.stats().drafted


def test_draft_model_with_other_tokens_is_rejected(make: Any) -> None:
    lm: LM = make("numpy")
    with pytest.raises(ConfigError, match="this LM itself"):
        lm.draft = lm
    other = weft.load("tiny", engine="numpy")
    codec: Any = copy(other.text._codec)  # tests share the embedded model's
    codec.vocab_bytes = [*codec.vocab_bytes[:20], b"other", *codec.vocab_bytes[21:]]
    other.text._codec = codec
    with pytest.raises(ConfigError, match="tokens are not those"):
        lm.draft = other
    other.close()
