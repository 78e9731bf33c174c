"""Runs over HTTP on other people's servers, as far as they are installed; each in its own process.

llama-cpp-python's server wants `llama_cpp` with gguf, fastapi, uvicorn, sse-starlette,
starlette-context and pydantic-settings; vLLM's takes a minute to start. The Python that has them,
where it is not this one, is named by `WEFT_TEST_LLAMACPP` and `WEFT_TEST_VLLM`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weft
from shallow import TINY
from weft import Loom
from weft.constraints import GBNF, Choice, Lark
from weft.errors import ContextOverflow, ForwardError, Unsupported
from weft.lm.lm import LM

pytestmark = pytest.mark.remote

PROMPTS = [
    f"{begin} {what}"
    for begin in ("Tell me a story about", "Use 4 9 10", "Describe", "Once upon a time", "Who is")
    for what in ("a fox.", "13 to make 24.", "Lena", "the owl as JSON.", "in the mill", *"ABCDE")
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Lena", "Olga"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ROOT = Path(__file__).parents[2]
LLAMACPP = os.environ.get("WEFT_TEST_LLAMACPP", sys.executable)
VLLM = os.environ.get("WEFT_TEST_VLLM", sys.executable)


class OtherServer:
    """A server's process; `base` is its address once it answers."""

    def __init__(self, command: list[str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}/v1"
        self.command = [*command, "--port", str(self.port), "--host", "127.0.0.1"]
        self.log = log
        self.start()

    def start(self) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        while not self.answers():
            if self.process.poll() is not None:
                self.stop()
                log_end = self.log.read_text(errors="replace")[-2000:]
                pytest.fail(f"the server did not start: {log_end}")
            time.sleep(0.3)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base}/models", timeout=5):
                return True
        except OSError:
            return False

    def stop(self) -> None:
        """End it and what it has started, as a crash would."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.wait()


def has(python: str, *modules: str) -> bool:
    """Return True if a Python can import these modules."""
    code = "import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in %r))"
    done = subprocess.run([python, "-c", code % (modules,)], check=False, capture_output=True)
    return done.returncode == 0


def start_llamacpp(folder: Path) -> OtherServer:
    needs = ("llama_cpp", "fastapi", "uvicorn", "sse_starlette", "starlette_context")
    if not has(LLAMACPP, *needs, "pydantic_settings", "gguf"):
        pytest.skip("llama-cpp-python's server, or gguf, is not installed")
    file = folder / "tiny.gguf"
    export = [LLAMACPP, "-m", "recipe.export_gguf", str(TINY), str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(export, check=True, cwd=ROOT, env=environment, capture_output=True)
    command = [LLAMACPP, "-m", "llama_cpp.server", "--model", str(file), "--model_alias", "tiny"]
    command += ["--n_ctx", "2048", "--logits_all", "true", "--n_threads", "1"]
    # Keys and values in float32, or the last digits of a logprob are others.
    command += ["--type_k", "0", "--type_v", "0", "--flash_attn", "false"]
    return OtherServer(command, folder / "llamacpp.log")


def start_vllm(folder: Path) -> OtherServer:
    if not has(VLLM, "vllm", "fastapi"):
        pytest.skip("vLLM is not installed")
    command = [VLLM, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TINY)]
    command += ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--max-num-seqs", "64", "--enforce-eager", "--max-logprobs", "-1"]
    return OtherServer(command, folder / "vllm.log")


KINDS = [
    "llamacpp",
    pytest.param("vllm", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=KINDS)
def other(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[OtherServer]:
    start = {"llamacpp": start_llamacpp, "vllm": start_vllm}[request.param]
    server = start(tmp_path_factory.mktemp(request.param))
    yield server
    server.stop()


@pytest.fixture
def lm(other: OtherServer) -> Iterator[LM]:
    with weft.load(other.base, TINY, n_ctx=2048, engine_options={"retries": 1}) as lm:
        yield lm


@pytest.fixture(scope="module")
def plain() -> Iterator[LM]:
    with weft.load("tiny", engine="numpy") as lm:
        yield lm


def is_vllm(lm: LM) -> bool:
    return bool(lm.info.extra["server"] == "vllm")


def test_greedy_text_is_ours_on_fifty_prompts(lm: LM, plain: LM) -> None:
    # A chat leaves sampling to the server, and llama-cpp-python's server penalizes repetition.
    params = {**lm.defaults.keywords(), "n": 1, "temperature": 0, "max_tokens": 24}
    for prompt in PROMPTS:
        (node,) = Loom(lm, prompt).grow(**params)
        (want,) = Loom(plain, prompt).grow(**params)
        assert node.tokens == want.tokens
        assert node.logprobs == pytest.approx(want.logprobs, abs=1e-3)
        assert (node.terminal, node.finish_reason) == (want.terminal, want.finish_reason)


def test_seeds_stops_and_streams(lm: LM) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 1, "max_tokens": 40, "temperature": 1.2, "stop": "."}
    created = Loom(lm, PROMPTS[0]).grow(**options)
    assert all(node.stop_string == "." and node.text.endswith(".") for node in created)
    assert len({node.text for node in created}) > 1
    repeated = Loom(lm, PROMPTS[0])
    reported = ["", "", ""]
    for delta in repeated.stream(**options):
        reported[delta.branch] += delta.text
    assert [node.text for node in created] == reported


def test_given_text_is_scored_or_raises(lm: LM, plain: LM) -> None:
    with Loom(lm, PROMPTS[1]) as ours, Loom(plain, PROMPTS[1]) as theirs:
        if not is_vllm(lm):
            with pytest.raises(Unsupported, match="no measuring"):
                ours.measure(" and then")
            return
        want = theirs.measure("4 + 9 = 13 (left: 10 13 13)")
        result = ours.measure("4 + 9 = 13 (left: 10 13 13)")
        assert result.logprobs == pytest.approx(want.logprobs, abs=1e-3)


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"logit_bias": {30: 8.0, 31: -8.0}},
    ],
    ids=str,
)
def test_penalties_act_as_ours_or_raise(lm: LM, plain: LM, params: dict[str, Any]) -> None:
    loom = Loom(lm, PROMPTS[0])
    if not is_vllm(lm) and "logit_bias" not in params:
        with pytest.raises(Unsupported, match="do not do exactly that"):
            loom.grow(n=1, temperature=0, max_tokens=20, **params)
        return
    (node,) = loom.grow(n=1, temperature=0, max_tokens=30, **params)
    (want,) = Loom(plain, PROMPTS[0]).grow(n=1, temperature=0, max_tokens=30, **params)
    assert node.tokens == want.tokens
    if is_vllm(lm) or "logit_bias" not in params:
        assert node.logprobs == pytest.approx(want.logprobs, abs=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_are_applied_by_the_server(lm: LM, temperature: float) -> None:
    def text_of(constraint: Any) -> str:
        options: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 60}
        text: str = Loom(lm, PROMPTS[3]).grow(n=1, constraint=constraint, **options)[0].text
        return text

    assert text_of(Choice(["naïve 🦊 日本語"])) == "naïve 🦊 日本語"
    assert text_of(GBNF('root ::= [0-9] [0-9] "x"')).endswith("x")
    assert text_of(SCHEMA).startswith('{"name": "')


def test_siblings_in_one_request(other: OtherServer) -> None:
    with weft.load(other.base, TINY, n_ctx=2048) as lm:
        has_n = lm.info.extra["manners"].n
    if not has_n:
        with pytest.raises(Unsupported, match="one choice"):
            weft.load(other.base, TINY, engine_options={"together": True})
        return
    with weft.load(other.base, TINY, engine_options={"together": True}) as lm:
        options: dict[str, Any] = {"n": 8, "seed": 1, "max_tokens": 12, "temperature": 1.3}
        created = Loom(lm, PROMPTS[0]).grow(**options)
        assert len({node.text for node in created}) > 2
        repeated = Loom(lm, PROMPTS[0]).grow(**options)
        assert [node.text for node in repeated] == [node.text for node in created]


def test_many_at_once(lm: LM) -> None:
    n = 200 if is_vllm(lm) else 12
    created = Loom(lm, PROMPTS[0]).grow(n=n, seed=1, max_tokens=6, temperature=1.5)
    assert len(created) == n
    assert all(node.tokens for node in created)


def test_single_steps_with_full_rows(other: OtherServer, plain: LM) -> None:
    options = {"steps": True}
    with weft.load(other.base, TINY, n_ctx=2048) as lm:
        gives_rows = is_vllm(lm)
    if not gives_rows:
        with pytest.raises(Unsupported, match="full rows"):
            weft.load(other.base, TINY, n_ctx=2048, engine_options=options)
        return
    with weft.load(other.base, TINY, engine_options=options) as lm:
        with Loom(lm, PROMPTS[0]) as ours, Loom(plain, PROMPTS[0]) as theirs:
            result, want = ours.next(2048), theirs.next(2048)
            want_of = {each.id: each.logprob for each in want}
            assert all(abs(each.logprob - want_of[each.id]) < 1e-3 for each in result)
            grammar = Lark('start: /[a-z]{3}/ " " /[0-9]{2}/')
            created, same = (
                loom.grow(n=2, seed=1, max_tokens=12, constraint=grammar) for loom in (ours, theirs)
            )
            assert [node.tokens for node in created] == [node.tokens for node in same]


def test_without_a_tokenizer_here(other: OtherServer) -> None:
    with weft.load(other.base, n_ctx=2048) as lm:
        created = Loom(lm, "The fox sang:").grow(n=2, seed=1, max_tokens=6, temperature=1.2)
        assert len(created) == 2
    options = {"api": "chat"}
    with weft.load(other.base, n_ctx=2048, engine_options=options) as lm:
        (node,) = Loom(lm, PROMPTS[0]).grow(n=1, temperature=0, max_tokens=12)
        assert node.text


def test_chat_without_a_tokenizer_is_answered(other: OtherServer, plain: LM) -> None:
    (want,) = Loom(plain, PROMPTS[0]).grow(n=1, temperature=0, max_tokens=24)
    with weft.load(other.base) as lm:
        (node,) = Loom(lm, PROMPTS[0]).grow(n=1, temperature=0, max_tokens=24)
        assert node.text == want.text


def test_too_long_path_raises_at_once(other: OtherServer) -> None:
    with weft.load(other.base, n_ctx=1 << 16) as lm:
        for template in (True, False):
            with pytest.raises(ContextOverflow) as caught:
                Loom(lm, "qxzj" * 5000, template=template).grow(n=2, max_tokens=4)
            assert caught.value.n_ctx in (2048, lm.n_ctx)
            assert "tries" not in str(caught.value)


def test_server_killed_in_mid_stream_and_restarted(other: OtherServer, lm: LM) -> None:
    loom = Loom(lm, PROMPTS[0])
    (first,) = loom.grow(n=1, temperature=0, max_tokens=8)
    endless = {token_id: -100.0 for token_id in lm.text.stop_ids}  # it is killed before the end
    stream = first.stream(n=1, temperature=0, max_tokens=1500, logit_bias=endless)
    next(stream)
    other.stop()
    with pytest.raises(ForwardError, match=other.base):
        list(stream)
    assert loom.children[0] is first
    other.start()
    assert first.grow(n=1, temperature=0, max_tokens=8)[0].text
