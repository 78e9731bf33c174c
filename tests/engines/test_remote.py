"""Runs over HTTP: the same texts as on the engine behind the server, whatever the server can do."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import weft
from contract.helpers import prompt_ids
from fake_server import ServerProcess, run_fake_server
from shallow import TINY
from weft import Branch, Loom
from weft._core.sampling.params import SamplingParams
from weft._core.sampling.rng import stream_of
from weft._core.sampling.sampler import Sampler
from weft._core.sched.work import Run, RunResult
from weft.branch import Session
from weft.constraints import Choice, Lark, Regex
from weft.errors import ConfigError, ForwardError, ModelLoadError, Unsupported
from weft.lm.lm import LM

pytestmark = pytest.mark.remote

PROMPTS = [
    f"{begin} {what}"
    for begin in ("Tell me a story about", "Use 4 9 10", "Describe", "Once upon a time", "Who is")
    for what in ("a fox.", "13 to make 24.", "Lena", "the owl as JSON.", "in the mill", *"ABCDE")
]
Serve = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def plain() -> Iterator[LM]:
    """The engine behind the server, here."""
    with weft.load("tiny", engine="numpy") as lm:
        yield lm


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Start a server without some features, once for all tests that want the same."""
    running: dict[tuple[str, ...], Any] = {}

    def start(*options: str) -> ServerProcess:
        if options not in running:
            manager = run_fake_server(TINY, *options)
            running[options] = (manager, manager.__enter__())
        started: ServerProcess = running[options][1]
        return started

    yield start
    for manager, _ in running.values():
        manager.__exit__(None, None, None)


@pytest.fixture
def server(serve: Serve) -> ServerProcess:
    """One that does all it can."""
    return serve()


@pytest.fixture
def lm(server: ServerProcess) -> Iterator[LM]:
    with weft.load(server.base, TINY) as lm:
        yield lm


def greedy(lm: LM, prompts: list[str], **options: Any) -> list[Any]:
    async def all_of_them() -> list[Any]:
        looms = [Loom(lm, prompt) for prompt in prompts]
        grown = await asyncio.gather(*(loom.agrow(temperature=0, **options) for loom in looms))
        return [created[0] for created in grown]

    return asyncio.run(all_of_them())


LACKS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "ids": ("--without", "ids"),
    "streams": ("--without", "stream"),
    "all but text": ("--without", "ids", "prompt_ids", "n", "logprobs", "echo", "keep_stop"),
}


@pytest.mark.parametrize(
    "lack",
    [pytest.param(each, marks=pytest.mark.slow) if each == "streams" else each for each in LACKS],
)
def test_greedy_text_is_the_engine_s_on_fifty_prompts(serve: Serve, plain: LM, lack: str) -> None:
    owner = ("--owner", "nobody") if lack == "all but text" else ()
    with weft.load(serve(*LACKS[lack], *owner).base, TINY) as lm:
        results = greedy(lm, PROMPTS, max_tokens=16)
    want = greedy(plain, PROMPTS, max_tokens=16)
    assert len(PROMPTS) == 50
    for ours, theirs in zip(results, want, strict=True):
        assert ours.text == theirs.text
        assert (ours.terminal, ours.finish_reason) == (theirs.terminal, theirs.finish_reason)
        assert ours.entropies == []
        if lack == "all but text":
            assert ours.logprobs == []
        else:
            assert ours.tokens == theirs.tokens
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def draw(lm: LM, items: list[Run]) -> list[RunResult]:
    tickets = lm.submit(items)
    lm.drive(tickets)
    return [ticket.result() for ticket in tickets]


def item(lm: LM, index: int, prompt: str = PROMPTS[0], **params: Any) -> Run:
    place = lm.place(prompt_ids(lm, prompt))
    sampler = Sampler(SamplingParams(**{"temperature": 1.2, **params}), stream_of(5, (index,)))
    return Run(place, sampler, stop_ids=lm.text.stop_ids, max_tokens=12)


