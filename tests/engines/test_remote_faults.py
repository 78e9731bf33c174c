"""Faults between client and server: no token is repeated or invented, and no key leaks."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weft
from fake_server import KEY, ServerProcess, run_fake_server
from shallow import TINY
from weft import Loom
from weft.constraints import Regex
from weft.engines.remote.responses import overflow_of
from weft.errors import ContextOverflow, EngineUnavailable, ForwardError, StoreError
from weft.lm.lm import LM

pytestmark = pytest.mark.remote

PROMPT = "Tell me a story about a fox."
QUICK = {"retries": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_fake_server(TINY) as started:
        yield started


@pytest.fixture(scope="module")
def bare() -> Iterator[ServerProcess]:
    """A server that names no ids and shares nothing but text."""
    lacks = ("ids", "prompt_ids", "n", "logprobs", "echo", "keep_stop")
    with run_fake_server(TINY, "--owner", "nobody", "--without", *lacks) as started:
        yield started


@pytest.fixture
def lm(server: ServerProcess) -> Iterator[LM]:
    with weft.load(server.base, TINY, engine_options=QUICK) as lm:
        yield lm


@pytest.fixture(scope="module")
def want() -> str:
    with weft.load("tiny", engine="numpy") as lm:
        return Loom(lm, PROMPT).grow(n=1, temperature=0, max_tokens=20)[0].text


def grown(lm: LM, **options: Any) -> str:
    return Loom(lm, PROMPT).grow(n=1, temperature=0, max_tokens=20, **options)[0].text


def broken(kind: str, at: int) -> dict[str, Any]:
    return {"kind": kind, "at": at}


BUSY = [
    [{"kind": "status", "status": 429, "after": "0"}],
    [{"kind": "status", "status": 500}, {"kind": "status", "status": 503}],
    [{"kind": "drop"}],
    [broken("break", 0)],
    [broken("break", 1)],
    [broken("break", 7), broken("break", 2), broken("cut", 3), broken("garble", 1)],
    [broken("cut", 0), broken("cut", 12)],
    [broken("garble", 5)],
    [{"kind": "html"}],
    [{"split": True}, {}],
]


@pytest.mark.parametrize("faults", BUSY, ids=json.dumps)
def test_a_fault_that_passes_changes_no_text(
    server: ServerProcess, lm: LM, want: str, faults: list[dict[str, Any]]
) -> None:
    server.fault(*faults)
    assert grown(lm) == want


@pytest.mark.parametrize("faults", BUSY[3:7], ids=json.dumps)
def test_broken_text_continues_without_ids(
    bare: ServerProcess, want: str, faults: list[dict[str, Any]]
) -> None:
    with weft.load(bare.base, TINY, engine_options=QUICK) as lm:
        bare.fault(*faults)
        assert grown(lm) == want


def test_siblings_of_a_broken_request_continue_separately(server: ServerProcess) -> None:
    with weft.load(server.base, TINY, engine_options={"together": True, **QUICK}) as lm:
        n_before = len(server.bodies())
        server.fault(broken("break", 9))
        loom = Loom(lm, PROMPT)
        reported: dict[int, str] = {}
        for delta in loom.stream(n=3, seed=1, max_tokens=10, stop="no such text"):
            reported[delta.branch] = reported.get(delta.branch, "") + delta.text
        assert [child.text for child in loom.children] == [reported[at] for at in range(3)]
        assert all(len(child.tokens) == 10 or child.terminal for child in loom.children)
        requested = server.bodies()[n_before:]
        assert requested[0]["n"] == 3
        assert all("n" not in body for body in requested[1:])
        n_resent = sum(len(body["prompt"]) - len(requested[0]["prompt"]) for body in requested[1:])
        assert n_resent == 9  # received tokens are not generated once more


def test_retry_after_is_waited_for(server: ServerProcess, lm: LM, want: str) -> None:
    server.fault({"kind": "status", "status": 429, "after": "1"})
    began = time.monotonic()
    assert grown(lm) == want
    assert time.monotonic() - began >= 1


def test_a_server_that_wants_to_be_left_alone_for_an_hour_is_not_waited_for(
    server: ServerProcess, lm: LM
) -> None:
    server.fault({"kind": "status", "status": 429, "after": "3600"})
    with pytest.raises(ForwardError, match="429: by order"):
        grown(lm)


def test_permanent_error_states_the_number_of_tries(server: ServerProcess, lm: LM) -> None:
    loom = Loom(lm, PROMPT)
    server.fault(*[{"kind": "status", "status": 500}] * 3)
    with pytest.raises(ForwardError, match=r"500: by order \(3 tries\)"):
        loom.grow(n=1, temperature=0, max_tokens=4)
    assert not loom.children
    assert loom.grow(n=1, temperature=0, max_tokens=4)[0].tokens


def test_one_branch_that_fails_fails_its_call_and_no_other(server: ServerProcess, lm: LM) -> None:
    loom = Loom(lm, PROMPT)
    (kept,) = loom.grow(n=1, temperature=0, max_tokens=4)
    server.fault({"kind": "status", "status": 400})
    with pytest.raises(ForwardError, match="400"):
        loom.grow(n=3, seed=1, max_tokens=4)
    assert list(loom.children) == [kept]


def test_a_mistake_is_not_repeated(server: ServerProcess, lm: LM) -> None:
    n_before = len(server.bodies())
    server.fault({"kind": "status", "status": 400})
    with pytest.raises(ForwardError, match="400: by order"):
        grown(lm)
    assert len(server.bodies()) == n_before + 1


def test_silent_server_raises_after_retries(server: ServerProcess) -> None:
    with weft.load(server.base, TINY) as lm:
        capabilities = lm.info.extra["manners"]
    retry_policy = {"first_s": 0.3, "retries": 1, "manners": capabilities}
    with weft.load(server.base, TINY, engine_options=retry_policy) as lm:
        server.fault(*[{"kind": "hang", "seconds": 1.0}] * 2)
        with pytest.raises(ForwardError, match=r"no data arrived before the timeout \(2 tries\)"):
            grown(lm)


def test_server_that_stalls_between_tokens_is_retried(server: ServerProcess, want: str) -> None:
    with weft.load(server.base, TINY, engine_options={"between_s": 0.3, **QUICK}) as lm:
        n_before = len(server.bodies())
        server.fault({"kind": "slow", "seconds": 0.8})
        assert grown(lm) == want
        first, second = server.bodies()[n_before:]
        assert len(second["prompt"]) == len(first["prompt"]) + 1


# The key ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[ServerProcess]:
    with run_fake_server(TINY, "--key") as started:
        yield started


def test_the_key_is_sent_and_shown_nowhere(
    locked: ServerProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with weft.load(locked.base, TINY, token=KEY, engine_options=QUICK) as lm:
        loom = Loom(lm, PROMPT)
        loom.grow(n=1, temperature=0, max_tokens=4)
        locked.fault({"kind": "status", "status": 400})
        with pytest.raises(ForwardError) as failed:
            loom.grow(n=1, temperature=0, max_tokens=4)
        loom.save(tmp_path / "a.loom.json")
        engine: Any = lm.engine
        shown = [
            repr(each) for each in (lm, engine, lm.info, loom, failed.value, engine._transport)
        ]
        shown += [(tmp_path / "a.loom.json").read_text(), caplog.text]
        shown += [repr(vars(engine)), repr(vars(engine.native))]
    assert not [text for text in shown if KEY in text]


@pytest.mark.parametrize("name", ["WEFT_API_KEY", "OPENAI_API_KEY"])
def test_key_is_read_from_the_environment(
    locked: ServerProcess, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, KEY)
    with weft.load(locked.base, TINY) as lm:
        assert grown(lm)


def test_a_wrong_key_is_refused_without_being_shown(locked: ServerProcess) -> None:
    with pytest.raises(EngineUnavailable, match="401: not the right key: Bearer …") as failed:
        weft.load(locked.base, TINY, token="sk-another")
    assert "token=" in failed.value.hint
    with pytest.raises(EngineUnavailable, match="401"):
        weft.load(locked.base, TINY)


def test_no_redirect_takes_the_key_to_another_host(
    locked: ServerProcess, server: ServerProcess
) -> None:
    with weft.load(locked.base, TINY, token=KEY) as lm:
        n_before = len(server.recorded()["bodies"])
        locked.fault({"kind": "redirect", "to": f"{server.base}/completions"})
        with pytest.raises(ForwardError, match=f"redirects to {server.base}"):
            grown(lm)
        assert len(server.recorded()["bodies"]) == n_before


def test_a_proxy_of_the_environment_never_sees_what_is_not_encrypted(
    locked: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no process listens there
    with weft.load(locked.base, TINY, token=KEY) as lm:
        assert grown(lm)


# The server dies -------------------------------------------------------------------------------


def test_server_killed_in_mid_stream_and_restarted() -> None:
    server = ServerProcess(TINY)
    repeated: ServerProcess | None = None
    try:
        with weft.load(server.base, TINY, engine_options={"retries": 1}) as lm:
            loom = Loom(lm, PROMPT)
            first = loom.grow(n=2, seed=1, max_tokens=8)
            text = str(loom)
            server.fault(*[{"kind": "slow", "seconds": 0.1}] * 2)
            threading.Timer(0.3, server.kill).start()
            with pytest.raises(ForwardError, match="does not answer") as failed:
                first[0].grow(n=2, seed=2, max_tokens=60)
            assert "start the server again" in failed.value.hint
            assert str(loom) == text
            repeated = ServerProcess(TINY, port=server.port)
            assert first[0].grow(n=2, seed=2, max_tokens=8)
    finally:
        server.stop()
        if repeated is not None:
            repeated.stop()


def test_server_that_restarts_in_time_causes_no_error(want: str) -> None:
    server = ServerProcess(TINY)
    box: list[ServerProcess] = []
    try:
        with weft.load(server.base, TINY, engine_options={"retries": 8}) as lm:

            def restart() -> None:
                server.kill()
                box.append(ServerProcess(TINY, port=server.port))

            server.fault({"kind": "slow", "seconds": 0.1})
            stream = Loom(lm, PROMPT).stream(n=1, temperature=0, max_tokens=20)
            pieces = [next(stream).text]
            restarting = threading.Thread(target=restart)
            restarting.start()
            pieces += [delta.text for delta in stream]
            restarting.join()
            assert "".join(pieces) == want
    finally:
        server.stop()
        for started in box:
            started.stop()


def test_search_resumes_after_the_server_was_killed(tmp_path: Path) -> None:
    """By the command, which saves each round; the second try finds a server at the same place."""
    server = ServerProcess(TINY)
    repeated: ServerProcess | None = None
    file = tmp_path / "search.loom.json"
    environment = {**os.environ, "WEFT_HOME": str(tmp_path)}
    address = f"{server.base}#tiny?tokenizer={TINY}&retries=1"
    command = [sys.executable, "-m", "weft", "solve", "4 9 10 13", "-b", "5", "-m", address]
    command += ["--budget-tokens", "1200", "--seed", "1", "--resume", str(file)]
    try:
        server.fault(*[{}] * 12, *[{"kind": "slow", "seconds": 0.5}] * 40)
        solving = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while not (file.exists() and len(server.bodies()) > 12):
            assert solving.poll() is None
            time.sleep(0.05)
        server.kill()
        _, complaint = solving.communicate()
        assert solving.returncode == 1, complaint
        assert "Traceback" not in complaint
        assert server.base in complaint
        kept = Loom.open(file)
        n_before = kept.count_children()
        assert n_before > 0
        repeated = ServerProcess(TINY, port=server.port)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        after = {node.id for node in Loom.open(file).walk()}
        assert {node.id for node in kept.walk()} <= after
        assert len(after) > n_before
    finally:
        server.stop()
        if repeated is not None:
            repeated.stop()


def test_unreachable_server_raises_at_once() -> None:
    server = ServerProcess(TINY)
    server.stop()
    with pytest.raises(EngineUnavailable, match="does not answer"):
        weft.load(server.base, TINY)


def test_what_is_no_model_server_is_no_crash(server: ServerProcess) -> None:
    with pytest.raises(EngineUnavailable, match="404"):
        weft.load(server.base.removesuffix("/v1") + "/nothing", TINY)
    with pytest.raises((StoreError, EngineUnavailable)):
        weft.load("https://127.0.0.1:1/v1", TINY)


@pytest.mark.parametrize(
    "params",
    [
        {"constraint": Regex("[0-9]{12}"), "seed": 3},
        {"presence_penalty": 0.9, "frequency_penalty": 0.9, "temperature": 0},
    ],
)
def test_penalties_and_constraints_replay_from_the_start(
    server: ServerProcess, lm: LM, params: dict[str, Any]
) -> None:
    (want,) = Loom(lm, PROMPT).grow(n=1, max_tokens=20, **params)
    n_before = len(server.bodies())
    server.fault(broken("break", 5), broken("break", 3))
    (node,) = Loom(lm, PROMPT).grow(n=1, max_tokens=20, **params)
    assert (node.tokens, node.terminal) == (want.tokens, want.terminal)
    assert len({json.dumps(body) for body in server.bodies()[n_before:]}) == 1


def test_different_text_on_the_second_try_raises(server: ServerProcess, lm: LM) -> None:
    """A server that does not honour seeds: what a constraint has read cannot be gone on from."""
    native: Any = lm.engine.native
    body, seeds = native.builder.body, itertools.count()
    native.builder.body = lambda *given, **more: {**body(*given, **more), "seed": next(seeds)}
    server.fault(broken("break", 20))
    with pytest.raises(ForwardError, match="another text when it was requested again"):
        Loom(lm, PROMPT).grow(n=1, max_tokens=60, constraint=Regex("[0-9]{40}"), temperature=5.0)


LONG_ERRORS = [
    (
        "This model's maximum context length is 512 tokens. However, you requested 710 tokens (706"
        " in the messages, 4 in the completion).",
        (710, 512),
    ),
    (
        "request (3010 tokens) exceeds the available context size (2048 tokens), try increasing it",
        (3010, 2048),
    ),
    ("Requested tokens (703) exceed context window of 512", (703, 512)),
    ("The input is longer than the model's context length (32768 tokens)", (0, 32768)),
]


@pytest.mark.parametrize(("text", "numbers"), LONG_ERRORS)
def test_error_of_a_too_long_path_is_parsed(text: str, numbers: tuple[int, int]) -> None:
    assert overflow_of({"error": {"message": text}}) == numbers
    assert overflow_of({"error": {"message": "the queue is too long"}}) is None


@pytest.mark.parametrize("lack", [(), ("--without", "stream")])
def test_what_is_too_long_is_an_overflow_at_once(lack: tuple[str, ...]) -> None:
    with run_fake_server(TINY, *lack) as server, weft.load(server.base) as lm:
        n_before = len(server.bodies())
        loom = Loom(lm, "qxzj" * 5000, template=False)
        with pytest.raises(ContextOverflow, match="maximum context length") as caught:
            loom.grow(n=1, max_tokens=4)
        assert caught.value.n_ctx == lm.n_ctx
        assert f"n_ctx={lm.n_ctx}" in caught.value.hint
        assert len(server.bodies()) == n_before + 1
        assert loom.children == []
