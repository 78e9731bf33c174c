"""The engine protocol: one model, its KV fragments, one model call per step.

An engine runs batches of rows and owns the KV memory. It has no access to trees, queues, handles
or text. Only the scheduler calls it, from one thread at a time, so an engine needs no lock.

Tokens that a row attends to::

    prefix spans (root → tip)        kv_out (present slots)      row.tokens
    ├──────── shared, read-only ─────┤├── own tail, if any ──────┤├── new, causal ──┤
    0                                                            row.position

A fragment holds the KV of consecutive tokens of one path. A slot is valid only at the position
where it was written. `split` and `join` regroup slots; they never change what a forward computes.

Any call may raise, for example when memory runs out. A call that raises must leave every fragment
and every slot unchanged. The scheduler then fails the affected work, and retries `trim` and `free`
later.

Engines import this module, `weft._core.tokens`, `weft._core.sampling` and `weft.errors`. They never
import kv, sched or lm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

from .._core.nopickle import NotPicklable
from ..errors import ConfigError, ContextOverflow, ForwardError, Unsupported
from .capabilities import Capabilities as Capabilities

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .._core.sampling.params import ModelDefaults, SamplingParams
    from .._core.sampling.sampler import DrawBatch, DrawResult
    from .generation import EngineGenerator

UNKNOWN_CONTEXT_LENGTH = 1 << 20
KVKind = Literal["addressable", "sequence", "hidden"]
Pooling = Literal["mean", "cls", "last"]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of an engine with a loaded model. They never change.

    Raises:
        ConfigError: for an unknown `kv`, for `no_prefix_cache` with `kv` other than "hidden", for
            `caches_state` without `no_prefix_cache`, and for `max_num_batched_tokens` below 1.
    """

    name: str
    """The engine's name, as in `weft.load(engine=…)`."""
    model: str
    """Source of the model; `weft.load` sets the name that the caller requested."""
    n_layers: int
    """Layers with KV of their own; for hidden engines, all layers."""
    n_vocab: int
    """Vocabulary size: ids are 0 to n_vocab - 1. 0 if unknown, only for engines without steps."""
    context_length: int
    """Context length in tokens; longer paths are rejected. UNKNOWN_CONTEXT_LENGTH if not known."""
    kv_bytes_per_token: int
    """Bytes of one slot over all layers; 0 for hidden engines."""
    dtype: str
    """Type of the KV, as `Fragments.export` names it ("float32", "bfloat16", "q8_0", …); for hidden
    engines, the type that the model computes in."""
    fingerprint: str
    """Name of the weights. Equal if and only if two engines compute the same function up to
    rounding, in any dtype and on any device. Saved trees and branches are matched by it; exported
    KV by it and by `dtype`."""
    device: str = "cpu"
    """Device that runs the model, as the engine's library names it."""
    kv: KVKind = "addressable"
    """Kind of KV. "addressable": any number of fragments. "sequence": fragments of at most
    `max_paths` resident leaves. "hidden": no fragments; `Row.tokens` holds full paths."""
    max_paths: int | None = None
    """Maximum number of resident leaves with `kv="sequence"`; None if there is no limit."""
    kv_slots: int | None = None
    """Slots allocated at load, if the engine cannot allocate more later; None: the budget decides.
    """
    idle_slots: int | None = None
    """Maximum number of unpinned slots on the device; the scheduler offloads the others to the
    host. For engines whose forwards slow down with every slot in use. None: no limit."""
    no_prefix_cache: bool = False
    """Hidden engines only: nothing is cached between forwards. A row counts as its full path in a
    step's budget, instead of as its new tokens."""
    caches_state: bool = False
    """With `no_prefix_cache`: the engine caches model states. Runs and branches that continue count
    as their new tokens; `Engine.n_tokens_to_run` returns the cost of other paths."""
    async_scheduling: bool = False
    """`forward` returns before its result is computed and accepts `FutureTokens` of the last step.
    The scheduler then launches step k + 1, processes the outputs of step k, and samples step k + 1
    last, so that samplers have received every earlier token."""
    max_num_batched_tokens: int | None = None
    """Maximum number of tokens in a forward, if the next tokens of runs and commits do not count
    against the `n_batch` of an LM. Other tokens are still limited by `n_batch`. None: `n_batch`
    limits all tokens."""
    same_thread_only: bool = False
    """All calls must come from the thread of the first call."""
    logits_on_device: bool = False
    """`Output.retain` leaves logits on the device, where `RetainedLogits.logprobs` is faster than
    on the host."""
    head: Literal["language", "sequence", "steps"] = "language"
    """The model's head. "sequence": it scores a text at its last token. "steps": it scores a text's
    steps. Rows of both are [n_labels] instead of [n_vocab], and such a model only reads text."""
    n_labels: int = 0
    """Outputs of a reward model's head; 0 for language models."""
    n_embd: int = 0
    """Size of a hidden state; 0 if the engine returns none."""
    pooling: Pooling | None = None
    """Pooling that the model's files declare for text embeddings; None if they declare none."""
    capabilities: Capabilities = Capabilities()
    """Features of the engine with this model."""
    temperature_first: bool = False
    """Native runs apply the temperature before the filters. The LM uses the same order by default.
    """
    own_random: bool = False
    """Native runs use the library's random numbers. A seed is reproducible there, but returns other
    text than Weft's samplers."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further facts for users. Weft reads only "free_bytes": device memory that is free after
    loading. A KV budget of "auto" is a fraction of it."""

    def __post_init__(self) -> None:
        if self.kv not in get_args(KVKind):
            raise ConfigError(
                f"kv is {self.kv!r}; allowed are {', '.join(map(repr, get_args(KVKind)))}"
            )
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < 1:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens};"
                " allowed are None and 1 or more"
            )
        if self.no_prefix_cache and self.kv != "hidden":
            raise ConfigError(
                f'no_prefix_cache is True with kv "{self.kv}"; it is for "hidden" alone'
            )
        if self.caches_state and not self.no_prefix_cache:
            raise ConfigError(
                "caches_state is True without no_prefix_cache; it says what is spared then"
            )