def test_text_depends_on_its_seed_alone(lm: LM) -> None:
    together = [result.tokens for result in draw(lm, [item(lm, i) for i in range(6)])]
    alone = [draw(lm, [item(lm, i)])[0].tokens for i in range(6)]
    assert alone == together
    assert len({tuple(tokens) for tokens in together}) > 1
    sibling = [item(lm, 3), *[item(lm, i, PROMPTS[1]) for i in range(6)]]
    assert draw(lm, sibling)[0].tokens == together[3]


def test_siblings_share_a_request_with_together(server: ServerProcess) -> None:
    with weft.load(server.base, TINY, engine_options={"together": True}) as lm:
        n_before = len(server.bodies())
        loom = Loom(lm, PROMPTS[0])
        created = loom.grow(n=8, seed=1, max_tokens=8, temperature=1.5)
        (body,) = server.bodies()[n_before:]
        assert body["n"] == 8
        assert len({node.text for node in created}) > 1
        repeated = Loom(lm, PROMPTS[0]).grow(n=8, seed=1, max_tokens=8, temperature=1.5)
        assert [node.tokens for node in repeated] == [node.tokens for node in created]


def test_siblings_have_a_request_each_where_seeds_count(server: ServerProcess, lm: LM) -> None:
    n_before = len(server.bodies())
    Loom(lm, PROMPTS[0]).grow(n=4, seed=1, max_tokens=4)
    bodies = server.bodies()[n_before:]
    assert len({body["seed"] for body in bodies}) == len(bodies) == 4
    assert all("n" not in body for body in bodies)


def test_sharing_raises_if_the_server_returns_one_choice(serve: Serve) -> None:
    url = serve("--without", "n").base
    with pytest.raises(Unsupported, match="one choice"):
        weft.load(url, TINY, engine_options={"together": True})


@pytest.mark.parametrize("lack", [(), ("--without", "keep_stop", "--owner", "nobody")])
def test_stop_string_ends_a_branch_and_stays_in_it(serve: Serve, lack: tuple[str, ...]) -> None:
    with weft.load(serve(*lack).base, TINY) as lm:
        created = Loom(lm, PROMPTS[0]).grow(n=3, seed=1, max_tokens=60, stop=[".", "zzz"])
        for node in created:
            assert node.stop_string == "."
            assert node.text.endswith(".")
            assert node.finish_reason == "stop"
            assert not node.terminal
        assert created[0].grow(n=1, max_tokens=4, temperature=0)[0].text


def test_streamed_pieces_are_the_text(lm: LM, plain: LM) -> None:
    loom = Loom(lm, PROMPTS[0])
    pieces: dict[int, str] = {}
    for delta in loom.stream(n=3, seed=2, max_tokens=20):
        pieces[delta.branch] = pieces.get(delta.branch, "") + delta.text
    assert [child.text for child in loom.children] == [pieces[at] for at in range(3)]
    with Loom(plain, PROMPTS[0]) as here:
        assert len(here.children) == 0


@pytest.mark.parametrize("lack", LACKS)
def test_characters_of_many_tokens_and_split_bytes(serve: Serve, lack: str) -> None:
    """The server generates characters outside its vocabulary, in chunks of one byte."""
    owner = ("--owner", "nobody") if lack == "all but text" else ()
    server, text_out = serve(*LACKS[lack], *owner), "naïve 🦊 日本語 e\u0301"
    options = {"dialect": "vllm"}
    with weft.load(server.base, TINY, engine_options=options) as lm:
        server.fault({"split": True})
        (node,) = Loom(lm, PROMPTS[0]).grow(
            n=1, temperature=0, max_tokens=60, constraint=Choice([text_out])
        )
        assert node.text == text_out


def test_two_hundred_runs_at_once(lm: LM, plain: LM) -> None:
    prompts = [f"{PROMPTS[at % 50]} {at}" for at in range(200)]
    results = greedy(lm, prompts, max_tokens=6)
    want = greedy(plain, prompts, max_tokens=6)
    assert [node.tokens for node in results] == [node.tokens for node in want]


# What cannot be had ----------------------------------------------------------------------------


def test_given_text_is_scored_as_the_engine_scores_it(lm: LM, plain: LM) -> None:
    for text in (" and then", " Lena", "4 + 9 = 13 (left: 10 13 13)"):
        with Loom(lm, PROMPTS[1]) as ours, Loom(plain, PROMPTS[1]) as theirs:
            results, want = ours.measure(text), theirs.measure(text)
            assert results.tokens == want.tokens
            assert results.logprobs == pytest.approx(want.logprobs, abs=1e-4)


