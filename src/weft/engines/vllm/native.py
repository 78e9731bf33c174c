"""Generation runs of vLLM's own loop."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams as VllmParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from ..._core.sampling.params import SamplingParams
from ..._core.sampling.rng import stream_of
from ...errors import ForwardError
from ..generation import (
    EngineGenerator,
    EventCallback,
    GenerationEvent,
    GenerationRequest,
    NativeEnd,
)
from .grammars import structured
from .vllm_internals import is_speculative, max_num_seqs

if TYPE_CHECKING:
    from .running import RunningEngine

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 2.0  # vLLM changes others, except 0
_MAX_PENALTY = 2.0
_ENDS: dict[str, NativeEnd] = {"stop": "stop", "length": "length", "abort": "cancelled"}


class VllmRun:
    """Handle of a running GenerationRequest, for `VllmRuns.cancel`: one task per sibling.

    A task is None until the loop has started it.
    """

    def __init__(self, n_siblings: int) -> None:
        self.tasks: list[asyncio.Task[None] | None] = [None] * n_siblings


class VllmRuns(EngineGenerator):
    """`Engine.native` over an AsyncLLM.

    Each sibling is a request with its own seed. vLLM's prefix cache shares the prompt.

    Args:
        running: the AsyncLLM.
        loras: vLLM's adapters by name.
        by_guidance: pass constraints to vLLM, whose matcher is then the same library as Weft's.
    """

    def __init__(
        self, running: RunningEngine, loras: dict[str | None, Any], *, by_guidance: bool
    ) -> None:
        self.max_in_flight = max_num_seqs(running.engine.vllm_config)
        self._running = running
        self._loop = running.loop
        self._loras = loras
        self._drafts = is_speculative(running.engine.vllm_config)
        self._by_guidance = by_guidance
        self._numbers = itertools.count()

    def unsupported_params(self, params: SamplingParams) -> str | None:
        """Return the reason why vLLM would not honour a parameter exactly; None if it would."""
        for name, is_unsupported in _UNSUPPORTED.items():
            if is_unsupported(params):
                return f"{name}={getattr(params, name)!r}"
        if params.temperature:  # filters do not change greedy choices
            has_filter = params.top_k or params.min_p or params.top_p < 1
            if has_filter and params.temperature != 1 and not params.temperature_first:
                return (
                    f"temperature={params.temperature!r} after the filters"
                    " (temperature_first=False)"
                )
            if params.min_p and params.top_p < 1:
                return f"min_p={params.min_p!r} after top_p={params.top_p!r}"
        if self._drafts and (params.min_p or params.logit_bias):
            return "min_p and logit_bias with speculative decoding"
        if params.constraint is not None:
            return structured(params.constraint, by_guidance=self._by_guidance).unsupported
        return None

    def start(self, request: GenerationRequest, on_event: EventCallback) -> VllmRun:
        """Start a vLLM request for each sibling; return the handle for `cancel`."""
        run = VllmRun(len(request.streams))
        lora = self._loras[request.adapter]
        params = [vllm_params(request, stream) for stream in request.streams]
        try:
            self._loop.post(self._start_tasks, run, request, params, lora, on_event)
        except RuntimeError as error:
            raise ForwardError("the engine is closed; load the model again") from error
        return run

    def cancel(self, handle: VllmRun, sibling: int) -> None:
        """Request the end of one sibling. Its last event is still reported."""
        self._loop.post(self._cancel, handle, sibling)

    # On the engine's loop

    def _start_tasks(
        self,
        run: VllmRun,
        request: GenerationRequest,
        params: list[VllmParams],
        lora: Any,
        on_event: EventCallback,
    ) -> None:
        """Start the siblings' tasks, on the loop."""
        for number, sibling_params in enumerate(params):
            work = self._generate(request, number, sibling_params, lora, on_event)
            run.tasks[number] = self._loop.loop.create_task(work)

    def _cancel(self, run: VllmRun, sibling: int) -> None:
        """Cancel a sibling's task, on the loop."""
        task = run.tasks[sibling]
        if task is not None:
            # Later, because a task that is cancelled before it starts reports no event.
            self._loop.loop.call_soon(task.cancel)

    async def _generate(
        self,
        request: GenerationRequest,
        number: int,
        params: VllmParams,
        lora: Any,
        on_event: EventCallback,
    ) -> None:
        """Run one sibling's request in vLLM and report its events. number: index of the sibling."""
        is_finished = False
        try:
            prompt = tokens_input(list(request.tokens))
            name = f"weft-run-{next(self._numbers)}"
            async for output in self._running.engine.generate(
                prompt, params, name, lora_request=lora
            ):
                event = event_of(number, output.outputs[0])
                is_finished = event.is_last
                on_event(event)
        except asyncio.CancelledError:
            if not is_finished:
                on_event(GenerationEvent(number, end="cancelled"))
        except Exception as error:
            if not is_finished:
                on_event(GenerationEvent(number, error=as_forward_error(error)))
        else:
            if not is_finished:
                failure = ForwardError("vLLM ended a run without a finish reason")
                on_event(GenerationEvent(number, error=failure))


