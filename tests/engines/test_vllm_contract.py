"""Assumptions about vLLM's internals: each fails by name if a new version breaks it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("vllm", reason="vllm is not installed")
importlib.import_module("weft.engines.vllm")  # without the warnings of what vLLM stands on

import torch  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.engine.protocol import StreamingInput  # noqa: E402
from vllm.inputs.engine import tokens_input  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality  # noqa: E402
from vllm.v1.sample.logits_processor import LogitsProcessor as First  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as Second  # noqa: E402

from weft.engines.vllm.logits_capture import LogitsCapture  # noqa: E402
from weft.engines.vllm.rows import row_params  # noqa: E402
from weft.engines.vllm.shared_logits import KEY, SharedLogitsBuffer, n_bytes  # noqa: E402

CALLS: list[tuple[Any, list[str]]] = [
    (AsyncLLM.from_engine_args, ["engine_args"]),
    (AsyncLLM.generate, ["prompt", "sampling_params", "request_id", "lora_request"]),
    (AsyncLLM.add_lora, ["lora_request"]),
    (AsyncLLM.remove_lora, ["lora_id"]),
    (AsyncLLM.shutdown, ["timeout"]),
    (AsyncLLM.get_tokenizer, []),
    (tokens_input, ["prompt_token_ids"]),
    (First.__init__, ["vllm_config", "device", "is_pin_memory"]),
    (First.apply, ["logits"]),
    (First.update_state, ["batch_update"]),
    (Second.__init__, ["vllm_config", "req_states"]),
    (Second.add_request, ["req_idx", "sampling_params"]),
    (Second.apply, ["logits", "ctx"]),
]


@pytest.mark.parametrize(("call", "names"), CALLS, ids=lambda each: getattr(each, "__name__", ""))
def test_calls_take_what_weft_gives(call: Any, names: list[str]) -> None:
    parameters = inspect.signature(call).parameters
    assert [name for name in names if name not in parameters] == []


def test_values_have_the_fields_that_weft_sets() -> None:
    requested = {field.name for field in dataclasses.fields(StreamingInput)}
    assert {"prompt", "sampling_params"} <= requested
    assert {"DELTA"} <= set(RequestOutputKind.__members__)
    args = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert {
        "enable_prefix_caching", "disable_log_stats", "enable_log_requests", "use_tqdm_on_load",
        "max_logprobs", "structured_outputs_config", "enforce_eager", "block_size",
        "kv_cache_memory_bytes", "logits_processors", "additional_config", "max_model_len",
        "trust_remote_code", "dtype", "model", "enable_lora",
    } <= args  # fmt: skip
    assert StructuredOutputsParams(grammar='start: "a"').grammar
    assert LoRARequest("a", 1, "/folder").lora_int_id == 1
    created = SamplingParams(
        max_tokens=1, temperature=0.7, top_p=0.9, top_k=3, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=1.0, frequency_penalty=1.0, logit_bias={1: -float("inf")}, seed=2**63 - 1,
        stop_token_ids=[5], ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA, skip_clone=True, allowed_token_ids=[1],
    )  # fmt: skip
    assert created.logit_bias == {1: -float("inf")}  # not clamped
    assert created.temperature == 0.7


def test_open_request_drops_its_sample_on_the_next_input() -> None:
    """By its source; `test_vllm.py` shows it by numbers."""
    source = inspect.getsource(Scheduler._update_request_as_session)
    assert "Discards the last sampled output token" in source


def test_v1_logits_are_written_to_the_requested_slots() -> None:
    tap, buffer = tapped()
    assert not tap.is_argmax_invariant()  # otherwise vLLM skips it for greedy batches
    plain = SamplingParams(max_tokens=4)
    wishes = [row_params((slot, buffer.ticket())) for slot in (2, 0)]
    added = [(0, wishes[0], [1], []), (1, plain, [1], []), (2, wishes[1], [1], [])]
    tap.update_state(BatchUpdate(batch_size=3, removed=[], added=added, moved=[]))
    logits = torch.arange(12.0).reshape(3, 4)
    assert tap.apply(logits) is logits
    assert buffer.read(2, 1).tolist() == [0, 1, 2, 3]
    assert buffer.read(0, 2).tolist() == [8, 9, 10, 11]
    assert buffer.read(1, 1) is None
    moved = [(2, 0, MoveDirectionality.UNIDIRECTIONAL)]
    tap.update_state(BatchUpdate(batch_size=2, removed=[0], added=[], moved=moved))
    tap.apply(-logits[:2])
    assert buffer.read(0, 2).tolist() == [0, -1, -2, -3]
    assert buffer.read(2, 1).tolist() == [0, 1, 2, 3]


def test_v2_logits_are_written_to_the_requested_slots() -> None:
    tap, buffer = tapped()
    assert tap.add_request(7, row_params((1, buffer.ticket())))
    assert not tap.add_request(3, SamplingParams(max_tokens=4))
    names = {field.name for field in dataclasses.fields(LogitsContext)}
    assert "expanded_idx_mapping" in names
    ctx = SimpleNamespace(expanded_idx_mapping=torch.tensor([3, 7]))
    tap.apply(torch.arange(8.0).reshape(2, 4), ctx)
    assert buffer.read(1, 1).tolist() == [4, 5, 6, 7]
    assert not tap.add_request(
        7, SamplingParams(max_tokens=4)
    )  # the place belongs to another request now
    tap.apply(torch.zeros(2, 4), ctx)
    assert buffer.read(1, 1).tolist() == [4, 5, 6, 7]


def test_worker_that_does_not_see_the_board_writes_nothing() -> None:
    reported = {"path": "/nowhere/at/all", "n_slots": 3, "n_vocab": 4, "pid": 1}
    tap = LogitsCapture(SimpleNamespace(additional_config={KEY: reported}), None, False)
    tap.add_request(0, row_params((0, 1)))
    assert tap.apply(torch.zeros(1, 4)).shape == (1, 4)
    LogitsCapture(SimpleNamespace(additional_config=None), None, False).apply(torch.zeros(1, 4))


def test_board_fits_its_memory_and_leaves_no_file() -> None:
    buffer = SharedLogitsBuffer(1_000_000, 64)
    assert buffer.n_slots == 8
    assert buffer.path.stat().st_size == n_bytes(8, 1_000_000)
    buffer.rows[7] = 1.5
    buffer.tickets[7] = 9
    buffer.unlink()
    buffer.unlink()
    assert not buffer.path.exists()
    row = buffer.read(7, 9)
    assert row is not None
    buffer.rows[7] = 0
    assert np.all(row == 1.5)


def test_board_of_a_killed_process_is_taken_away_by_the_next_and_no_other() -> None:
    code = "import os; from weft.engines.vllm.shared_logits import SharedLogitsBuffer as B"
    code += "; b = B(4, 3); print(b.path)"
    killed = subprocess.run(
        [sys.executable, "-c", f"{code}; os.sys.stdout.flush(); os.kill(os.getpid(), 9)"],
        check=False,
        capture_output=True,
        text=True,
    )
    left = Path(killed.stdout.strip())
    assert left.exists()
    first = SharedLogitsBuffer(4, 3)
    assert not left.exists()
    second = SharedLogitsBuffer(4, 3)
    assert first.path.exists()
    assert first.path.stat().st_mode & 0o777 == 0o600
    first.unlink()
    second.unlink()


def tapped() -> tuple[LogitsCapture, SharedLogitsBuffer]:
    buffer = SharedLogitsBuffer(4, 3)
    reported = SimpleNamespace(additional_config={KEY: buffer.connection_info()})
    tap = LogitsCapture(reported, torch.device("cpu"), False)
    buffer.unlink()
    return tap, buffer
