"""Servers without a tokenizer here: trees of text, in pieces as the server names its tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weft
from fake_server import ServerProcess, run_fake_server
from shallow import TINY
from weft import Branch, Loom, search
from weft.constraints import Regex
from weft.engines.remote.text_pieces import END, PieceTokenizer, piece_bytes, pieces_of
from weft.errors import ConfigError, EngineUnavailable, ForwardError, ModelMismatch, Unsupported
from weft.lm.lm import LM

pytestmark = pytest.mark.remote

STORY = "Tell me a story about a fox."


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_fake_server(TINY) as started:
        yield started


@pytest.fixture(scope="module")
def chatty() -> Iterator[ServerProcess]:
    """A server that has chats alone."""
    with run_fake_server(TINY, "--without", "completions") as started:
        yield started


@pytest.fixture
def lm(server: ServerProcess) -> Iterator[LM]:
    with weft.load(server.base) as lm:
        yield lm


@pytest.fixture(scope="module")
def plain() -> Iterator[LM]:
    with weft.load("tiny", engine="numpy") as lm:
        yield lm


@given(st.text())
def test_pieces_are_the_text(text: str) -> None:
    tokenizer = PieceTokenizer(is_chat=False)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.encode(errors="replace").decode()
    stream = tokenizer.stream()
    streamed = "".join(map(stream.push, ids)) + stream.flush()
    assert streamed == tokenizer.decode(ids)
    assert all(0 < token < tokenizer.n_vocab for token in ids)


@given(st.binary())
def test_any_bytes_have_pieces(raw: bytes) -> None:
    assert b"".join(map(piece_bytes, pieces_of(raw))) == raw


def test_tree_has_the_servers_tokens(lm: LM, plain: LM) -> None:
    prompt = plain.format_chat([{"role": "user", "content": STORY}])
    (node,) = Loom(lm, str(prompt), template=False).grow(n=1, temperature=0, max_tokens=40)
    ids = plain.tokenize(str(prompt), special=True)
    (want,) = Loom(plain, ids).grow(n=1, temperature=0, max_tokens=40)
    assert node.text == want.text
    assert [lm.token_to_text(token) for token in node.tokens] == [
        plain.token_to_text(token) for token in want.tokens
    ]
    assert node.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    assert node.mean_p == pytest.approx(want.mean_p, abs=1e-4)
    assert (node.terminal, node.finish_reason) == (want.terminal, want.finish_reason)


def test_messages_use_chat_and_raw_text_uses_completions(server: ServerProcess, lm: LM) -> None:
    assert lm.info.extra["manners"].chat is not None
    text_out, raw = Loom(lm, STORY), Loom(lm, "Once upon a time", template=False)
    for loom, key in ((text_out, "messages"), (raw, "prompt")):
        (node,) = loom.grow(n=1, temperature=0, max_tokens=20)
        assert key in server.bodies()[-1]
        assert node.text.strip()
    (first,) = text_out.grow(n=1, temperature=0, max_tokens=200)
    with weft.load(server.base, TINY) as near:
        (want,) = Loom(near, STORY).grow(n=1, temperature=0, max_tokens=200)
    assert first.text == want.text
    assert first.terminal
    assert first.logprobs == pytest.approx(want.logprobs[: len(first.logprobs)], abs=1e-4)


def test_server_without_a_template_uses_completions() -> None:
    with run_fake_server(TINY, "--without", "chat") as bare, weft.load(bare.base) as lm:
        assert lm.info.extra["manners"].chat is None
        assert Loom(lm, "Once upon a time").grow(n=1, max_tokens=4)[0].text
        assert "prompt" in bare.bodies()[-1]


def test_loom_without_a_tokenizer_grows_streams_shows_and_is_saved(lm: LM, tmp_path: Path) -> None:
    loom = Loom(lm, "Once upon a time")
    first = loom.grow(n=3, seed=1, max_tokens=6)
    for _ in first[0].stream(n=2, seed=2, max_tokens=4, stop="."):
        pass
    loom.add(" there was").grow(n=1, temperature=0, max_tokens=3)
    assert "Once upon a time" in str(loom)
    assert loom.to_html()
    loom.save(tmp_path / "a.loom.json")
    repeated = Loom.open(tmp_path / "a.loom.json", lm)
    assert str(repeated) == str(loom)
    assert [node.tokens for node in repeated.walk()] == [node.tokens for node in loom.walk()]
    assert repeated.children[0].grow(n=1, temperature=0, max_tokens=3)[0].text


def test_penalties_without_a_tokenizer_are_the_servers(lm: LM, plain: LM) -> None:
    options: dict[str, Any] = {"n": 1, "temperature": 0, "max_tokens": 20}
    options |= {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    (node,) = Loom(lm, "Once upon a time", template=False).grow(**options)
    (want,) = Loom(plain, "Once upon a time", template=False).grow(**options)
    assert node.text == want.text


def test_calls_that_need_tokens_raise_and_are_named(lm: LM) -> None:
    loom = Loom(lm, "Once upon a time")
    with pytest.raises(Unsupported, match="next-token"):
        loom.next()
    with pytest.raises(Unsupported, match="measuring"):
        loom.measure(" there was")
    with pytest.raises(Unsupported, match="tokenizer=….*org/tiny"):
        loom.grow(n=1, constraint=Regex("[0-9]+"))
    with pytest.raises(Unsupported, match="logit_bias"):
        loom.grow(n=1, logit_bias={5: 1.0})
    with pytest.raises(Unsupported, match="token by token"):
        Branch.create(lm)
    with pytest.raises(Unsupported):
        asyncio.run(weft.AsyncLM(lm).next_token_logprobs(lm.tokenize("Once")))


def test_chat_server_receives_messages(chatty: ServerProcess, plain: LM) -> None:
    with weft.load(chatty.base) as lm:
        assert lm.info.extra["manners"].api == "chat"
        loom = Loom(lm, STORY, system="Be brief.")
        options: Any = {"n": 1, "temperature": 0, "max_tokens": 30}
        (unknown,) = loom.grow(**options)
        assert not unknown.logprobs, "the server's own repetition penalty may have changed them"
        (node,) = loom.grow(**options, repetition_penalty=1)
        want = Loom(plain, STORY, system="Be brief.").grow(**options)[0]
        assert node.text == want.text
        assert node.logprobs == pytest.approx(want.logprobs, abs=1e-4)
        assert chatty.bodies()[-1]["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": STORY},
        ]


def test_unfinished_answer_continues_if_the_server_supports_it(chatty: ServerProcess) -> None:
    with weft.load(chatty.base) as lm:
        (node,) = Loom(lm, STORY).grow(n=1, temperature=0, max_tokens=6)
        (rest,) = node.grow(n=1, temperature=0, max_tokens=6)
        assert chatty.bodies()[-1]["messages"][-1] == {"role": "assistant", "content": node.text}
        (full,) = Loom(lm, STORY).grow(n=1, temperature=0, max_tokens=12)
        assert node.text + rest.text == full.text


def test_an_answer_that_has_begun_is_refused_where_it_cannot(chatty: ServerProcess) -> None:
    with weft.load(chatty.base, engine_options={"dialect": "openai"}) as lm:
        (node,) = Loom(lm, STORY).grow(n=1, temperature=0, max_tokens=6)
        with pytest.raises(Unsupported, match="middle of an answer"):
            node.grow(n=1, temperature=0, max_tokens=6)
        chatty.fault({"kind": "break", "at": 3})
        with pytest.raises(ForwardError, match="cannot continue after 3 tokens"):
            Loom(lm, STORY).grow(n=1, temperature=0, max_tokens=6)
        chatty.fault({"kind": "break", "at": 0})
        assert Loom(lm, STORY).grow(n=1, temperature=0, max_tokens=6)[0].text == node.text


def test_typed_role_markers_are_plain_text(chatty: ServerProcess) -> None:
    with weft.load(chatty.base) as lm:
        typed = "What is <|assistant|> for?"
        Loom(lm, typed).grow(n=1, temperature=0, max_tokens=2)
        assert chatty.bodies()[-1]["messages"] == [{"role": "user", "content": typed}]


def test_end_is_a_token_without_text() -> None:
    assert piece_bytes(END) == b""
    assert END in PieceTokenizer(is_chat=True).stop_ids


PUZZLE = "Use 4 9 10 13 to make 24."


@pytest.mark.parametrize("name", ["tot", "mcts", "adaptive", "smc"])
def test_a_search_by_verdicts_is_refused_before_it_runs(
    server: ServerProcess, lm: LM, name: str
) -> None:
    n_before = len(server.bodies())
    with pytest.raises(Unsupported, match="verdicts.*best-of-n"):
        getattr(search, name)(lm, PUZZLE)
    assert len(server.bodies()) == n_before


def test_answers_are_voted_on_without_logprobs() -> None:
    with run_fake_server(TINY, "--without", "logprobs", "echo") as bare, weft.load(bare.base) as lm:
        assert search.greedy(lm, PUZZLE).text.endswith("24")
        result = search.best_of_n(lm, PUZZLE, n=4, seed=1)
        assert result.votes
        with pytest.raises(Unsupported, match="likelihood"):
            search.beam(lm, PUZZLE, width=2, n=2, seed=1)


def test_ids_are_of_no_table_and_none_but_pieces_are_taken(lm: LM, tmp_path: Path) -> None:
    assert lm.info.n_vocab == 0
    for ids in ([1, 999999], [-1], [0], [1 << 600]):
        with pytest.raises(ConfigError, match="tokenizer="):
            Loom(lm, ids)
    loom = Loom(lm, "Once upon a time", template=False)
    loom.grow(n=1, max_tokens=4, temperature=0)
    assert Loom(lm, loom.tokens).grow(n=1, max_tokens=4, temperature=0)[0].text
    file = tmp_path / "a.loom.json"
    loom.save(file)
    data = json.loads(file.read_text())
    assert data["model"]["n_vocab"] is None
    data["model"]["n_vocab"] = 3 << 512  # as earlier versions wrote it
    file.write_text(json.dumps(data))
    assert str(Loom.open(file, lm)) == str(Loom.open(file)) == str(loom)
    with weft.load("tiny", engine="numpy") as other, pytest.raises(ModelMismatch, match="pieces"):
        Loom.open(file, other, force=True)


def test_a_tokenizer_is_taken_wherever_it_is_given(server: ServerProcess) -> None:
    ways = [
        (f"{server.base}?tokenizer={TINY}", {}),
        (f"{server.base}#?tokenizer={TINY}", {}),
        (server.base, {"engine_options": {"tokenizer": str(TINY)}}),
    ]
    for source, options in ways:
        with weft.load(source, **options) as lm:
            assert lm.info.n_vocab > 1000
            assert lm.info.extra["manners"].takes_ids
    with pytest.raises(ConfigError, match="twice"):
        weft.load(server.base, str(TINY), engine_options={"tokenizer": str(TINY)})


def test_address_without_v1_works(server: ServerProcess) -> None:
    with weft.load(server.base.removesuffix("/v1")) as lm:
        assert lm.info.extra["address"].startswith(f"{server.base}#tiny")
        assert Loom(lm, STORY).grow(n=1, max_tokens=4)[0].text
    with pytest.raises(EngineUnavailable, match="/elsewhere: it answers 404"):
        weft.load(server.base.removesuffix("/v1") + "/elsewhere")


def test_engines_declare_whether_they_accept_addresses(server: ServerProcess) -> None:
    with pytest.raises(Unsupported, match="is the address of a server, for remote"):
        weft.load(server.base, engine="torch")
    for source in ("tiny", str(TINY), "x.gguf"):
        with pytest.raises(Unsupported, match="remote engine takes addresses of OpenAI-compatible"):
            weft.load(source, engine="remote")