_UNSUPPORTED: dict[str, Callable[[SamplingParams], bool]] = {
    "top_n_sigma": lambda p: p.top_n_sigma > 0 and p.temperature != 0,
    "xtc_probability": lambda p: p.xtc_probability > 0 and p.temperature != 0,
    "dry_multiplier": lambda p: p.dry_multiplier > 0,
    "typical_p": lambda p: p.typical_p < 1 and p.temperature != 0,
    "penalty_last_n": lambda p: p.penalty_last_n is not None and _is_penalised(p),
    "temperature": lambda p: (
        p.temperature != 0 and not _MIN_TEMPERATURE <= p.temperature <= _MAX_TEMPERATURE
    ),
    "top_p": lambda p: p.top_p <= 0,
    "repetition_penalty": lambda p: p.repetition_penalty <= 0,
    "presence_penalty": lambda p: abs(p.presence_penalty) > _MAX_PENALTY,
    "frequency_penalty": lambda p: abs(p.frequency_penalty) > _MAX_PENALTY,
    "logit_bias": lambda p: _may_differ_in_vllm(p.logit_bias, p.constraint),
}


def _may_differ_in_vllm(biases: Iterable[tuple[int, float]], constraint: object) -> bool:
    """Return True for biases that vLLM may handle differently from Weft.

    These are +inf, and -inf with a constraint: together they may exclude every token.
    """
    values = [bias for _, bias in biases]
    return math.inf in values or (constraint is not None and -math.inf in values)


def _is_penalised(params: SamplingParams) -> bool:
    """Return True if a repetition, presence or frequency penalty is on."""
    both = params.presence_penalty or params.frequency_penalty
    return bool(params.repetition_penalty != 1 or both)


def vllm_params(request: GenerationRequest, stream: int) -> VllmParams:
    """Return vLLM's parameters for one sibling.

    Its seed depends on the stream and on the length of the path, so that a run that continues later
    draws other numbers. Stop strings are matched by Weft, in its own text.
    """
    params, at = request.params, len(request.tokens)
    constraint: dict[str, Any] = {}
    if params.constraint is not None:
        constraint = structured(params.constraint, by_guidance=True).arguments(request.stop_ids)
    has_masked_logprobs = "structured_outputs" in constraint
    return VllmParams(
        max_tokens=request.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias) or None,
        seed=stream_of(stream, (at,)) >> 1 if params.temperature else None,
        stop_token_ids=sorted(request.stop_ids),
        ignore_eos=True,
        # vLLM computes logprobs after a grammar's mask, so they would not be raw.
        logprobs=None if has_masked_logprobs else 0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
        **constraint,
    )


def event_of(number: int, given: Any) -> GenerationEvent:
    """Convert one of vLLM's outputs to an event.

    Args:
        number: index of the sibling.
        given: the new tokens of a request, a CompletionOutput of vLLM.
    """
    tokens = list(given.token_ids)
    logprobs = None
    if given.logprobs is not None:
        flat = given.logprobs
        logprobs = [flat.logprobs[at] for at in flat.start_indices]
    ended_by = None
    if given.finish_reason is None:
        return GenerationEvent(number, tokens, logprobs)
    if given.finish_reason not in _ENDS:
        why = f"vLLM ended a run by {given.finish_reason!r}"
        return GenerationEvent(number, tokens, logprobs, error=ForwardError(why))
    if given.finish_reason == "stop" and isinstance(given.stop_reason, int):
        ended_by = given.stop_reason
        if tokens and tokens[-1] == ended_by:
            tokens = tokens[:-1]
            logprobs = None if logprobs is None else logprobs[: len(tokens)]
    return GenerationEvent(
        number, tokens, logprobs, end=_ENDS[given.finish_reason], ended_by=ended_by
    )


def as_forward_error(error: BaseException) -> ForwardError:
    """Convert any error of a failed run or step to a ForwardError."""
    name = type(error).__name__
    if name == "EngineDeadError":
        message = (
            "vLLM's engine process exited; see its log. The tree is unchanged: load the model"
            " again and continue"
        )
    else:
        cause = error.__cause__
        reason = f"{name}: {error}" if cause is None else f"{type(cause).__name__}: {cause}"
        message = f"vLLM failed: {reason}"
    failure = ForwardError(message)
    failure.__cause__ = error
    return failure
