"""The engine protocol: one model, its KV fragments, one model call a step.

An engine runs rows and owns the KV bytes. It knows nothing of trees, queues, handles or text. The
scheduler is the only caller, from one thread at a time; an engine needs no lock.

What a row sees::

    path spans (root → tip)          kv_out (present slots)        row.tokens
    ├──────── shared, read-only ─────┤├── own tail, if any ──────┤├── new, causal ──┤
    0                                                            row.position

Fragments hold the KV of consecutive tokens of one path. Slots are valid only at the position where
they were written. `split` and `join` change how slots are grouped, never what a forward computes.

Any call may raise, for want of memory, say. One that raises has changed nothing: no fragment's
length, no slot of another one. The work that met it fails; `trim` and `free` are tried again later.

Concrete engines import this module, `weft._core.tokens`, `weft._core.sampling` and
`weft.errors`; never kv, sched or lm.
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
    """What an engine is and can do; fixed for its life.

    model: what it was loaded from; `weft.load` puts the name there that was asked for.
    dtype: of the KV, as `export` marks it ("float32", "bfloat16", "q8_0", …); without fragments,
    what the model computes in.
    fingerprint: the name of the weights: two engines have the same one if and only if they compute
    the same function, up to rounding. Saved trees and branches say by it whose they are, and open
    in any dtype and on any device, which are no part of it. Exported KV is interchangeable, and
    logits are as good as equal, where the dtype is the same, too: a file of KV says both.
    n_vocab: ids are 0 to n_vocab - 1; 0, of engines without steps alone: they are of no table, and
    the tokenizer knows which there are. context_length: the context length in tokens;
    UNKNOWN_CONTEXT_LENGTH if nothing states it; the engine then rejects paths that are too long.
    kv: "addressable" (fragments, any number), "sequence" (fragments, at most `max_paths` resident
    leaves) or "hidden" (no fragments: rows carry whole paths in `tokens`).
    kv_bytes_per_token: bytes of one slot over all layers; 0 when hidden. kv_slots: how many were
    allocated at load, of engines that cannot allocate more later; None: as many as the budget has.
    no_prefix_cache: hidden only: no prefixes are kept between forwards, so a row costs its whole
    path
    and is counted so in a step's budget. A row of another hidden engine counts as its new tokens.
    caches_state: it recomputes, but a run or a branch that goes on counts as its new tokens, and of
    other paths the engine says how much it would run (`n_tokens_to_run`).
    async_scheduling: `forward` returns before the result is there, and accepts `FutureTokens` of
    the step
    before. The scheduler then calls forward(k + 1), lands step k, and draws of step k + 1 last, so
    what it draws with knows every token before.
    idle_slots: slots of unpinned KV that stay on the device; the scheduler moves the rest to the
    host. For engines whose forwards take time for every slot in use. None: all stay.
    max_num_batched_tokens: tokens that a forward may run at most, where the next tokens of runs
    and commits do
    not count against the `n_batch` of an LM: as many of them as this step in each forward, and up
    to `n_batch` others beside them. None: an LM's `n_batch` is the bound of all.
    same_thread_only: every call must come from the thread that made the first one.
    logits_on_device: rows that `Output.retain` gives lie on a device of their own, where their
    log-probabilities are found sooner than on the host: see `RetainedLogits.logprobs`.
    n_embd: numbers in a hidden state; 0 where the engine gives none. pooling: how the model's own
    files say that they become a text's vector ("mean", "cls", "last"); None: they do not say.
    capabilities: what it can do with this model. temperature_first: its native runs divide by the
    temperature before they filter; the LM's own defaults then say so, too. own_random: they draw by
    random numbers of the library's: a seed gives the same text again there, and not the one that
    Weft's samplers draw by it.
    extra: whatever else there is to say. Weft reads "free_bytes" alone, the device memory that is
    free after loading: a KV budget of "auto" is a part of it.

    Raises: ConfigError for a `kv` that is none of these, for `no_prefix_cache` with another, and
    for `max_num_batched_tokens` of none.
    """

    name: str
    model: str
    n_layers: int  # that have KV of their own, where there are fragments
    n_vocab: int
    context_length: int
    kv_bytes_per_token: int
    dtype: str
    fingerprint: str
    device: str = "cpu"
    kv: KVKind = "addressable"
    max_paths: int | None = None
    kv_slots: int | None = None
    idle_slots: int | None = None
    no_prefix_cache: bool = False
    caches_state: bool = False
    async_scheduling: bool = False
    max_num_batched_tokens: int | None = None
    same_thread_only: bool = False
    logits_on_device: bool = False
    n_embd: int = 0
    pooling: Pooling | None = None
    capabilities: Capabilities = Capabilities()
    temperature_first: bool = False
    own_random: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

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
    """KV slots of consecutive tokens, `length` of them; engines subclass it."""

    __slots__ = ("length",)

    def __init__(self, length: int = 0) -> None:
        self.length = length


class Span(NamedTuple):
    """The first `length` slots of a fragment."""

    fragment: Fragment
    length: int


class FutureTokens(NamedTuple):
    """One token that a launched step drew and the host has not seen: entry `number` of `draws`.

    draws: the very object that `Output.draw` of this engine gave. Those of one forward all name the
    same one, in any order; other rows of that forward may have tokens that the host knows. Where
    nothing could be drawn (an id below 0) the run ends: any token will do then.
    """

    draws: Draws
    number: int


class ScoreSpan(NamedTuple):
    """Ask how likely given tokens are.

    start: row-local index of the token whose logits score targets[0]; targets[i] is scored at start
    + i.
    top: also give the `top` likeliest ids at every position (0: none).
    """

    start: int
    targets: tuple[int, ...]
    top: int = 0


@dataclass(slots=True)
class Score:
    """Answer to a ScoreSpan of n targets, from raw logits, full vocabulary, natural log.

    logprobs, entropies: float32 [n]; ranks: int64 [n], 0 = likeliest; top_ids int64 [n, top],
    top_logprobs float32 [n, top], likeliest first, ties by lower id. An engine without steps may
    leave entropies and ranks out.
    """

    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32] | None
    ranks: NDArray[np.int64] | None
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float32]


class Row:
    """One cursor's share of a step. The scheduler may reuse the object for its next step.

    prefix: spans from the root, `length` slots of each, in order. Rows from one place share the
    same tuple object, so an engine may group by identity.
    tokens: ids to run, at least one; FutureTokens (exactly one token) only for engines that say
    `async_scheduling`. Hidden engines: the whole path.
    position: absolute position of tokens[0] (0 for hidden engines).
    kv_out: receives the new slots; may already hold some, which the row sees after its path. None:
    nothing is written, the slots live for this call only.
    logits_at: row-local indices, ascending, whose logits are wanted.
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
        return 1 if isinstance(self.tokens, FutureTokens) else len(self.tokens)


