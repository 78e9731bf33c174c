"""The tap: a logits processor in vLLM's workers that copies the rows that somebody asked for.

It speaks both of vLLM's interfaces for such classes: that of its first model runner (CPUs), and
that of the second (GPUs). Rows are raw where the request has neither bias nor penalty nor grammar.
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

from .shared_logits import KEY, mapped

WATCH_S = 2.0


class LogitsCapture(FirstInterface, SecondInterface):
    """A vLLM logits processor that copies logits to shared memory and changes none.

    `options.TAP` names it in vLLM's `logits_processors`. A worker without access to the shared
    buffer, for example on another machine, writes nothing. A worker whose parents have exited
    exits too.
    """

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        self._wanted: dict[int, tuple[int, int]] = {}  # by place in the batch: slot, ticket
        self._board = None
        told = (vllm_config.additional_config or {}).get(KEY)
        if told is None:
            return
        with suppress(OSError, ValueError):
            self._board = mapped(told["path"], told["n_slots"], told["n_vocab"])
            threading.Thread(target=_watch, args=(told["pid"],), daemon=True).start()

    def is_argmax_invariant(self) -> bool:
        """Say no, or it would not be asked where all are greedy."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """First interface: requests came, went and moved."""
        process_dict_updates(self._wanted, batch_update, lambda params, *_: wish_of(params))

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Second interface: a request came to a place."""
        wish = wish_of(sampling_params)
        if wish is None:
            self._wanted.pop(req_idx, None)
        else:
            self._wanted[req_idx] = wish
        return wish is not None

    def apply(self, logits: Any, ctx: Any = None) -> Any:
        """Copy what is wanted. ctx: of the second interface, whose row is whose."""
        if not self._wanted or self._board is None:
            return logits
        tickets, rows = self._board
        places = range(len(logits)) if ctx is None else ctx.expanded_idx_mapping.tolist()
        found = [(row, *self._wanted[at]) for row, at in enumerate(places) if at in self._wanted]
        if found:
            picked = logits[[row for row, _, _ in found]].float().cpu().numpy()
            for (_, slot, ticket), row in zip(found, picked, strict=True):
                rows[slot] = row[: rows.shape[1]]
                tickets[slot] = ticket  # last: who finds it finds the row
        return logits


def wish_of(params: Any) -> tuple[int, int] | None:
    """Return the slot and the ticket that a request's parameters name."""
    wish = (getattr(params, "extra_args", None) or {}).get(KEY)
    return None if wish is None else (int(wish[0]), int(wish[1]))


def _watch(pid: int) -> None:
    """End this process when the one that asked for it, or its own parent, is gone."""
    parent = os.getppid()
    while True:
        time.sleep(WATCH_S)
        if os.getppid() != parent or not _is_there(pid):
            os.kill(os.getpid(), signal.SIGKILL)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
