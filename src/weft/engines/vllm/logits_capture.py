"""A logits processor in vLLM's workers that copies requested logits to shared memory.

It implements both of vLLM's interfaces for such classes: that of its first model runner (CPUs) and
that of the second (GPUs). Logits are raw if the request has no bias, penalty or grammar.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor as FirstInterface
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondInterface

from .shared_logits import KEY, map_buffer

WATCH_S = 2.0


class LogitsCapture(FirstInterface, SecondInterface):
    """A vLLM logits processor that copies logits to shared memory and changes none.

    `options.LOGITS_PROCESSOR` names it in vLLM's `logits_processors`. A worker without access to
    the shared buffer, for example on another machine, writes nothing. A worker whose parents have
    exited exits too.
    """

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        self._targets: dict[int, tuple[int, int]] = {}  # by place in the batch: slot, ticket
        self._buffer = None
        info = (vllm_config.additional_config or {}).get(KEY)
        if info is None:
            return
        with suppress(OSError, ValueError):
            self._buffer = map_buffer(info["path"], info["n_slots"], info["n_vocab"])
            threading.Thread(target=_exit_with_parent, args=(info["pid"],), daemon=True).start()

    def is_argmax_invariant(self) -> bool:
        """Return False: otherwise vLLM skips the processor for greedy batches."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Handle added, removed and moved requests; called by vLLM's first model runner."""
        process_dict_updates(self._targets, batch_update, lambda params, *_: target_of(params))

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Handle a request at place `req_idx` of the batch; called by vLLM's second model runner.

        Returns True if the request wants its logits.
        """
        target = target_of(sampling_params)
        if target is None:
            self._targets.pop(req_idx, None)
        else:
            self._targets[req_idx] = target
        return target is not None

    def apply(self, logits: Any, ctx: Any = None) -> Any:
        """Copy the requested logits.

        Args:
            logits: logits of the batch.
            ctx: context of the second interface, which maps logits to places.
        """
        if not self._targets or self._buffer is None:
            return logits
        tickets, rows = self._buffer
        places = range(len(logits)) if ctx is None else ctx.expanded_idx_mapping.tolist()
        targets = [
            (row, *self._targets[at]) for row, at in enumerate(places) if at in self._targets
        ]
        if targets:
            copies = logits[[row for row, _, _ in targets]].float().cpu().numpy()
            for (_, slot, ticket), row in zip(targets, copies, strict=True):
                rows[slot] = row[: rows.shape[1]]
                tickets[slot] = ticket  # last, so that a reader of the ticket finds the logits
        return logits


def target_of(params: Any) -> tuple[int, int] | None:
    """Return (slot, ticket) of the buffer from a request's parameters.

    None if the request does not ask for its logits.
    """
    target = (getattr(params, "extra_args", None) or {}).get(KEY)
    return None if target is None else (int(target[0]), int(target[1]))


def _exit_with_parent(pid: int) -> None:
    """End this process when the process that started it, or its own parent, has exited."""
    parent = os.getppid()
    while True:
        time.sleep(WATCH_S)
        if os.getppid() != parent or not _process_exists(pid):
            os.kill(os.getpid(), signal.SIGKILL)


def _process_exists(pid: int) -> bool:
    """Return True if a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