def check_rows(rows: Sequence[Row]) -> None:
    """Refuse rows whose places, wanted tokens and scored tokens do not fit their tokens.

    For engines with fragments, before a forward; what they ask of ids, adapters and the end of the
    context they check themselves.

    Raises: ForwardError.
    """
    lengths: dict[int, int] = {}  # by the identity of the path
    for row in rows:
        if id(row.prefix) not in lengths:
            lengths[id(row.prefix)] = sum([span.length for span in row.prefix])
            for fragment, length in row.prefix:
                if length > fragment.length:
                    raise ForwardError(
                        f"a path wants {length} slots of a fragment of {fragment.length}"
                    )
        n_tokens = row.n_tokens
        n_before = lengths[id(row.prefix)] + (0 if row.kv_out is None else row.kv_out.length)
        if n_tokens < 1:
            raise ForwardError("a row has no tokens; it needs at least one")
        if row.position != n_before:
            raise ForwardError(f"a row starts at position {row.position} after {n_before} slots")
        for at in row.logits_at:
            if not 0 <= at < n_tokens:
                wrong = f"logits_at {row.logits_at} lies outside a row of {n_tokens} tokens"
                raise ForwardError(wrong)
        for span in row.scores:
            if span.start < 0 or span.start + len(span.targets) > n_tokens:
                raise ForwardError(f"{span} lies outside a row of {n_tokens} tokens")


