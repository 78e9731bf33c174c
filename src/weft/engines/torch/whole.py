"""The torch engine for models whose KV cannot be held by tokens: every row runs its whole path."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import ForwardError, Unsupported, WeftError
from ..abilities import OWN
from ..base import EngineInfo, Row, Score, check_rows
from .check import check_paths, difference, plain_logits
from .held import ModelEngine
from .model import BareHead, Head, quiet
from .output import TorchOutput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_log = logging.getLogger("weft.engines.torch")

Answer = TypeVar("Answer")

# Tokens of one model call, padding included; a longer path runs alone. A call needs working memory
# for all of them in each layer, and on a CPU more of them run no faster.
_CALL_TOKENS = {"cpu": 512, "cuda": 8192}


class WholePath(NamedTuple):
    """Token ids that run, and the numbers of the rows that they answer."""

    ids: tuple[int, ...]
    rows: list[int]


class WholePathEngine(ModelEngine):
    """A decoder-only Transformers model without KV of single tokens: ALiBi, recurrent, hybrid, or
    with an attention of its own. It keeps nothing between forwards.

    `TorchEngine.load` and `adopt` make it. Rows are padded on the right, which no decoder sees.
    """

    fragments: None = None

    def __init__(
        self, model: PreTrainedModel, why: str, *, n_ctx: int | None, fingerprint: str
    ) -> None:
        """Take over `model`, which nobody else uses any more. why: it has no KV of its tokens.

        Raises: ModelLoadError where it does not run, Unsupported where it is no decoder.
        """
        super().__init__(model, n_ctx=n_ctx)
        self._most = _CALL_TOKENS.get(self._device.type, max(_CALL_TOKENS.values()))
        self._start(fingerprint, why)
        _log.warning(
            "prefix caching disabled for %s: %s; every step runs whole paths",
            type(model).__name__,
            why,
        )

    # The protocol

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> TorchOutput:
        """Run the rows' paths, as many in a model call as fit; see Engine.forward."""
        picked: list[Tensor | None] = [None] * len(rows)
        scores: list[list[Score]] = [[] for _ in rows]

        def pick(number: int, states: Tensor) -> None:
            row = rows[number]
            if row.logits_at:
                picked[number] = states[list(row.logits_at)]
            scores[number] = self._scores_of(row, states, self._head.logits)

        def answer() -> Tensor:
            wanted = [states for states in picked if states is not None]
            if not wanted:
                return torch.empty(0, self.info.n_vocab, device=self._device)
            return self._head.logits(torch.cat(wanted))

        return TorchOutput(self._run(rows, pick, answer), scores)

    @torch.inference_mode()
    def hidden_states(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Run rows and return the base model's last hidden states; see Engine.hidden_states."""
        if not self.info.n_embd:
            return super().hidden_states(rows)
        found: dict[int, NDArray[np.float32]] = {}

        def pick(number: int, states: Tensor) -> None:
            found[number] = states.float().cpu().numpy()

        return self._run(rows, pick, lambda: [found[number] for number in range(len(rows))])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._let_go()
            del self._head

    # Loading

    @torch.inference_mode()
    def _start(self, fingerprint: str, why: str) -> None:
        """Hold rows of uneven length beside each other against the model's own plain forward."""
        model = self.model
        n_known = model.get_input_embeddings().num_embeddings
        n_named = getattr(model.config.get_text_config(), "vocab_size", n_known)
        paths = check_paths(min(n_known, n_named))
        with quiet():  # Transformers tells which faster kernels are not installed
            own = plain_logits(model, paths)
        self._head, n_embd = _head_of(model, paths[0], own[0])
        self.info = EngineInfo(
            name="torch",
            model=Path(model.config.name_or_path).name or model.config.model_type,
            n_layers=int(model.config.get_text_config().num_hidden_layers),
            n_vocab=own.shape[-1],
            n_positions=self._n_positions,
            kv_bytes_per_token=0,
            dtype=str(model.dtype).removeprefix("torch."),
            fingerprint=fingerprint,
            device=str(self._device),
            kv="hidden",
            recomputes=True,
            n_embd=n_embd,
            abilities=replace(
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
                f" {allowed}); it is no decoder, and cannot continue text"
            )

    # One forward

    def _run(
        self,
        rows: Sequence[Row],
        pick: Callable[[int, Tensor], None],
        answer: Callable[[], Answer],
    ) -> Answer:
        """Run rows; `pick` is told each one's states [T, E], and `answer` is what is given."""
        self._refuse_changed()
        check_rows(rows)
        if any(row.path or row.dest is not None for row in rows):
            raise ForwardError(
                f"{self.info.model} has no KV that fragments could hold: rows carry whole paths"
            )
        tokens = [tuple(self._tokens_of(row)) for row in rows]
        self._lora.use(rows[0].adapter if rows else None)
        try:
            for paths in calls(tokens, self._most):
                n_most = max(len(path.ids) for path in paths)
                padded = [[*path.ids, *path.ids[-1:] * (n_most - len(path.ids))] for path in paths]
                states = self._head.states(torch.tensor(padded, device=self._device))
                for path, of_path in zip(paths, states, strict=True):
                    for number in path.rows:
                        pick(number, of_path[: len(tokens[number])])
            return answer()
        except WeftError:
            raise
        except Exception as error:
            raise ForwardError(f"the model call failed: {type(error).__name__}: {error}") from error


def calls(tokens: Sequence[tuple[int, ...]], most: int) -> Iterator[list[WholePath]]:
    """Yield which paths each model call runs: rows that begin a longer one are answered by that.

    most: tokens of a call, padding included; a longer path is alone. Shorter paths come first.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, ids in enumerate(tokens):
        rows.setdefault(ids, []).append(number)
    paths: list[WholePath] = []
    for ids in sorted(rows, reverse=True):  # what begins a path follows it, or others it begins
        if paths and paths[-1].ids[: len(ids)] == ids:
            paths[-1].rows.extend(rows[ids])
        else:
            paths.append(WholePath(ids, rows[ids]))
    paths.sort(key=lambda path: len(path.ids))
    call: list[WholePath] = []
    for path in paths:
        if call and (len(call) + 1) * len(path.ids) > most:
            yield call
            call = []
        call.append(path)
    if call:
        yield call


def _head_of(model: PreTrainedModel, ids: Tensor, own: Tensor) -> tuple[Head | BareHead, int]:
    """Return what gives a model's states and their logits, and the numbers of a state.

    A head whose logits are not `own`, the model's of `ids`, is no part of it by itself.
    """
    try:
        head = Head(model)
        states = head.states(ids[None].to(model.device))[0]
        error, allowed = difference(head.logits(states).float().cpu(), own, model)
        if error <= allowed:
            return head, states.shape[-1]
    except Exception as error:
        _log.debug("%s is run whole: %r", type(model).__name__, error)
    return BareHead(model), 0
