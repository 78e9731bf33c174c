"""The torch engine for models whose KV cannot be cached by tokens: each row runs its full path."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...._core.validation import check_int
from ....errors import ForwardError, Unsupported, WeftError
from ...base import EngineInfo, Row, Score, check_rows, row_tokens
from ...capabilities import OWN
from ..base import TransformersEngine
from ..check import PlainOutputs, difference
from ..execution import on_engine_stream
from ..model import Head, IdentityHead, quiet_transformers
from ..module_hooks import hook_dicts
from ..output import TorchOutput
from .sequences import OnStates, SequenceRunner
from .state_cache import StateCache

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_log = logging.getLogger("weft.engines.torch")

Answer = TypeVar("Answer")

_STATE_BYTES = 2 << 30  # of host memory, for states at the ends of paths
_CACHE_TOLERANCE = 0.05  # of the tolerance of a load check: a cache must not change logits
_STATE_SHARE = 0.4  # of the device memory that is free after loading


class RecomputeEngine(TransformersEngine):
    """A decoder-only Transformers model without KV of single tokens.

    Such models use ALiBi, are recurrent or hybrid, or have an attention of their own.
    `TorchEngine.load` and `adopt` return this engine.

    If the load check finds that the model can continue from its own cache, a path that extends a
    recent one continues from there. Any other path runs in full.
    """

    fragments: None = None

    def __init__(
        self,
        model: PreTrainedModel,
        why: str,
        *,
        n_ctx: int | None,
        fingerprint: str,
        state_bytes: int | None = None,
    ) -> None:
        """Take over `model`; the caller must not use it any more.

        Args:
            why: the reason why its KV cannot be cached by tokens.
            state_bytes: maximum memory for cached states at path ends; 0 caches none. None: 2 GiB
                of host memory, or 40 % of a device's free memory.

        Raises:
            ModelLoadError: the model fails to run.
            Unsupported: it is not a decoder.
        """
        super().__init__(model, n_ctx=n_ctx)
        if state_bytes is None:
            free = self._free_bytes()
            state_bytes = _STATE_BYTES if free is None else int(free * _STATE_SHARE)
        self._cached_version = self.weights_version()  # of the weights behind the states
        self._start(fingerprint, why, check_int("state_bytes", state_bytes, 0))
        self.info = replace(self.info, context_length=self._context_length)
        self._store_fingerprint()
        _log.warning(
            "prefix caching disabled for %s: %s; %s",
            type(model).__name__,
            why,
            "a path runs in full unless it extends a recent one"
            if self.info.caches_state
            else "every step runs full paths",
        )

    # The protocol

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> TorchOutput:
        """Run the rows' paths, with as many in a model call as fit; see Engine.forward."""
        picked: list[Tensor | None] = [None] * len(rows)
        scores: list[list[Score]] = [[] for _ in rows]

        def on_states(number: int, states: Tensor, start: int) -> None:
            row = rows[number]
            if row.logits_at:
                picked[number] = states[[at - start for at in row.logits_at]]
            scores[number] = self._score_row(row, states, self._head.logits, start)

        def answer() -> Tensor:
            wanted = [states for states in picked if states is not None]
            if not wanted:
                return torch.empty(0, self.info.n_vocab, device=self._device)
            return self._head.logits(torch.cat(wanted))

        needed = [
            min([*row.logits_at, *(span.start for span in row.scores)], default=row.n_tokens - 1)
            for row in rows
        ]
        return TorchOutput(self._run(rows, needed, on_states, answer), scores, self._sampler)

    @torch.inference_mode()
    def hidden_states(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Run rows and return the base model's last hidden states; see Engine.hidden_states."""
        if not self.info.n_embd:
            return super().hidden_states(rows)
        by_row: dict[int, NDArray[np.float32]] = {}

        def on_states(number: int, states: Tensor, start: int) -> None:
            by_row[number] = states[: rows[number].n_tokens].float().cpu().numpy()

        needed = [0] * len(rows)
        return self._run(rows, needed, on_states, lambda: [by_row[n] for n in range(len(rows))])

    def n_tokens_to_run(self, tokens: Sequence[int], first: int, adapter: str | None) -> int:
        """Return the number of tokens after the last cached state; see Engine.n_tokens_to_run."""
        ends = self._runner.states
        end = None if ends is None else ends.find(adapter, tuple(tokens), first)
        return len(tokens) - (0 if end is None else end.length)

    def clear_caches(self) -> None:
        """Remove the cached states."""
        self._distrust_version()
        if self._runner.states is not None:
            self._runner.states.clear()

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter and all cached states; rows that still name it fail."""
        super().remove_adapter(name)
        self.clear_caches()

    def close(self) -> None:
        """Release the model and all cached states. Idempotent."""
        if not self._closed:
            self._closed = True
            self._release()
            del self._head, self._runner

    # Loading

    @torch.inference_mode()
    def _start(self, fingerprint: str, why: str, state_bytes: int) -> None:
        """Compare rows of different lengths in one batch with the model's own plain forward."""
        model = self.model
        # Transformers warns about faster kernels that are not installed.
        with quiet_transformers(), self._threads.limited(1, "plain"):
            paths, own, *_ = PlainOutputs.from_model(model, self._max_positions)
        self._head, n_embd = _head_of(model, paths[0], own[0])
        self._runner = SequenceRunner(self._head, self._device)
        if state_bytes and self._runner.can_cache_states and self._can_cache_states(paths, own):
            self._runner.states = StateCache(state_bytes)
        self.info = EngineInfo(
            name="torch",
            model=Path(model.config.name_or_path).name or model.config.model_type,
            n_layers=int(getattr(model.config.get_text_config(), "num_hidden_layers", 0)),
            n_vocab=own.shape[-1],
            context_length=self._max_positions,
            kv_bytes_per_token=0,
            dtype=str(model.dtype).removeprefix("torch."),
            fingerprint=fingerprint,
            device=str(self._device),
            kv="hidden",
            no_prefix_cache=True,
            caches_state=self._runner.states is not None,
            n_embd=n_embd,
            capabilities=replace(
                OWN["torch"],
                shared_attention=False,
                fork="its path runs again",
                embed=n_embd > 0,
                offload=False,
                save_kv=False,
            ),
            extra={**self._extra, "no_prefix_caching": why},
        )
        ends = [(0, 5), (0, 16), (1, 11), (2, 9)]
        output = self.forward([Row((), paths[i, :n].tolist(), 0, None, (n - 1,)) for i, n in ends])
        got = torch.stack([torch.from_numpy(output.logits(i)) for i in range(len(ends))])
        error, allowed = difference(got, torch.stack([own[i, n - 1] for i, n in ends]), model)
        if not error <= allowed:
            raise Unsupported(
                f"the torch engine cannot run {type(model).__name__}: later tokens change the"
                f" logits of earlier ones, by {error:.2g} of the spread of its logits (allowed:"
                f" {allowed}); {_why_not_causal(model)}"
            )
        self._check_draws(output.dtype)

    def _can_cache_states(self, paths: Tensor, own: Tensor) -> bool:
        """Return True if the model continues from its own cache as in its plain forward.

        The check forks and reorders paths, then continues them in order.
        """
        runner = SequenceRunner(self._head, self._device)
        runner.states = StateCache(1 << 62)
        begun = paths.shape[1] - 4
        try:
            for n, order in ((begun, (0, 1, 2)), (begun + 1, (2, 0, 1)), (begun + 2, (2, 0, 1))):
                got: dict[int, Tensor] = {}

                def on_states(number: int, states: Tensor, start: int, got: Any = got) -> None:
                    got[number] = self._head.logits(states[-1:])[0].float().cpu()

                runner.run(
                    [tuple(paths[i, :n].tolist()) for i in order], [n - 1] * 3, None, on_states
                )
                logits = torch.stack([got[number] for number in range(3)])
                want = torch.stack([own[i, n - 1] for i in order])
                error, allowed = difference(logits, want, self.model)
                if self.model.dtype == torch.float32:  # some caches round otherwise, by design
                    allowed *= _CACHE_TOLERANCE
                if not error <= allowed:
                    return False
        except Exception as error:
            _log.debug("states of paths cannot be cached: %r", error)
            return False
        return len(runner.states) > 0

    # One forward

    def _run(
        self,
        rows: Sequence[Row],
        needed: Sequence[int],
        on_states: OnStates,
        answer: Callable[[], Answer],
    ) -> Answer:
        """Run the paths of rows and return the result of `answer`.

        Args:
            rows: rows to run.
            needed: for each row, the first position whose state is needed.
            on_states: see `SequenceRunner.run`.
            answer: called after the run; makes the result.
        """
        self._check_model()
        check_rows(rows)
        if any(row.prefix or row.kv_out is not None for row in rows):
            raise ForwardError(
                f"{self.info.model} has no KV for fragments: rows must carry full paths"
            )
        tokens = [tuple(row_tokens(row, self.info)) for row in rows]
        if self.weights_version() != self._cached_version:
            self.clear_caches()
            self._cached_version = self.weights_version()
        adapter = rows[0].adapter if rows else None
        self._lora.use(adapter)

        n_tokens = sum([len(path) for path in tokens])

        try:
            with self._threads.limited(n_tokens), on_engine_stream(self._device):
                self._runner.run(tokens, needed, adapter, on_states)
                return answer()
        except WeftError:
            raise
        except Exception as error:
            raise ForwardError(f"the model call failed: {type(error).__name__}: {error}") from error


def _why_not_causal(model: PreTrainedModel) -> str:
    """Return why rows of different lengths get wrong results in a batch: a clause."""
    paths = [path or "the model" for path, m in model.named_modules() if any(hook_dicts([m]))]
    if not paths:
        return "it is no decoder, and cannot continue text"
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return (
        f"it has hooks on {', '.join(paths[:3])}{more}, and a hook must not depend on a token's"
        " index in a call (such as the last one): remove such hooks, or make them treat each token"
        " alike"
    )


def _head_of(model: PreTrainedModel, ids: Tensor, own: Tensor) -> tuple[Head | IdentityHead, int]:
    """Return a model's head and the width of a state.

    A head whose logits differ from `own`, the model's logits of `ids`, cannot be separated.
    """
    try:
        head = Head(model)
        states = head.run(ids[None].to(model.device), use_cache=False)[0][0]
        error, allowed = difference(head.logits(states).float().cpu(), own, model)
        if error <= allowed:
            return head, states.shape[-1]
    except Exception as error:
        _log.debug("the head of %s cannot be separated: %r", type(model).__name__, error)
    return IdentityHead(model), 0