def row_tokens(row: Row, info: EngineInfo) -> Sequence[int]:
    """Return the ids that a row runs; waits for those that are drawn late.

    Raises: ContextOverflow beyond the context, ConfigError for an id outside of the vocabulary.
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
    """Tokens drawn by a step, perhaps still on their way to the host."""

    def result(self) -> DrawResult:
        """Wait for the draws and return them. Raises ForwardError if the step failed."""
        ...


class RetainedLogits(ABC):
    """Logits rows that outlive their step, where they were computed. See `Output.retain`.

    n_bytes: what they hold there.
    """

    n_bytes: int

    @abstractmethod
    def logits(self, number: int) -> NDArray[np.float32]:
        """Raw logits on the host, of entry `number` of the indices: float32 [V], not to be written.

        Waits. Any thread may call, also while a step runs.
        """

    def logprobs(self, number: int, *, on_host: bool) -> Any:
        """Log-probabilities of entry `number`: float32 [V], nats, the caller's own.

        Of engines with `logits_on_device` alone. on_host: an array; else a tensor of the engine's
        library, left on its device. Waits for what comes to the host. Any thread may call.
        """
        raise Unsupported("rows of this engine have their log-probabilities found on the host")


class RetainedRow(NamedTuple):
    """One of some kept rows."""

    rows: RetainedLogits
    number: int

    def logits(self) -> NDArray[np.float32]:
        """Return the row on the host: float32 [V], not to be written to. Waits."""
        return self.rows.logits(self.number)


class Output(ABC):
    """What one forward gives. Logits rows are numbered in row order, then `logits_at` order."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until the step is done. Raises whatever made it fail."""

    @abstractmethod
    def logits(self, index: int) -> NDArray[np.float32]:
        """Raw logits row `index` on the host: float32 [V], the caller's own copy. Waits."""

    def retain(self, indices: Sequence[int]) -> RetainedLogits:
        """Keep logits rows `indices` for later, without this output.

        Where they lie on a device they stay there, and come to the host one by one, when somebody
        reads. The scheduler asks once a step, after it has landed. Copies them to the host, unless
        the engine says otherwise: right for every engine, and dear where rows are large.
        """
        return HostLogits([self.logits(index) for index in indices])

    @abstractmethod
    def scores(self) -> list[list[Score]]:
        """One list a row, one Score a ScoreSpan. Waits."""

    @abstractmethod
    def draw(self, batch: DrawBatch) -> Draws:
        """Draw tokens from this step's logits rows, numbered as in `batch.rows`; does not wait.

        Called after the forward, several times where several parts draw. The host has seen all that
        the batch's samplers drew before: their counts and constraints are up to date, also where
        the rows ran `FutureTokens`, and change only once these draws have landed.
        """


class Usage(NamedTuple):
    """slots: slots that hold tokens; bytes: bytes allocated for KV now, spare room included."""

    slots: int
    bytes: int


class Fragments(ABC):
    """The KV memory of an engine. Everything but `export` and `usage` changes it.

    growth: slots that a growing fragment takes at a time; the budget counts them as its own. An
    engine that takes more than that beyond `length`, before `settle`, outgrows its budget.

    A cut that is not on the fragment is a ValueError (`split`, `trim`; ConfigError is one), data of
    another model a ModelMismatch (`load`); both have changed nothing.
    """

    growth: int = 1

    @abstractmethod
    def new(self, parent: Fragment | None) -> Fragment:
        """Make an empty fragment whose path continues `parent` (None: at the root)."""

    @abstractmethod
    def split(self, fragment: Fragment, at: int) -> Fragment:
        """Cut before slot `at`: return the new upper part; `fragment` is the lower now.

        Raises: ValueError unless 0 < at < fragment.length.
        """

    @abstractmethod
    def join(self, upper: Fragment, lower: Fragment) -> None:
        """Put `upper`'s slots before `lower`'s; `upper` is gone, `lower` is the whole."""

    def attach(self, fragment: Fragment, parent: Fragment | None) -> None:
        """Take note that the fragment's path continues `parent` now, wherever it was made.

        Only engines that tag paths care; the slots stay where they are.
        """
        return None

    @abstractmethod
    def trim(self, fragment: Fragment, length: int) -> None:
        """Forget the slots from `length` on. Raises: ValueError unless 0 <= length <= the held."""

    @abstractmethod
    def settle(self, fragment: Fragment) -> None:
        """The fragment will not grow soon: give spare room back."""

    @abstractmethod
    def free(self, fragment: Fragment) -> None:
        """Give all slots back; the fragment must not be used again."""

    @abstractmethod
    def export(self, fragment: Fragment) -> dict[str, NDArray[Any]]:
        """Copy the slots to host arrays that `load` of the same model accepts.

        "k.{layer}" and "v.{layer}" for every one of `n_layers`: [n_kv_heads, length, head_dim],
        keys as the model's own cache has them; together length * `kv_bytes_per_token` bytes. A
        kind that the engine has no use for has a last axis of 0. Axis 1 is the slots: Weft cuts and
        joins fragments there, and what it cut is loaded too. Arrays of other names are marks,
        texts about the whole, and files keep them as text; "dtype" is that of the numbers
        ("bfloat16" comes as uint16 bits; "float16/q8_0": that of keys, then that of values), as
        `EngineInfo.dtype` has it. Nothing done to the arrays or the fragment later changes the
        other. Waits for launched steps.
        """

    @abstractmethod
    def load(self, data: dict[str, NDArray[Any]], parent: Fragment | None) -> Fragment:
        """Make a fragment from exported arrays, at the position where they were exported.

        Raises: ModelMismatch for arrays missing, or of another shape or dtype than this model's:
        they may come from a file that somebody else wrote.
        """

    @abstractmethod
    def usage(self) -> Usage:
        """What is held now."""