class Fragment:
    """KV slots of `length` consecutive tokens. Engines subclass it."""

    __slots__ = ("length",)

    def __init__(self, length: int = 0) -> None:
        self.length = length


class Span(NamedTuple):
    """The first `length` slots of a fragment."""

    fragment: Fragment
    length: int


class FutureTokens(NamedTuple):
    """One token that a launched step is sampling; the host does not know its id yet.

    The next step can be launched with it before the id reaches the host. All `FutureTokens` of one
    forward refer to the same `draws`, in any order. Other rows of the forward may have known
    tokens. An id below 0 means that nothing could be sampled: the run ends, and the engine may run
    any token in its place.

    Attributes:
        draws: the object that `Output.draw` of this engine returned.
        number: index of the token in `draws`.
    """

    draws: Draws
    number: int


class ScoreSpan(NamedTuple):
    """Request for the log-probabilities of given tokens.

    Attributes:
        start: row-local index of the token whose logits score `targets[0]`. `targets[i]` is scored
            by the logits of token `start + i`.
        targets: token ids to score.
        top: number of likeliest ids to return at every position; 0 for none.
    """

    start: int
    targets: tuple[int, ...]
    top: int = 0


@dataclass(slots=True)
class Score:
    """Scores of the n targets of a `ScoreSpan`: raw logits, full vocabulary, natural logarithm.

    Engines without steps may leave `entropies` and `ranks` out.

    Args:
        logprobs: float32 [n].
        entropies: float32 [n], or None.
        ranks: int64 [n], 0 for the likeliest id; or None.
        top_ids: int64 [n, top], likeliest first; ties by lower id.
        top_logprobs: float32 [n, top].
    """

    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32] | None
    ranks: NDArray[np.int64] | None
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float32]


class Row:
    """One sequence's part of a step. The scheduler may reuse the object in its next step.

    Args:
        prefix: spans from the root, `length` slots of each. Rows with the same prefix share the
            tuple, so an engine may group rows by its identity.
        tokens: ids to run, at least one. `FutureTokens` (one token) only with `async_scheduling`.
            Hidden engines: the full path.
        position: absolute position of tokens[0]; 0 for hidden engines.
        kv_out: fragment that receives the new slots. Slots that it already has follow the prefix.
            None: the new slots exist only during this call.
        logits_at: row-local indices whose logits are requested, ascending.
        scores: given tokens to score.
        adapter: name of the LoRA adapter; None for the model itself.
    """

    __slots__ = ("adapter", "kv_out", "logits_at", "position", "prefix", "scores", "tokens")

    def __init__(
        self,
        prefix: tuple[Span, ...],
        tokens: Sequence[int] | FutureTokens,
        position: int,
        kv_out: Fragment | None = None,
        logits_at: tuple[int, ...] = (),
        scores: tuple[ScoreSpan, ...] = (),
        adapter: str | None = None,
    ) -> None:
        self.prefix = prefix
        self.tokens = tokens
        self.position = position
        self.kv_out = kv_out
        self.logits_at = logits_at
        self.scores = scores
        self.adapter = adapter

    @property
    def n_tokens(self) -> int:
        """Number of tokens that the row runs; 1 for future tokens."""
        return 1 if isinstance(self.tokens, FutureTokens) else len(self.tokens)