def test_measure_raises_if_the_server_echoes_nothing(serve: Serve) -> None:
    with weft.load(serve("--without", "echo").base, TINY) as lm:
        with pytest.raises(Unsupported, match="no measuring"):
            Loom(lm, PROMPTS[0]).measure(" x")


def test_calls_that_need_steps_raise_and_are_named(lm: LM) -> None:
    loom = Loom(lm, PROMPTS[0])
    with pytest.raises(Unsupported, match="next-token"):
        loom.next()
    with pytest.raises(Unsupported, match="token by token") as refused:
        Branch.create(lm)
    assert "by another engine" in refused.value.hint
    with pytest.raises(Unsupported, match="token by token"):
        Session(lm)
    with pytest.raises(Unsupported, match="next-token"):
        asyncio.run(weft.AsyncLM(lm).next_token_logprobs([1, 2]))


REFUSED: dict[str, dict[str, Any]] = {
    "typical_p=0.9": {"typical_p": 0.9},
    "top_n_sigma=1.5": {"top_n_sigma": 1.5},
    "xtc_probability=0.5": {"xtc_probability": 0.5},
    "dry_multiplier=0.8": {"dry_multiplier": 0.8},
    "penalty_last_n=4": {"penalty_last_n": 4, "presence_penalty": 0.5},
    "min_p together with top_p": {"min_p": 0.1, "top_p": 0.9},
    "temperature_first=False": {"temperature_first": False, "temperature": 0.8},
    "a logit_bias of -inf": {"logit_bias": {5: -float("inf")}},
    "a logit_bias of 400": {"logit_bias": {5: 400}},
    "the constraint Lark": {"constraint": Lark('start: "a"')},
}


@pytest.mark.parametrize("what", REFUSED)
def test_parameter_that_the_server_does_not_apply_exactly_raises(lm: LM, what: str) -> None:
    loom = Loom(lm, PROMPTS[0])
    with pytest.raises(Unsupported, match=what):
        loom.grow(n=1, max_tokens=4, **REFUSED[what])
    assert not loom.children


def test_parameters_without_effect_are_accepted(lm: LM, plain: LM) -> None:
    quiet = {"temperature": 0, "top_k": 7, "typical_p": 0.5, "penalty_last_n": 3}
    results = Loom(lm, PROMPTS[0]).grow(n=1, max_tokens=8, **quiet)[0]
    assert (
        results.tokens == Loom(plain, PROMPTS[0]).grow(n=1, max_tokens=8, temperature=0)[0].tokens
    )


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"logit_bias": {30: 8.0, 31: -8.0}},
    ],
)
def test_penalties_and_biases_act_as_here(lm: LM, plain: LM, params: dict[str, Any]) -> None:
    results = Loom(lm, PROMPTS[0]).grow(n=1, max_tokens=30, temperature=0, **params)[0]
    want = Loom(plain, PROMPTS[0]).grow(n=1, max_tokens=30, temperature=0, **params)[0]
    assert results.tokens == want.tokens
    assert results.logprobs == pytest.approx(want.logprobs, abs=1e-4)


def test_constraint_is_sent_to_the_server_and_checked_locally(lm: LM) -> None:
    (node,) = Loom(lm, PROMPTS[0]).grow(n=1, max_tokens=20, constraint=Regex("[0-9]{3}-[0-9]{2}"))
    assert len(node.text) == 6
    assert node.terminal


def test_the_context_ends_a_text(server: ServerProcess) -> None:
    with weft.load(server.base, TINY, n_ctx=40) as lm:
        (node,) = Loom(lm, PROMPTS[0]).grow(n=1, temperature=0, max_tokens=90)
        assert node.finish_reason == "context"
        assert node.place.depth == 40


# Single steps ----------------------------------------------------------------------------------


@pytest.fixture
def stepping(server: ServerProcess) -> Iterator[LM]:
    """With full rows of logprobs, as vLLM gives them with --max-logprobs -1."""
    with weft.load(server.base, TINY, engine_options={"steps": True}) as lm:
        yield lm