class Engine(NotPicklable, ABC, instead="load it again where it is to run"):
    """One loaded model.

    fragments: its KV memory; None for hidden engines. native: its own generation loop, of hidden
    engines only; None where it has none.
    """

    info: EngineInfo
    fragments: Fragments | None
    native: EngineGenerator | None = None

    @classmethod
    def load(cls, *folder: Any, **options: Any) -> Engine:
        """Load the model in a folder, the one argument by place: for `weft.load(…, engine="name")`.

        It is in Transformers' format: config.json, safetensors, tokenizer files. Options come by
        keyword: `device` and `dtype` ("auto" or a name), `n_ctx` (None: the model's own),
        `trust_remote_code` (True, or left out), `progress` (called with phase, done, total, note),
        `kv_bytes` and `n_seq_max` (the KV budget and the paths asked for, None for "auto": for
        engines that make room for them at once) and what `engine_options` holds. Take those that
        mean something, or `**options`. What somebody asked for and the signature lacks is refused
        before this is called.

        Raises: ModelLoadError for files that are missing or broken, Unsupported for a model or
        dtype that it cannot run, ConfigError for an option out of range; Unsupported by default:
        such an engine is made by hand, and given to `weft.LM(engine, tokenizer)`.
        """
        raise Unsupported(
            f"{cls.__name__} does not load models; make one and give it to"
            " weft.LM(engine, tokenizer)"
        )

    @classmethod
    def check_supported(cls, folder: Path) -> None:
        """Raise Unsupported for a model that this engine cannot run, as far as config.json shows.

        Asked before the weights are fetched: the folder may hold nothing else. Changes nothing.
        """

    @classmethod
    def adopt(cls, *model: Any, **options: Any) -> Engine:
        """Run a loaded model of the engine's library, the one argument by place.

        It stays its owner's. Options come by keyword: `n_ctx` and what `engine_options` holds.

        Raises: ConfigError for an object that is no model of the library, Unsupported for one that
        it cannot run; Unsupported by default.
        """
        raise Unsupported(f"{cls.__name__} takes no loaded models; give a folder or a file")

    @classmethod
    def backends(cls) -> str:
        """Return in words what the installed library can run on; "": nothing to add.

        For `weft doctor`; where it has builds for several kinds of devices.
        """
        return ""

    def tokenizer(self) -> Any:
        """Return the tokenizer that came with the model; None: it lies beside it as files.

        A `weft._core.tokens` Tokenizer, or an object that `weft.load` takes as one.
        """
        return None

    def check_folder(self, folder: Path) -> None:
        """Check an adopted model against the folder that its tokenizer came from.

        Raises: Unsupported if the library ignores a number of its config.json.
        """
        return None

    def sampling_defaults(self) -> SamplingParams | ModelDefaults | None:
        """Return the model's own sampling; None if its files name none.

        For models that come without a generation_config.json file.
        """
        return None

    @abstractmethod
    def forward(self, rows: Sequence[Row]) -> Output:
        """Run all rows in one model call and append their slots to their `kv_out`.

        Rows of one call never depend on each other, all have the same adapter, and no two share a
        `kv_out`. On return every `kv_out.length` has grown by the row's tokens; on an exception
        none has, so compute all rows before writing one. One that overlaps may raise from
        `Output.synchronize`.

        Raises: ForwardError, or another WeftError, for a token id outside the vocabulary, a row
        that ends beyond `context_length` or does not fit its slots (`check_rows`), and once closed;
        Unsupported for an unknown adapter. KVFull where there is no memory for KV, with the slots
        that there are and lack; one that `errors.is_out_of_memory` knows for other memory.
        """

    def draw(self, rows: Sequence[RetainedRow], batch: DrawBatch) -> Draws:
        """Draw from rows that were kept, numbered as in `batch.rows`; else as `Output.draw`.

        They may be of any outputs, or be host arrays (`HostLogits`). Draws on the host, unless the
        engine says otherwise.
        """
        return HostDraws(batch.on_host([row.logits() for row in rows]))

    def hidden_states(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Run rows as `forward` does; return what the head would see: float32 [T, n_embd] a row.

        Raises: Unsupported, unless the engine says otherwise.
        """
        raise Unsupported(f"the {self.info.name} engine gives no hidden states (embed)")

    def library_array(self, array: NDArray[Any]) -> Any:
        """Return a host array of KV as callers who use the engine's library expect it.

        array: float, bfloat16 widened to float32. NumPy's own unless the engine says otherwise.
        """
        return array

    def add_adapter(self, name: str, folder: Any) -> str:
        """Load a LoRA adapter for rows that name it; return a fingerprint of what it computes.

        Raises: Unsupported, unless the engine says otherwise; ConfigError, ModelLoadError for one
        that does not fit, changing nothing.
        """
        raise Unsupported(
            f"the {self.info.name} engine runs no LoRA adapters",
            hint='weft.load(…, engine="torch") does',
        )

    def remove_adapter(self, name: str) -> None:
        """Give an adapter's memory back; no row names it any more."""
        raise Unsupported(f"the {self.info.name} engine runs no LoRA adapters")

    def n_tokens_to_run(self, tokens: Sequence[int], first: int, adapter: str | None) -> int:
        """Return how many tokens of a whole path a forward would run: what it counts in a step.

        first: index of the first token whose logits or scores are asked for. Asked of engines that
        recompute, before each step that might run the path; all of it by default.
        """
        return len(tokens)

    def clear_caches(self) -> None:
        """Forget what is kept of paths beside fragments: somebody knows that it is stale."""

    def refresh_weights(self) -> None:
        """Make anew what was made of weights, as they were changed in place; no KV is held now.

        Memory that is kept for more KV may stay, as the next call is near.
        """
        self.clear_caches()

    def weights_version(self) -> object:
        """Return what is another value once somebody has changed the weights in place.

        Asked before each burst of steps: cheap. Engines with weights of their own say None.
        """
        return None

    def fingerprint(self) -> str:
        """Return the name of the weights as they are now: `info.fingerprint`, as long as nobody
        has changed them.
        """
        return self.info.fingerprint

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; idempotent."""


class HostDraws:
    """Draws that are there at once."""

    __slots__ = ("_result",)

    def __init__(self, result: DrawResult) -> None:
        self._result = result

    def result(self) -> DrawResult:
        """Return the draws; never waits."""
        return self._result


class HostLogits(RetainedLogits):
    """Kept rows in host memory: arrays, float32 [V] each, not to be written to any more."""

    __slots__ = ("_rows", "n_bytes")

    def __init__(self, rows: Sequence[NDArray[np.float32]]) -> None:
        self._rows = rows
        self.n_bytes = sum([row.nbytes for row in rows])

    def logits(self, number: int) -> NDArray[np.float32]:
        """Return a row, shared: float32 [V]; never waits."""
        return self._rows[number]


class OutputLogits(RetainedLogits):
    """Kept rows in the output of their step, all of which they hold."""

    __slots__ = ("_indices", "_output", "n_bytes")

    def __init__(self, output: Output, indices: Sequence[int], n_bytes: int) -> None:
        self._output = output
        self._indices = indices
        self.n_bytes = n_bytes

    def logits(self, number: int) -> NDArray[np.float32]:
        """Return a copy of a row: float32 [V]."""
        return self._output.logits(self._indices[number])


class HostOutput(Output):
    """Logits and scores in host memory.

    logits: float32 [N, V], rows in the order that `Output` numbers them; owned by this object.
    scores: one list a row, one Score a ScoreSpan; `sampling.metrics.score_span` makes one from a
    function that gives logits of the row's tokens first … last - 1, row-local as `ScoreSpan.start`.
    """

    __slots__ = ("_logits", "_scores")

    def __init__(self, logits: NDArray[np.float32], scores: list[list[Score]]) -> None:
        self._logits = logits
        self._scores = scores

    def synchronize(self) -> None:
        """Return at once: the step was done before this object was made."""

    def logits(self, index: int) -> NDArray[np.float32]:
        """Return a copy of logits row `index`: float32 [V]."""
        return self._logits[index].copy()

    def retain(self, indices: Sequence[int]) -> RetainedLogits:
        """Keep all of it, or copies where most of it would be kept for a few."""
        if 2 * len(indices) < len(self._logits):
            return HostLogits([self.logits(index) for index in indices])
        return OutputLogits(self, indices, self._logits.nbytes)

    def scores(self) -> list[list[Score]]:
        """Return one list a row, one Score a ScoreSpan."""
        return self._scores

    def draw(self, batch: DrawBatch) -> HostDraws:
        """Draw with the NumPy reference sampler; done on return."""
        return HostDraws(batch.on_host(self._logits))