def check_rows(rows: Sequence[Row]) -> None:
    """Validate that positions, `logits_at` and scores fit the tokens of each row.

    For engines with fragments, before a forward. Engines check token ids, adapters and the context
    length themselves.

    Raises:
        ForwardError: for the first row that does not fit.
    """
    lengths: dict[int, int] = {}  # by the identity of the prefix
    for row in rows:
        if id(row.prefix) not in lengths:
            lengths[id(row.prefix)] = sum([span.length for span in row.prefix])
            for fragment, length in row.prefix:
                if length > fragment.length:
                    raise ForwardError(
                        f"a prefix has {length} slots of a fragment of {fragment.length}"
                    )
        n_tokens = row.n_tokens
        n_before = lengths[id(row.prefix)] + (0 if row.kv_out is None else row.kv_out.length)
        if n_tokens < 1:
            raise ForwardError("a row has no tokens; it needs at least one")
        if row.position != n_before:
            raise ForwardError(f"a row starts at position {row.position} after {n_before} slots")
        if any([not 0 <= index < n_tokens for index in row.logits_at]):
            raise ForwardError(f"logits_at {row.logits_at} is outside a row of {n_tokens} tokens")
        for span in row.scores:
            if span.start < 0 or span.start + len(span.targets) > n_tokens:
                raise ForwardError(f"{span} is outside a row of {n_tokens} tokens")


def row_tokens(row: Row, info: EngineInfo) -> Sequence[int]:
    """Return the token ids that a row runs. Wait for future tokens.

    Raises:
        ContextOverflow: the row ends beyond the context.
        ConfigError: a token id is outside the vocabulary.
    """
    end, n_vocab = row.position + row.n_tokens, info.n_vocab
    if end > info.context_length:
        raise ContextOverflow(
            f"a path of {end} tokens is longer than the context of {info.context_length}",
            n_tokens=end,
            n_ctx=info.context_length,
        )
    if isinstance(row.tokens, FutureTokens):
        return [max(int(row.tokens.draws.result().ids[row.tokens.number]), 0)]
    low, high = min(row.tokens), max(row.tokens)
    if low < 0 or high >= n_vocab:
        raise ConfigError(f"token ids must be 0 to {n_vocab - 1}; got {low} to {high}")
    return row.tokens


class Draws(Protocol):
    """Tokens sampled in a step. They may still be on their way to the host."""

    def result(self) -> DrawResult:
        """Wait for the tokens and return them.

        Raises:
            ForwardError: the step failed.
        """
        ...


class RetainedLogits(ABC):
    """Logits that remain available after their step, on the device that computed them.

    `Output.retain` creates them.

    Attributes:
        n_bytes: memory that they occupy on that device.
    """

    n_bytes: int

    @abstractmethod
    def logits(self, number: int) -> NDArray[np.float32]:
        """Return raw logits of entry `number`: float32 [V] on the host, read-only.

        Waits for the copy. Any thread may call it, also during a step.
        """

    def logprobs(self, number: int, *, on_host: bool) -> Any:
        """Return log-probabilities (natural logarithm) of entry `number`: float32 [V], owned by the
        caller.

        Only for engines with `logits_on_device`. Waits for copies to the host. Any thread may call
        it.

        Args:
            number: index of the entry.
            on_host: return a NumPy array; otherwise a tensor of the engine's library on its device.
        """
        raise Unsupported("this engine keeps no logits on a device; use `logits`")


class RetainedRow(NamedTuple):
    """One entry of a `RetainedLogits`."""

    rows: RetainedLogits
    number: int

    def logits(self) -> NDArray[np.float32]:
        """Wait for the logits and return them: float32 [V] on the host, read-only."""
        return self.rows.logits(self.number)