def test_full_rows_support_all_interfaces(stepping: LM, plain: LM) -> None:
    lm = stepping
    with Loom(lm, PROMPTS[0]) as ours, Loom(plain, PROMPTS[0]) as theirs:
        assert [each.id for each in ours.next(5)] == [each.id for each in theirs.next(5)]
        results, want = ours.measure(" Once upon"), theirs.measure(" Once upon")
        assert results.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    ids = lm.tokenize("Once upon")
    row = asyncio.run(weft.AsyncLM(lm).next_token_logprobs(ids))
    assert row == pytest.approx(asyncio.run(weft.AsyncLM(plain).next_token_logprobs(ids)), abs=1e-4)
    texts = []
    for model in (lm, plain):
        branch = Branch.create(model, seed=1)
        branch.prefill(ids)
        fork = branch.fork()
        for _ in range(4):
            branch.commit(branch.produce().token)
            fork.commit(fork.produce().token)
        texts.append((branch.tokens, fork.tokens))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "params",
    [
        {"constraint": Lark('start: /[a-z]{3}/ " " /[0-9]{2}/')},
        {"typical_p": 0.9},
        {"top_n_sigma": 1.5, "xtc_probability": 0.5, "dry_multiplier": 0.8},
        {"min_p": 0.1, "top_p": 0.9, "temperature": 0.7, "temperature_first": False},
        {"logit_bias": {5: -float("inf")}},
    ],
    ids=str,
)
def test_unsupported_parameters_of_the_server_are_drawn_locally(
    stepping: LM, plain: LM, params: dict[str, Any]
) -> None:
    params = {**stepping.defaults.keywords(), "n": 2, "seed": 1, "max_tokens": 5, **params}
    created = Loom(stepping, PROMPTS[0]).grow(**params)
    want = Loom(plain, PROMPTS[0]).grow(**params)
    assert [node.tokens for node in created] == [node.tokens for node in want]
    assert created[0].entropies == pytest.approx(want[0].entropies, abs=1e-3)


def test_native_runs_are_used_with_steps_too(server: ServerProcess, stepping: LM) -> None:
    n_before = len(server.recorded()["bodies"])
    (node,) = Loom(stepping, PROMPTS[0]).grow(n=1, seed=1, max_tokens=12)
    assert len(server.recorded()["bodies"]) == n_before + 1
    assert node.entropies == []


def test_repetition_penalty_raises_for_steps_without_logits(stepping: LM) -> None:
    """Rows are log-probabilities, all negative: the server itself has the logits."""
    with pytest.raises(Unsupported, match="repetition_penalty asks for"):
        Branch.create(stepping, repetition_penalty=1.3)
    branch = Branch.create(stepping, seed=1)
    with pytest.raises(Unsupported, match="repetition_penalty asks for"):
        branch.set_sampler_params(repetition_penalty=1.3)
    loom = Loom(stepping, PROMPTS[0])
    with pytest.raises(Unsupported, match="repetition_penalty asks for"):
        loom.grow(n=1, typical_p=0.9, repetition_penalty=1.3)
    assert loom.grow(n=1, max_tokens=4, repetition_penalty=1.3)[0].tokens


def test_incomplete_rows_are_unsupported(serve: Serve) -> None:
    for options, tokenizer in ((("--without", "rows"), TINY), ((), None)):
        with pytest.raises(Unsupported, match="--max-logprobs -1"):
            weft.load(serve(*options).base, tokenizer, engine_options={"steps": True})
    with pytest.raises(Unsupported, match="--max-logprobs -1"):
        weft.load(serve("--owner", "me").base, TINY, engine_options={"steps": True})


# Loading ---------------------------------------------------------------------------------------


def test_loading_asks_little(serve: Serve) -> None:
    server = serve("--owner", "vllm")
    n_before = len(server.recorded()["bodies"])
    with weft.load(server.base, TINY) as lm:
        assert len(server.recorded()["bodies"]) == n_before + 2
        capabilities = lm.info.extra["manners"]
        assert lm.n_ctx == 2048
    with weft.load(server.base, TINY, engine_options={"manners": capabilities}) as lm:
        assert len(server.recorded()["bodies"]) == n_before + 2
        assert Loom(lm, PROMPTS[0]).grow(n=1, temperature=0, max_tokens=3)[0].text


