"""Chats over a trunk, and documents ranked by a yes or no."""

from __future__ import annotations

import asyncio

import pytest

import weft
from shallow import shallow
from weft import Branch, samples
from weft.branch import Rerank, Session
from weft.errors import ConfigError, ContextOverflow, StaleHandle


@pytest.fixture(scope="module")
def lm():
    return weft.load(shallow(), engine="numpy")


def answer(branch: Branch, n: int = 6) -> str:
    return "".join(piece.text for _, piece in zip(range(n), branch, strict=False))


def chat_ids(lm, messages) -> list[int]:
    """The tokens of a complete chat up to the text of its last answer, rendered at once."""
    *before, last = messages
    return [*lm.text.encode_chat(before), *lm.text.continuation(last["content"])]


def test_turns_prefill_their_delta_and_the_trunk_is_the_complete_chat(lm) -> None:
    session = Session(lm, seed=1, temperature=1.0)
    assert session.messages == []
    session.prefill_user(samples.sum)
    first = answer(session.trunk)
    before = lm.stats().prefilled
    session.prefill_user("And <|user|> then?")
    session.commit_turn("How much?", "Seven.")
    session.prefill_user("Why?")
    session.prefill_assistant("Because")
    added = lm.stats().prefilled - before
    roles = [message["role"] for message in session.messages]
    assert roles == ["user", "assistant"] * 4
    assert [m["content"] for m in session.messages[1::2]] == [first, "", "Seven.", "Because"]
    assert session.trunk.text.startswith(first)
    chat_text = lm.detokenize(session.trunk.tokens)
    assert chat_text == lm.detokenize(chat_ids(lm, session.messages))
    assert added < len(session.trunk.tokens)


def test_promoted_fork_survives_and_the_others_end(lm) -> None:
    session = Session(lm, seed=1, temperature=1.5)
    session.prefill_user(samples.sum)
    root = session.trunk
    forks = [root.fork() for _ in range(3)]
    message = [answer(fork) for fork in forks]
    below = forks[1].fork()
    session.promote(forks[1])
    assert session.trunk is forks[1]
    assert [b.disposed for b in (root, *forks, below)] == [True, True, False, True, False]
    assert session.trunk.parent is None
    assert below.parent is session.trunk
    assert session.messages[-1] == {"role": "assistant", "content": message[1]}
    session.prefill_user("More?")
    assert session.messages[-2]["content"] == "More?"
    other = Branch.create(lm)
    session.promote(session.trunk)  # is it already
    assert not session.trunk.disposed
    assert not other.disposed  # one that the trunk knows nothing of
    with pytest.raises(StaleHandle):
        session.promote(root)
    with pytest.raises(ConfigError, match="another LM"):
        session.swap(Branch.create(weft.load(shallow(), engine="numpy")))


def test_swapped_trunk_stays_live_and_forks_have_their_own_turn(lm) -> None:
    session = Session(lm, seed=1, temperature=1.5)
    session.prefill_user(samples.sum)
    text = answer(session.trunk)
    early = session.trunk.fork()
    start = session.trunk.position
    session.prefill_user("Second?")
    answer(session.trunk)
    old = session.swap(early)
    assert [m["content"] for m in session.messages] == [samples.sum, text]
    session.prefill_user("Another second?")
    assert session.messages[2]["content"] == "Another second?"
    late = session.swap(old)
    assert late is early
    assert [m["content"] for m in session.messages][2] == "Second?"
    back = old.fork(at=start)
    session.swap(back)
    assert [m["content"] for m in session.messages] == [samples.sum, text]
    old.rewind(old.position - start + 1)
    session.swap(old)
    assert len(session.messages) == 2
    session.close()
    assert old.disposed
    session.close()


def test_session_can_be_awaited(lm) -> None:
    async def main() -> list[str]:
        session = Session(lm, seed=1)
        await session.aprefill_user(samples.sum)
        await session.aprefill_assistant("Nine")
        await session.acommit_turn("a", "b")
        return [m["content"] for m in session.messages]

    assert asyncio.run(main()) == [samples.sum, "Nine", "a", "b"]


def test_invalid_session_calls_raise_and_change_nothing(lm) -> None:
    with pytest.raises(ConfigError):
        Session(lm, template_kwargs={"no_such_variable": 1})
    with pytest.raises(ConfigError):
        Session(lm, no_such_option=1)
    session = Session(lm)
    with pytest.raises(ContextOverflow):
        session.prefill_user("word " * 5000)
    assert session.messages == []
    assert session.trunk.position == 0


DOCUMENTS = ["4 4 10", "1 1 1", "8 3 1", "1 1 1"]


def test_documents_are_scored_by_the_odds_of_one_word_over_another(lm) -> None:
    rerank = Rerank(
        lm, question="Can {document} make {query}?", words=("sure", "impossible"), n_at_once=3
    )
    scores = rerank.score("24", DOCUMENTS)
    good, bad = (lm.text.continuation(word)[0] for word in ("sure", "impossible"))
    for document, score in zip(DOCUMENTS, scores, strict=True):
        alone = Branch.create(lm)
        message = {"role": "user", "content": f"Can {document} make 24?"}
        alone.prefill(lm.text.encode_chat([message]))
        assert score == pytest.approx(float(alone.logits[good] - alone.logits[bad]), abs=1e-4)
    ranked = rerank.rank("24", DOCUMENTS)
    assert [each.score for each in ranked] == sorted(scores, reverse=True)
    assert [each.document for each in ranked] == [DOCUMENTS[each.index] for each in ranked]
    assert all(0 < each.p < 1 and (each.p > 0.5) == (each.score > 0) for each in ranked)
    assert rerank.rank("24", DOCUMENTS, top=2) == ranked[:2]
    assert asyncio.run(rerank.arank("24", DOCUMENTS)) == ranked
    assert rerank.score("24", []) == []


def test_common_prefix_of_prompts_is_computed_once(lm) -> None:
    rerank = Rerank(lm)
    query = "which of these has a fox in it, and why? " * 4
    documents = [f"{n} {samples.story}" for n in range(8)]
    lm.clear_cache()
    before = lm.stats().prefilled
    rerank.score(query, documents)
    n_prompt = len(rerank._prompt(query, documents[0]))
    assert lm.stats().prefilled - before < 8 * n_prompt / 2


def test_invalid_rerank_calls_raise_and_are_named(lm) -> None:
    for wrong in (
        {"question": "{query}"},
        {"words": ("yes", "yes")},
        {"n_at_once": 0},
    ):
        with pytest.raises(ConfigError):
            Rerank(lm, **wrong)
    with pytest.raises(ConfigError, match="list of texts"):
        Rerank(lm).score("q", "one text")
    with pytest.raises(ContextOverflow):
        Rerank(lm).score("q", ["word " * 5000])
    assert Rerank(lm).score("{document}", ["{query}"])
