"""vLLM's processes when killed, abandoned or collected; and adopted engines."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]
pytest.importorskip("vllm", reason="vllm is not installed")
psutil = pytest.importorskip("psutil", reason="psutil is not installed")

import weft  # noqa: E402
from weft import AsyncLM, Loom  # noqa: E402
from weft.compat.genlm import AsyncVirtualLM, load_model_by_name  # noqa: E402
from weft.engines.vllm.log_filter import starting  # noqa: E402
from weft.errors import ConfigError, ForwardError, Unsupported  # noqa: E402

TINY = Path(str(weft.__file__)).parent / "data" / "tiny"
SMALL = {"kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 32}
PROMPT = "Use 4 9 10 13 to make 24."


def is_at_work(process: psutil.Process) -> bool:
    """Return True if a process runs, and is no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def vllm_processes(pid: int | None = None) -> list[Any]:
    result = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if "VLLM::" in " ".join(process.cmdline()):
                result.append(process)
        except psutil.Error:
            pass
    return result


def wait_for(what: Callable[[], bool]) -> None:
    while not what():
        time.sleep(0.2)


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """vLLM leaves its sockets' context to the collector, which warns: here that is no error."""
    yield
    gc.collect()


def load() -> Any:
    return weft.load("tiny", engine="vllm", dtype="float32", engine_options=SMALL)


def test_engine_exit_in_mid_run_raises_and_keeps_the_tree() -> None:
    before = len(vllm_processes())
    lm = load()
    loom = Loom(lm, PROMPT)
    kept = loom.grow(n=2, max_tokens=8, seed=1, show=False)
    texts = [node.text for node in kept]

    def kill_soon() -> None:
        time.sleep(1.0)
        for process in vllm_processes():
            process.kill()

    def grow_on() -> None:
        while True:
            kept[0].grow(n=8, max_tokens=500, temperature=1.3, seed=2, show=False)

    threading.Thread(target=kill_soon).start()
    with pytest.raises(ForwardError, match=r"exited.*[Tt]he tree is unchanged"):
        grow_on()
    assert [node.text for node in loom.children] == texts
    with pytest.raises(ForwardError):
        kept[1].next()
    with pytest.raises(ForwardError):
        kept[1].grow(max_tokens=4, show=False)
    lm.close()
    lm.close()
    wait_for(lambda: len(vllm_processes()) <= before)


def test_collected_model_leaves_no_process_and_no_thread() -> None:
    before, threads = len(vllm_processes()), set(threading.enumerate())
    lm = load()
    assert len(vllm_processes()) > before
    assert not lm.engine._running.buffer.path.exists()
    del lm
    gc.collect()
    wait_for(lambda: len(vllm_processes()) <= before)
    more = [each for each in threading.enumerate() if each not in threads]
    wait_for(lambda: not any(t.name == "weft-vllm" and t.is_alive() for t in more))


# Without `if __name__ == "__main__":`, as README programs are written.
PROGRAM = f"""
import sys, weft
lm = weft.load("tiny", engine="vllm", dtype="float32", engine_options={SMALL!r})
print(weft.Loom(lm, {PROMPT!r}).grow(max_tokens=6, temperature=0, show=False)[0].text, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_program_leaves_no_process_however_it_ends(tmp_path: Path, how: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TINY.parents[2])},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stderr is not None
    assert process.stdout.readline().strip()
    left = vllm_processes(process.pid)
    assert left
    if how == "killed":
        process.send_signal(signal.SIGKILL)
    process.stdin.close()
    process.wait()
    wait_for(lambda: not any(is_at_work(each) for each in left))
    if how == "ended":
        assert process.returncode == 0
        assert "Traceback" not in process.stderr.read()


# -- engines of the caller ------------------------------------------------------------------------


def started(**options: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = {"dtype": "float32", "enforce_eager": True, "disable_log_stats": True, **SMALL}
    with starting(()):
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(TINY), **args, **options))


def test_adopted_engine_is_used_and_not_shut_down() -> None:
    """One engine, whose own limits are changed between the parts: to start one takes long."""
    reference = weft.load("tiny")

    async def use() -> None:
        engine = started(max_logprobs=-1)
        lm = weft.load(engine)
        assert weft.load(engine) is lm
        loom = Loom(lm, PROMPT)
        (node,) = await loom.agrow(max_tokens=12, temperature=0)
        (want,) = Loom(reference, PROMPT).grow(max_tokens=12, temperature=0, show=False)
        assert node.text == want.text
        model = AsyncVirtualLM(engine)
        assert model.lm is lm
        ids = lm.tokenize(PROMPT)
        ours = await model.next_token_logprobs(ids)
        theirs = await AsyncLM(reference).next_token_logprobs(ids)
        assert abs(ours - theirs).max() < 1e-4
        assert len(model.byte_vocab) == 2048
        with pytest.raises(ForwardError, match="await"):
            lm.engine.forward([_row(ids)])
        await asyncio.to_thread(loom.next)
        kept_alive = engine.output_processor.request_states
        assert kept_alive  # a request stays open for its next token
        endless = {end: -float("inf") for end in reference.tokenizer.stop_ids}
        growing = asyncio.ensure_future(loom.agrow(n=2, max_tokens=1500, logit_bias=endless))
        n_rows = len(kept_alive)
        await asyncio.to_thread(wait_for, lambda: len(kept_alive) == n_rows + 2)
        await asyncio.to_thread(lm.close)
        await asyncio.wait([growing], timeout=60)
        assert growing.exception() is not None
        await asyncio.to_thread(wait_for, lambda: not kept_alive)  # and the owner has none of it
        assert not engine.errored

        engine.model_config.max_logprobs = 20
        lm = weft.load(engine)
        loom = Loom(lm, PROMPT)
        (node,) = await loom.agrow(max_tokens=12, temperature=0)
        assert node.text == want.text
        assert len(node.logprobs) == len(node.tokens)
        with pytest.raises(Unsupported, match="generates complete runs only"):
            await AsyncLM(lm).next_token_logprobs(ids)
        with pytest.raises(Unsupported, match="typical_p"):
            await loom.agrow(typical_p=0.5)
        await asyncio.to_thread(lm.close)
        engine.shutdown()
        with pytest.raises(ConfigError, match="failed or is shut down"):
            weft.load(engine)

    asyncio.run(use())
    reference.close()


def _row(ids: list[int]) -> Any:
    from weft.engines.base import Row

    return Row((), ids, 0, None, (len(ids) - 1,))


def test_known_names_load_a_model() -> None:
    with AsyncVirtualLM.from_name("tiny", engine_opts={**SMALL, "dtype": "float32"}) as model:
        row = asyncio.run(model.next_token_logprobs([5, 6, 7]))
        assert row.shape == (2048,)
    with pytest.raises(ConfigError, match="no option"):
        load_model_by_name("tiny", backend="vllm", llm_opts={"engine_opts": {"no_such": 1}})