class Output(ABC):
    """Result of one forward.

    Logits are numbered by row, then by `logits_at`.
    """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the step is done. Raises the error of a failed step."""

    @abstractmethod
    def logits(self, index: int) -> NDArray[np.float32]:
        """Return raw logits `index` on the host: float32 [V], a copy. Waits for the step."""

    def retain(self, indices: Sequence[int]) -> RetainedLogits:
        """Keep logits `indices` available after this output is gone.

        The scheduler calls it once per step, after the step is done. This default copies them to
        the host. An engine with logits on a device overrides it: it leaves them there and copies
        each to the host on first use.
        """
        return HostLogits([self.logits(index) for index in indices])

    @abstractmethod
    def scores(self) -> list[list[Score]]:
        """Return one list per row with one `Score` per `ScoreSpan`. Waits for the step."""

    @abstractmethod
    def draw(self, batch: DrawBatch) -> Draws:
        """Start sampling, without waiting: token i of the result is drawn from logits
        `batch.rows[i]`.

        The scheduler calls it after the forward, once per group of samplers. The host has received
        every token that the batch's samplers drew before. Their counts and constraints are
        therefore up to date, also for rows that ran `FutureTokens`. The samplers change only after
        the tokens of this call have reached the host.
        """


class Usage(NamedTuple):
    """KV memory in use.

    Attributes:
        slots: slots that hold tokens.
        bytes: bytes allocated for KV, including unused capacity.
    """

    slots: int
    bytes: int


class Fragments(ABC):
    """The KV memory of an engine. All methods except `export` and `usage` change it.

    A cut outside the fragment raises ValueError (`split`, `trim`; ConfigError is a subclass). Data
    of another model raises ModelMismatch (`load`). Both leave everything unchanged.

    Attributes:
        growth: slots by which a growing fragment extends its memory. The budget counts them as
            used. An engine that reserves more than this beyond `length` before `settle` exceeds its
            budget.
    """

    growth: int = 1

    @abstractmethod
    def new(self, parent: Fragment | None) -> Fragment:
        """Create an empty fragment whose path continues `parent` (None: at the root)."""

    @abstractmethod
    def split(self, fragment: Fragment, at: int) -> Fragment:
        """Cut before slot `at`. Return the new upper part; `fragment` becomes the lower part.

        Raises:
            ValueError: unless 0 < at < fragment.length.
        """

    @abstractmethod
    def join(self, upper: Fragment, lower: Fragment) -> None:
        """Move `upper`'s slots before those of `lower`. `upper` must not be used afterwards."""

    def attach(self, fragment: Fragment, parent: Fragment | None) -> None:
        """Record that the fragment's path now continues `parent`.

        Only engines that tag slots with sequences need it. The slots stay in place.
        """
        return None

    @abstractmethod
    def trim(self, fragment: Fragment, length: int) -> None:
        """Remove the slots from `length` on.

        Raises:
            ValueError: unless 0 <= length <= fragment.length.
        """

    @abstractmethod
    def settle(self, fragment: Fragment) -> None:
        """Release unused capacity of a fragment that will not grow soon."""

    @abstractmethod
    def free(self, fragment: Fragment) -> None:
        """Release all slots. The fragment must not be used afterwards."""

    @abstractmethod
    def export(self, fragment: Fragment) -> dict[str, NDArray[Any]]:
        """Copy the slots to host arrays that `load` of the same model accepts. Waits for launched
        steps.

        "k.{layer}" and "v.{layer}" for each of `n_layers` layers: [n_kv_heads, length, head_dim],
        keys as in the model's own cache. Their size is length * `kv_bytes_per_token` bytes. An
        array that the engine does not use has a last axis of size 0. Axis 1 is the slots: Weft cuts
        and joins there, and `load` accepts the parts.

        All other entries are texts, stored as text in files. "dtype" names the type of the numbers,
        as in `EngineInfo.dtype`. "bfloat16" is exported as uint16 bits; "float16/q8_0" means
        float16 keys and q8_0 values. The arrays share no memory with the fragment.
        """

    @abstractmethod
    def load(self, data: dict[str, NDArray[Any]], parent: Fragment | None) -> Fragment:
        """Create a fragment from exported arrays, at the position where they were exported.

        Raises:
            ModelMismatch: an array is missing, or its shape or dtype is not that of this model. The
                arrays may come from a file that another program wrote.
        """

    @abstractmethod
    def usage(self) -> Usage:
        """Return the KV memory in use."""


