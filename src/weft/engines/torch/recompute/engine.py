"""The torch engine for models whose KV cannot be held by tokens: every row runs its whole path."""

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
from ..model import IdentityHead, Head, quiet_transformers
from ..module_hooks import hook_dicts
from ..output import TorchOutput
from .paths import OnStates, SequenceRunner
from .state_cache import StateCache

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_log = logging.getLogger("weft.engines.torch")

Answer = TypeVar("Answer")

_STATE_BYTES = 2 << 30  # of host memory, for states at the ends of paths
_AS_PLAIN = 0.05  # of what else may differ: a path's logits hang on no cache
_STATE_SHARE = 0.4  # of the device memory that is free after loading


class RecomputeEngine(TransformersEngine):
    """A decoder-only Transformers model without KV of single tokens: ALiBi, recurrent, hybrid, or
    with an attention of its own. `TorchEngine.load` and `adopt` make it.

    A path that goes on from one that was run lately, or from the same place as others, goes on from
    the model's own cache, if the load check finds that it can; any other is run whole.
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
        """Take over `model`, which nobody else uses any more. why: it has no KV of its tokens.

        state_bytes: of states at the ends of paths; 0 keeps none. None: 2 GiB of a host's memory,
        40 % of what a device has free.

        Raises: ModelLoadError where it does not run, Unsupported where it is no decoder.
        """
        super().__init__(model, n_ctx=n_ctx)
        if state_bytes is None:
            free = self._free_bytes()
            state_bytes = _STATE_BYTES if free is None else int(free * _STATE_SHARE)
        self._seen = self.weights_version()
        self._start(fingerprint, why, check_int("state_bytes", state_bytes, 0))
        self.info = replace(self.info, context_length=self._context_length)
        self._note_name()
        _log.warning(
            "prefix caching disabled for %s: %s; %s",
            type(model).__name__,
            why,
            "a path runs whole unless it goes on from a recent one"
            if self.info.caches_state
            else "every step runs whole paths",
        )

    # The protocol

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> TorchOutput:
        """Run the rows' paths, as many in a model call as fit; see Engine.forward."""
        picked: list[Tensor | None] = [None] * len(rows)
        scores: list[list[Score]] = [[] for _ in rows]

        def pick(number: int, states: Tensor, start: int) -> None:
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
        return TorchOutput(self._run(rows, needed, pick, answer), scores, self._sampler)

    @torch.inference_mode()
    def hidden_states(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Run rows and return the base model's last hidden states; see Engine.hidden_states."""
        if not self.info.n_embd:
            return super().hidden_states(rows)
        found: dict[int, NDArray[np.float32]] = {}

        def pick(number: int, states: Tensor, start: int) -> None:
            found[number] = states[: rows[number].n_tokens].float().cpu().numpy()

        needed = [0] * len(rows)
        return self._run(rows, needed, pick, lambda: [found[n] for n in range(len(rows))])

    def n_tokens_to_run(self, tokens: Sequence[int], first: int, adapter: str | None) -> int:
        """Return how many tokens follow those whose state is kept; see Engine.n_tokens_to_run."""
        ends = self._runner.states
        end = None if ends is None else ends.find(adapter, tuple(tokens), first)
        return len(tokens) - (0 if end is None else end.length)

    def clear_caches(self) -> None:
        """Forget the states at the ends of paths."""
        self._distrust_version()
        if self._runner.states is not None:
            self._runner.states.clear()

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter, and what was computed with it; rows that still name it are refused."""
        super().remove_adapter(name)
        self.clear_caches()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._release()
            del self._head, self._runner

    # Loading

    @torch.inference_mode()
    def _start(self, fingerprint: str, why: str, state_bytes: int) -> None:
        """Hold rows of uneven length beside each other against the model's own plain forward."""
        model = self.model
        # Transformers tells which faster kernels are not installed.
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
                f"the torch engine cannot run {type(model).__name__}: later tokens change what it"
                f" says of earlier ones, by {error:.2g} of the spread of its logits (allowed:"
                f" {allowed}); {_why_not_causal(model)}"
            )
        self._check_draws(output.dtype)

    def _can_cache_states(self, paths: Tensor, own: Tensor) -> bool:
        """Whether the model goes on from its own cache as in its plain forward: after paths are
        forked and come in another order, then as they are.
        """
        runner = SequenceRunner(self._head, self._device)
        runner.states = StateCache(1 << 62)
        begun = paths.shape[1] - 4
        try:
            for n, order in ((begun, (0, 1, 2)), (begun + 1, (2, 0, 1)), (begun + 2, (2, 0, 1))):
                got: dict[int, Tensor] = {}

                def pick(number: int, states: Tensor, start: int, got: Any = got) -> None:
                    got[number] = self._head.logits(states[-1:])[0].float().cpu()

                runner.run([tuple(paths[i, :n].tolist()) for i in order], [n - 1] * 3, None, pick)
                found = torch.stack([got[number] for number in range(3)])
                want = torch.stack([own[i, n - 1] for i in order])
                error, allowed = difference(found, want, self.model)
                if self.model.dtype == torch.float32:  # some caches round otherwise, by design
                    allowed *= _AS_PLAIN
                if not error <= allowed:
                    return False
        except Exception as error:
            _log.debug("no state of a path is kept: %r", error)
            return False
        return len(runner.states) > 0

    # One forward

    def _run(
        self,
        rows: Sequence[Row],
        needed: Sequence[int],
        pick: OnStates,
        answer: Callable[[], Answer],
    ) -> Answer:
        """Run rows; `pick` is told each one's states [T, E], and `answer` is what is given."""
        self._check_model()
        check_rows(rows)
        if any(row.prefix or row.kv_out is not None for row in rows):
            raise ForwardError(
                f"{self.info.model} has no KV that fragments could hold: rows carry whole paths"
            )
        tokens = [tuple(row_tokens(row, self.info)) for row in rows]
        if self.weights_version() != self._seen:
            self.clear_caches()
            self._seen = self.weights_version()
        adapter = rows[0].adapter if rows else None
        self._lora.use(adapter)

        n_tokens = sum([len(path) for path in tokens])

        try:
            with self._threads.limited(n_tokens), on_engine_stream(self._device):
                self._runner.run(tokens, needed, adapter, pick)
                return answer()
        except WeftError:
            raise
        except Exception as error:
            raise ForwardError(f"the model call failed: {type(error).__name__}: {error}") from error


def _why_not_causal(model: PreTrainedModel) -> str:
    paths = [path or "the model" for path, m in model.named_modules() if any(hook_dicts([m]))]
    if not paths:
        return "it is no decoder, and cannot continue text"
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return (
        f"it has hooks on {', '.join(paths[:3])}{more}, and one that looks at where a token stands"
        " in a call (the last one, say) is run on all: take such hooks off, or have them treat each"
        " token alike"
    )


def _head_of(model: PreTrainedModel, ids: Tensor, own: Tensor) -> tuple[Head | IdentityHead, int]:
    """Return what gives a model's states and their logits, and the numbers of a state.

    A head whose logits are not `own`, the model's of `ids`, is no part of it by itself.
    """
    try:
        head = Head(model)
        states = head.run(ids[None].to(model.device), use_cache=False)[0][0]
        error, allowed = difference(head.logits(states).float().cpu(), own, model)
        if error <= allowed:
            return head, states.shape[-1]
    except Exception as error:
        _log.debug("%s is run whole: %r", type(model).__name__, error)
    return IdentityHead(model), 0
