"""Mapping of errors to exit codes, HTTP statuses, OpenAI error types and codes, and hints.

Exit codes: 0 ok · 1 failure · 2 usage · 3 model or engine unavailable · 4 out of memory · 130
interrupted
"""

from __future__ import annotations

from typing import NamedTuple

from .. import errors

FAILURE, USAGE, UNAVAILABLE, MEMORY, INTERRUPTED = 1, 2, 3, 4, 130
CLIENT_GONE = 499  # the client has disconnected; appears only in the log


class ErrorMapping(NamedTuple):
    """Translation of one error class to an exit code, an HTTP status and an OpenAI error.

    exit_code: of the command.

    status: of the HTTP response.

    kind, code: OpenAI's `type` and `code`.

    hint: the command's, if the error has none.

    overrides_hint: use it even if the error has one, as that names arguments of the library. A
    server shows the error's own.
    """

    exit_code: int
    status: int
    kind: str
    code: str
    hint: str = ""
    overrides_hint: bool = False


_DOCTOR = "weft doctor lists installed packages, and which package each feature needs"
_SMALLER = (
    "use fewer branches, a shorter prompt, or a larger --kv-budget"
    " (docs/troubleshooting.md#out-of-memory)"
)
_OPTIONS = "weft {verb} --help lists the options"
_REQUEST, _SERVER = "invalid_request_error", "server_error"
_CONFLICT, _BUSY, _NEVER = "conflict_error", "unavailable_error", "not_supported_error"

# The most specific class of an error in this table counts.
ERROR_MAPPINGS: dict[type[BaseException], ErrorMapping] = {
    errors.WeftError: ErrorMapping(FAILURE, 500, _SERVER, "internal_error"),
    errors.ConfigError: ErrorMapping(USAGE, 400, _REQUEST, "invalid_parameter", _OPTIONS),
    errors.EngineError: ErrorMapping(UNAVAILABLE, 500, _SERVER, "engine_error", _DOCTOR),
    errors.EngineUnavailable: ErrorMapping(UNAVAILABLE, 501, _NEVER, "engine_unavailable", _DOCTOR),
    errors.ModelLoadError: ErrorMapping(UNAVAILABLE, 400, _REQUEST, "model_not_loadable"),
    errors.Unsupported: ErrorMapping(UNAVAILABLE, 501, _NEVER, "unsupported_by_engine", _DOCTOR),
    errors.ForwardError: ErrorMapping(
        FAILURE, 500, _SERVER, "engine_error", "weft doctor runs the embedded model as a check"
    ),
    errors.CapacityError: ErrorMapping(MEMORY, 503, _BUSY, "out_of_memory", _SMALLER, True),
    errors.KVFull: ErrorMapping(MEMORY, 503, _BUSY, "kv_out_of_memory", _SMALLER, True),
    errors.ContextOverflow: ErrorMapping(
        USAGE,
        400,
        _REQUEST,
        "context_length_exceeded",
        "shorten the prompt, or take a model that holds more",
        True,
    ),
    errors.TreeError: ErrorMapping(FAILURE, 409, _CONFLICT, "not_possible_here"),
    errors.StaleHandle: ErrorMapping(FAILURE, 503, _BUSY, "model_unloaded"),
    errors.HasChildren: ErrorMapping(FAILURE, 409, _CONFLICT, "has_children"),
    errors.NotAChild: ErrorMapping(FAILURE, 409, _CONFLICT, "not_a_child"),
    errors.Terminal: ErrorMapping(FAILURE, 409, _CONFLICT, "node_ended"),
    errors.ConstraintError: ErrorMapping(FAILURE, 422, _REQUEST, "constraint_failed"),
    errors.GrammarError: ErrorMapping(USAGE, 422, _REQUEST, "invalid_constraint"),
    errors.Unfinished: ErrorMapping(FAILURE, 422, _REQUEST, "unfinished"),
    errors.DeadEnd: ErrorMapping(FAILURE, 422, _REQUEST, "no_legal_token"),
    errors.StoreError: ErrorMapping(FAILURE, 500, _SERVER, "store_error"),
    errors.StoreUnavailable: ErrorMapping(FAILURE, 503, _BUSY, "store_unavailable"),
    errors.FormatError: ErrorMapping(FAILURE, 400, _REQUEST, "unknown_format"),
    errors.ModelMismatch: ErrorMapping(
        FAILURE, 409, _CONFLICT, "model_mismatch", "use the model that created the loom"
    ),
    errors.LeaseLost: ErrorMapping(FAILURE, 409, _CONFLICT, "lease_lost", "try again"),
    errors.NotFound: ErrorMapping(
        FAILURE, 404, "not_found_error", "not_found", "weft ls lists looms"
    ),
    errors.Conflict: ErrorMapping(
        FAILURE, 409, _CONFLICT, "revision_mismatch", "read it again, then retry"
    ),
    errors.QueueFull: ErrorMapping(
        FAILURE, 429, "rate_limit_error", "queue_full", "try again later"
    ),
    errors.Unreachable: ErrorMapping(
        UNAVAILABLE, 503, _BUSY, "server_unreachable", "weft serve starts a server"
    ),
    errors.Cancelled: ErrorMapping(INTERRUPTED, CLIENT_GONE, _REQUEST, "cancelled"),
    errors.BatchAbandoned: ErrorMapping(FAILURE, 503, _BUSY, "batch_abandoned", "try again"),
    MemoryError: ErrorMapping(MEMORY, 503, _BUSY, "out_of_memory", _SMALLER),
}


def map_error(error: BaseException) -> ErrorMapping:
    """Return the mapping of this error."""
    if errors.is_out_of_memory(error):
        return ERROR_MAPPINGS[MemoryError]
    return next(ERROR_MAPPINGS[kind] for kind in type(error).__mro__ if kind in ERROR_MAPPINGS)
