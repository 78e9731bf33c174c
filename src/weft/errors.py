"""Every error Weft raises on purpose.

WeftError
├── ConfigError [ValueError]
├── EngineError
│   ├── EngineUnavailable [ImportError]
│   ├── ModelLoadError
│   ├── Unsupported [NotImplementedError]
│   └── ForwardError
├── CapacityError
│   ├── KVFull
│   └── ContextOverflow [ValueError]
├── TreeError
│   ├── StaleHandle
│   ├── HasChildren
│   ├── NotAChild [ValueError]
│   └── Terminal
├── ConstraintError
│   ├── GrammarError [ValueError]
│   ├── Unfinished [ValueError]
│   └── DeadEnd
├── StoreError
│   ├── FormatError
│   ├── ModelMismatch
│   └── LeaseLost
├── NotFound [LookupError]
├── Conflict
├── QueueFull
├── Unreachable [ConnectionError]
└── Cancelled
    └── BatchAbandoned [RuntimeError]

The built-in in brackets is a second parent, so callers may catch either. A message says what was
wrong, what is allowed and what to do. `hint` is the last part, for interfaces that show it apart.
A hint that the message does not contain is also a note of the exception, so tracebacks show it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


class PromptWarning(UserWarning):
    """A prompt is unusual for the model, which makes its answers worse without an error."""


class WeftError(Exception):
    """Base of all errors that Weft raises on purpose; `hint` says what to do next."""

    hint: str = ""

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message)
        if hint:
            self.hint = hint
            if hint not in message:
                self.add_note(f"hint: {hint}")


class ConfigError(WeftError, ValueError):
    """An argument is outside what is allowed."""


class EngineError(WeftError):
    """An engine could not do what was asked."""


class EngineUnavailable(EngineError, ImportError):
    """The engine's package is not installed; the message names the extra to install."""


class ModelLoadError(EngineError):
    """The model's files are missing, broken or do not belong together."""


class Unsupported(EngineError, NotImplementedError):
    """This engine or model cannot do it; the message names the capability."""


class ForwardError(EngineError):
    """A model call failed; every ticket of that step gets it, nothing of the step is kept."""


class CapacityError(WeftError):
    """Something does not fit."""


class KVFull(CapacityError):
    """A path does not fit in the KV budget even alone; `needed` and `capacity` are in slots.

    never_fits: nor would it with nothing beside it, so that to try again later is of no use.
    """

    def __init__(
        self,
        message: str = "",
        *,
        needed: int = 0,
        capacity: int = 0,
        never_fits: bool = False,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.needed = needed
        self.capacity = capacity
        self.never_fits = never_fits


class ContextOverflow(CapacityError, ValueError):
    """A path is longer than the model's context; `n_tokens` and `n_ctx` carry both numbers."""

    def __init__(
        self, message: str = "", *, n_tokens: int = 0, n_ctx: int = 0, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.n_tokens = n_tokens
        self.n_ctx = n_ctx


class TreeError(WeftError):
    """A tree operation is not possible on this node."""


class StaleHandle(TreeError):
    """The handle was used after close, prune or removal."""


class HasChildren(TreeError):
    """A node with children was to be pruned alone."""


class NotAChild(TreeError, ValueError):
    """The node is not a child of the node that it is to be removed from."""


class Terminal(TreeError):
    """The node ended with an end token and cannot be grown (`force=True` grows it anyway)."""


class ConstraintError(WeftError):
    """A constraint cannot be built or followed."""


class GrammarError(ConstraintError, ValueError):
    """The grammar is not valid; the message gives line and reason."""


class Unfinished(ConstraintError, ValueError):
    """The text breaks off before it is what its constraint says: grow it on."""


class DeadEnd(ConstraintError):
    """No token is legal here.

    token_ids: the path that it came after. branches: those of a call of many that have no token;
    `branch` is the first of them, None where none was there.
    """

    def __init__(
        self,
        message: str = "",
        *,
        token_ids: Sequence[int] = (),
        branches: Sequence[Any] = (),
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.token_ids = tuple(token_ids)
        self.branches = tuple(branches)

    @property
    def branch(self) -> Any:
        """The first of `branches`, or None."""
        return self.branches[0] if self.branches else None


class StoreError(WeftError):
    """A loom could not be read or written."""


class FormatError(StoreError):
    """The file is not a loom, is broken, or has a newer format version."""


class ModelMismatch(StoreError):
    """What was saved is of another model, or KV of another dtype than the model's here."""


class StoreUnavailable(StoreError):
    """The database cannot be used just now: it is locked, full, broken or away."""


class LeaseLost(StoreError):
    """Another process has taken over the loom; what was grown here meanwhile is not kept."""


class NotFound(WeftError, LookupError):
    """There is no such thing; `what` it is: a "loom", "node", "model", "job", …"""

    def __init__(self, message: str = "", *, what: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.what = what


class Conflict(WeftError):
    """Somebody else has changed it, or works on it; `rev` is its revision now, if it has one.

    `code` names the reason in answers of the server.
    """

    def __init__(
        self,
        message: str = "",
        *,
        rev: int | None = None,
        code: str = "revision_mismatch",
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.rev = rev
        self.code = code


class QueueFull(WeftError):
    """There is more work than is taken; `retry_after_s` says when to try again."""

    def __init__(self, message: str = "", *, retry_after_s: float = 1.0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class Unreachable(WeftError, ConnectionError):
    """No server answers at that address, or it went away in the middle of an answer."""


class Cancelled(WeftError):
    """The work was cancelled before it ended."""


class BatchAbandoned(Cancelled, RuntimeError):
    """The batch this work belonged to was given up."""


_NO_MEMORY = (
    *("can't allocate memory", "out of memory", "_ALLOC_FAILED"),
    "can't start new thread",
    *("malloc] Attempting to allocate", "] Unable to allocate"),  # MLX
)
_NO_CODE = "could not create a primitive"  # oneDNN; a "primitive descriptor" it does not know
_CAUSES = 100  # of an error that are looked at: there may be a circle


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that there is no memory: Python's, CUDA's, or that
    of PyTorch on a CPU, of a library or of Triton, which is a RuntimeError like any other.
    """
    cause: BaseException | None = error
    for _ in range(_CAUSES):
        if cause is None:
            return False
        said = str(cause) if isinstance(cause, RuntimeError) else ""
        is_told = said.endswith(_NO_CODE) or any(each in said for each in _NO_MEMORY)
        if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError" or is_told:
            return True
        cause = cause.__cause__
    return False
