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
│   ├── LeaseLost
│   └── StoreUnavailable
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
    """An engine could not run the work."""


class EngineUnavailable(EngineError, ImportError):
    """The engine cannot run: its package or, at load, its server is missing or broken."""


class ModelLoadError(EngineError):
    """The model's files are missing, broken or do not belong together."""


class Unsupported(EngineError, NotImplementedError):
    """The engine or model does not support this; the message names the capability."""


class ForwardError(EngineError):
    """A model call failed. All its callers get this error; the step has no effect."""


class CapacityError(WeftError):
    """A request exceeds a memory budget or the model's context."""


_FREE_SLOTS = "use shorter or fewer paths (docs/troubleshooting.md#out-of-memory)"


class KVFull(CapacityError):
    """The KV budget has no room for a path, or for all paths of one `BranchStore` call.

    Other paths were already evicted or preempted where that was possible.

    Attributes:
        needed, capacity: numbers of slots.
        hint: names the page about memory, unless the caller gives another one.
        never_fits: True if it would not fit in an empty budget either, so retrying is useless.
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
        super().__init__(message, hint=hint or _FREE_SLOTS)
        self.needed = needed
        self.capacity = capacity
        self.never_fits = never_fits


class ContextOverflow(CapacityError, ValueError):
    """A path is longer than the model's context.

    n_tokens: its length. n_ctx: the context length.
    """

    def __init__(
        self, message: str = "", *, n_tokens: int = 0, n_ctx: int = 0, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.n_tokens = n_tokens
        self.n_ctx = n_ctx


class TreeError(WeftError):
    """A node or branch does not allow this operation."""


class StaleHandle(TreeError):
    """An LM, node or branch was used after it was closed, removed or pruned."""


class HasChildren(TreeError):
    """A node with children cannot be pruned alone."""


class NotAChild(TreeError, ValueError):
    """`remove_child` got a node that is not a child."""


class Terminal(TreeError):
    """An end token or a complete constraint ended the node (`force=True` grows it anyway)."""


class ConstraintError(WeftError):
    """A constraint cannot be built or followed."""


class GrammarError(ConstraintError, ValueError):
    """The grammar is not valid; the message gives line and reason."""


class Unfinished(ConstraintError, ValueError):
    """The text ends before its constraint is complete; grow it further."""


class DeadEnd(ConstraintError):
    """No token is allowed.

    Attributes:
        token_ids: the path before it.
        branches: the branches of the call without an allowed token; `branch` is the first, or None.
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
    """The saved data belongs to another model, or the KV has another dtype than the model."""


class StoreUnavailable(StoreError):
    """The database cannot be used now: it is locked, full, broken or unreachable."""


class LeaseLost(StoreError):
    """Another process has taken over the loom; growth of this process since then is lost."""


class NotFound(WeftError, LookupError):
    """The object does not exist. `what` is its kind: "loom", "node", "model", "job", …"""

    def __init__(self, message: str = "", *, what: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.what = what


class Conflict(WeftError):
    """Another client has changed the object that you edit, or is working on it.

    rev: its current revision, or None. code: the reason, in responses of the server.
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
    """The server has too much work; retry after `retry_after_s` seconds."""

    def __init__(self, message: str = "", *, retry_after_s: float = 1.0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class Unreachable(WeftError, ConnectionError):
    """No Weft server answers the client or command, or the connection broke during a response."""


class Cancelled(WeftError):
    """The work was cancelled before it ended."""


class BatchAbandoned(Cancelled, RuntimeError):
    """`reset_async_queries` cancelled the query."""


_NO_MEMORY = (
    *("can't allocate memory", "out of memory", "_ALLOC_FAILED"),
    "can't start new thread",
    *("malloc] Attempting to allocate", "] Unable to allocate"),  # MLX
)
_NO_CODE = "could not create a primitive"  # oneDNN; a "primitive descriptor" it does not know
_CAUSES = 100  # maximum number of causes to inspect; a chain may be circular


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error, or one of its causes, means that memory is exhausted.

    It may come from Python, CUDA, PyTorch on a CPU, a library, or Triton, partly as a plain
    RuntimeError.
    """
    cause: BaseException | None = error
    for _ in range(_CAUSES):
        if cause is None:
            return False
        message = str(cause) if isinstance(cause, RuntimeError) else ""
        if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":
            return True
        if message.endswith(_NO_CODE) or any(text in message for text in _NO_MEMORY):
            return True
        cause = cause.__cause__
    return False