class Engine(NotPicklable, ABC, instead="load it again where it is to run"):
    """One loaded model.

    Attributes:
        info: properties of the engine and the model.
        fragments: its KV memory; None for hidden engines.
        native: its own generation loop, for hidden engines only; None if it has none.
    """

    info: EngineInfo
    fragments: Fragments | None
    native: EngineGenerator | None = None

    @classmethod
    def load(cls, *folder: Any, **options: Any) -> Engine:
        """Load the model in a folder (the only positional argument), for `weft.load(…,
        engine="name")`.

        The folder is in Transformers' format: config.json, safetensors, tokenizer files. A subclass
        declares the keyword options that it supports, or `**options`. Weft rejects options that the
        signature lacks before this call. Options:

        - `device`, `dtype`: "auto" or a name.
        - `n_ctx`: context length in tokens; None for the model's own.
        - `trust_remote_code`: True, or not given.
        - `progress`: callback with phase, done, total, note.
        - `kv_bytes`: KV budget, for engines that allocate it at load; None for "auto".
        - `n_seq_max`: number of paths, for engines that reserve them at load; None for "auto".
        - the entries of `engine_options`.

        Raises:
            ModelLoadError: files are missing or broken.
            Unsupported: the engine cannot run the model or dtype. This default always raises it:
                create such an engine yourself and pass it to `weft.LM(engine, tokenizer)`.
            ConfigError: an option is out of range.
        """
        raise Unsupported(
            f"{cls.__name__} does not load models; make one and give it to"
            " weft.LM(engine, tokenizer)"
        )

    @classmethod
    def check_supported(cls, folder: Path) -> None:
        """Check from config.json that this engine can run the model. Changes nothing.

        Weft calls it before it downloads weights, so the folder may hold nothing else.

        Raises:
            Unsupported: the engine cannot run the model.
        """

    @classmethod
    def adopt(cls, *model: Any, **options: Any) -> Engine:
        """Run a model that is already loaded by the engine's library (the only positional
        argument).

        The caller keeps ownership of the model. Options are keywords: `n_ctx` and the entries of
        `engine_options`.

        Raises:
            ConfigError: the object is not a model of the library.
            Unsupported: the engine cannot run it. This default always raises it.
        """
        raise Unsupported(f"{cls.__name__} takes no loaded models; give a folder or a file")

    @classmethod
    def backends(cls) -> str:
        """Return a description of the devices that the installed library supports; "" if there is
        none.

        `weft doctor` prints it, for libraries with builds for several kinds of devices.
        """
        return ""

    def tokenizer(self) -> Any:
        """Return the tokenizer that came with the model; None if the folder holds it as files.

        A `weft._core.tokens` Tokenizer, or an object that `weft.load` converts to one.
        """
        return None

    def check_folder(self, folder: Path) -> None:
        """Check an adopted model against the folder that its tokenizer came from.

        Raises:
            Unsupported: the library ignores a number of the folder's config.json.
        """
        return None

    def sampling_defaults(self) -> SamplingParams | ModelDefaults | None:
        """Return the sampling parameters stored with the model; None if there are none.

        For models without a generation_config.json file.
        """
        return None

    @abstractmethod
    def forward(self, rows: Sequence[Row]) -> Output:
        """Run all rows in one model call and append their slots to their `kv_out`.

        Rows of one call are independent, have the same adapter, and have different `kv_out`. On
        return, every `kv_out.length` has grown by the row's tokens. On an exception none has:
        compute all rows before you write one. With `async_scheduling`, errors may be raised by
        `Output.synchronize` instead.

        Raises:
            ForwardError, or another WeftError: a token id outside the vocabulary, a row that ends
                beyond `context_length` or does not fit its slots (`check_rows`), or a closed
                engine.
            Unsupported: an unknown adapter.
            KVFull: no memory for KV, with the number of slots that exist and that are missing.
            An error that `errors.is_out_of_memory` recognizes: no other memory.
        """

    def draw(self, rows: Sequence[RetainedRow], batch: DrawBatch) -> Draws:
        """Sample from retained logits, numbered as in `batch.rows`; see `Output.draw`.

        The rows may come from different outputs, or be host arrays (`HostLogits`). This default
        samples on the host.
        """
        return HostDraws(batch.on_host([row.logits() for row in rows]))

    def hidden_states(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Run rows as `forward` does. Return the inputs of the LM head: float32 [T, n_embd] per
        row.

        Raises:
            Unsupported: the engine has no hidden states. This default always raises it.
        """
        raise Unsupported(f"the {self.info.name} engine gives no hidden states (embed)")

    def library_array(self, array: NDArray[Any]) -> Any:
        """Convert a host array of KV to an array of the engine's library; NumPy by default.

        Args:
            array: floating point; bfloat16 is widened to float32.
        """
        return array

    def add_adapter(self, name: str, folder: Any) -> str:
        """Load a LoRA adapter for rows that name it. Return a fingerprint of its weights.

        Raises:
            Unsupported: the engine runs no adapters. This default always raises it.
            ConfigError, ModelLoadError: the adapter does not fit the model; nothing has changed.
        """
        raise Unsupported(
            f"the {self.info.name} engine runs no LoRA adapters",
            hint='weft.load(…, engine="torch") does',
        )

    def remove_adapter(self, name: str) -> None:
        """Release an adapter's memory. No row names it any more."""
        raise Unsupported(f"the {self.info.name} engine runs no LoRA adapters")

    def n_tokens_to_run(self, tokens: Sequence[int], first: int, adapter: str | None) -> int:
        """Return how many tokens of a full path a forward would run; they count against a step's
        budget.

        The scheduler calls it on engines with `no_prefix_cache` before each step that might run the
        path. The default is all tokens.

        Args:
            tokens: token ids of the path.
            first: index of the first token whose logits or scores are requested.
            adapter: name of the LoRA adapter, or None.
        """
        return len(tokens)

    def clear_caches(self) -> None:
        """Clear everything cached besides fragments; the caller knows that it is stale."""

    def refresh_weights(self) -> None:
        """Rebuild what was derived from weights after they changed in place. No KV is in use now.

        Memory reserved for KV may be kept: the next step follows soon.
        """
        self.clear_caches()

    def weights_version(self) -> object:
        """Return a value that changes when the weights change in place.

        The scheduler calls it before each burst of steps, so it must be cheap. Engines that own
        their weights return None.
        """
        return None

    def fingerprint(self) -> str:
        """Return the fingerprint of the current weights: `info.fingerprint` unless they have
        changed.
        """
        return self.info.fingerprint

    @abstractmethod
    def close(self) -> None:
        """Release the memory. Idempotent."""


class HostDraws:
    """Sampled tokens that are already on the host."""

    __slots__ = ("_result",)

    def __init__(self, result: DrawResult) -> None:
        self._result = result

    def result(self) -> DrawResult:
        """Return the tokens without waiting."""
        return self._result


class HostLogits(RetainedLogits):
    """Retained logits in host memory: read-only arrays, float32 [V]."""

    __slots__ = ("_rows", "n_bytes")

    def __init__(self, rows: Sequence[NDArray[np.float32]]) -> None:
        self._rows = rows
        self.n_bytes = sum([row.nbytes for row in rows])

    def logits(self, number: int) -> NDArray[np.float32]:
        """Return the array of entry `number`, shared, without waiting."""
        return self._rows[number]


class OutputLogits(RetainedLogits):
    """Retained logits that keep the full output of their step alive."""

    __slots__ = ("_indices", "_output", "n_bytes")

    def __init__(self, output: Output, indices: Sequence[int], n_bytes: int) -> None:
        self._output = output
        self._indices = indices
        self.n_bytes = n_bytes

    def logits(self, number: int) -> NDArray[np.float32]:
        """Return a copy of the logits of entry `number`: float32 [V]."""
        return self._output.logits(self._indices[number])


class HostOutput(Output):
    """Logits and scores in host memory.

    Args:
        logits: float32 [N, V], numbered as in `Output`. This object owns them.
        scores: one list per row, one `Score` per `ScoreSpan`. `sampling.metrics.score_span`
            computes a `Score` from a function that returns logits of tokens first … last - 1,
            row-local as in `ScoreSpan.start`.
    """

    __slots__ = ("_logits", "_scores")

    def __init__(self, logits: NDArray[np.float32], scores: list[list[Score]]) -> None:
        self._logits = logits
        self._scores = scores

    def synchronize(self) -> None:
        """Return at once: the step is already done."""

    def logits(self, index: int) -> NDArray[np.float32]:
        """Return a copy of logits `index`: float32 [V]."""
        return self._logits[index].copy()

    def retain(self, indices: Sequence[int]) -> RetainedLogits:
        """Retain the full output, or copies if fewer than half of its logits are needed."""
        if 2 * len(indices) < len(self._logits):
            return HostLogits([self.logits(index) for index in indices])
        return OutputLogits(self, indices, self._logits.nbytes)

    def scores(self) -> list[list[Score]]:
        """Return one list per row, one `Score` per `ScoreSpan`."""
        return self._scores

    def draw(self, batch: DrawBatch) -> HostDraws:
        """Sample with the NumPy reference sampler before returning."""
        return HostDraws(batch.on_host(self._logits))