def test_a_model_that_is_not_there_is_named_with_those_that_are(server: ServerProcess) -> None:
    with pytest.raises(ModelLoadError, match="no model 'big'; it has tiny"):
        weft.load(server.base, TINY, model="big")


def test_address_can_have_model_tokenizer_and_options(server: ServerProcess) -> None:
    with weft.load(f"{server.base}#tiny?tokenizer={TINY}&most=3") as lm:
        assert lm.info.extra["address"] == f"{server.base}#tiny?tokenizer={TINY}&most=3"
        assert lm.engine.native is not None
        assert lm.engine.native.max_in_flight == 3
        assert Loom(lm, PROMPTS[0]).grow(n=1, temperature=0, max_tokens=3)[0].tokens


def test_tokenizer_of_another_model_raises(server: ServerProcess) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {f"word{number}": number for number in range(3000)}
    other = Backend(WordLevel({**words, "[UNK]": 3000}, unk_token="[UNK]"))
    other.pre_tokenizer = Whitespace()
    with pytest.raises(ConfigError, match="wrong tokenizer"):
        weft.load(server.base, other)


def test_the_code_of_the_guide_runs(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "remote.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(# needs a server.*?)^```$", text, re.DOTALL | re.MULTILINE)
    shutil.copytree(TINY, tmp_path / "folder")
    monkeypatch.chdir(tmp_path)
    code = code.replace("http://host:8000/v1", server.base).replace('"model"', '"tiny"')
    created: dict[str, Any] = {}
    exec(code, created)
    assert len(created["loom"].children) == 8
    created["lm"].close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"most": 0}, "most is 0"),
        ({"dialect": "klingon"}, "dialect is 'klingon'; allowed are auto"),
        ({"api": "grpc"}, "api is 'grpc'"),
        ({"first_s": -1.0}, "first_s is -1"),
        ({"patience": 3}, "no option 'patience'"),
    ],
)
def test_invalid_options_raise(
    server: ServerProcess, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        weft.load(server.base, TINY, engine_options=options)
    for name in ("device", "dtype"):
        with pytest.raises(ConfigError, match=name):
            weft.load(server.base, TINY, **{name: "cuda"})


# Threads ---------------------------------------------------------------------------------------


def n_threads() -> int:
    return sum(each.name == "weft-remote-http" for each in threading.enumerate())


def test_closing_twice_and_in_the_middle_ends_the_thread(server: ServerProcess) -> None:
    before = n_threads()
    lm = weft.load(server.base, TINY)
    server.fault({"kind": "slow", "seconds": 0.05})
    stream = Loom(lm, PROMPTS[0]).stream(n=1, temperature=0, max_tokens=40)
    next(stream)
    lm.close()
    lm.close()
    assert n_threads() == before
    with pytest.raises((weft.WeftError, ForwardError)):
        list(stream)


def test_a_collected_model_ends_its_thread(server: ServerProcess) -> None:
    import gc

    before = n_threads()
    lm = weft.load(server.base, TINY)
    Loom(lm, PROMPTS[0]).grow(n=2, seed=1, max_tokens=4)
    del lm
    while n_threads() != before:  # the last answer is read to its end first
        gc.collect()
        threading.Event().wait(0.05)


def test_a_branch_that_is_left_breaks_its_request_off(server: ServerProcess, lm: LM) -> None:
    n_gone = server.recorded()["n_gone"]
    server.fault({"kind": "slow", "seconds": 0.05})
    loom = Loom(lm, PROMPTS[0])
    stream = loom.stream(n=1, temperature=0, max_tokens=200)
    next(stream)
    stream.close()
    Loom(lm, PROMPTS[1]).grow(n=1, temperature=0, max_tokens=1)
    while server.recorded()["n_gone"] == n_gone:
        threading.Event().wait(0.05)
    assert server.recorded()["n_gone"] == n_gone + 1
    assert loom.children[0].finish_reason == "cancelled"
