"""Error responses: OpenAI's error object, except where another system's API is served.

`weft._core.error_mapping` has the status and code of each error; this module adds what only HTTP
needs.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from ... import errors
from ..._core.error_mapping import map_error
from ...errors import WeftError
from ..api.base import RequestModel
from ..interchange.importers import NotTextError
from ..store.library import NameTaken
from .error_bodies import error_body

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

_log = logging.getLogger(__name__)
Json = dict[str, Any]


class RequestError(WeftError):
    """An error response that only HTTP has: a wrong key, body, parameter or time.

    Args:
        status: HTTP status.
        code: the error's code, for programs.
        message: the error's text, for people.
        param: the parameter at fault; None if there is none.
        hint: what the client can do.
        headers: headers of the response.
        details: further fields of the error object.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        hint: str = "",
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.details = dict(details or {})


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_INTERNAL = "internal error; the server's log has details under the request id"


def error_response(
    error: BaseException, request_id: str, path: str, names: Collection[str] = ()
) -> JSONResponse:
    """Return the response for an error.

    Unexpected errors are logged, and reported to the client without details.

    Args:
        path: the request's path, which decides the format.
        names: parameters of the request. If the error's message starts with one of them, it becomes
            the error's `param`.
    """
    status, body, headers = serialize_error(error, request_id)
    if body["param"] is None and isinstance(error, errors.ConfigError):
        body["param"] = _param_in_message(body["message"], names)
    if status >= 500 and not isinstance(error, WeftError):
        _log.error("request %s failed", request_id, exc_info=error)
    return JSONResponse(error_body(path, status, body), status, headers)


def serialize_error(error: BaseException, request_id: str = "") -> tuple[int, Json, dict[str, str]]:
    """Return the status, the error object and the headers for an error."""
    if isinstance(error, RequestValidationError):
        error = _from_validation_error(error)
    if isinstance(error, HTTPException):
        error = _from_http_exception(error)
    headers: dict[str, str] = {}
    param: str | None = getattr(error, "param", None)
    details: Json = {}
    if isinstance(error, RequestError):
        status, code, headers, details = error.status, error.code, error.headers, error.details
        kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    elif isinstance(error, WeftError) or errors.is_out_of_memory(error):
        outcome = map_error(error)
        status, kind, code = outcome.status, outcome.kind, outcome.code
        details = _error_details(error)
        if isinstance(error, errors.KVFull) and error.never_fits:  # clients would retry a 503
            status, kind = 400, "invalid_request_error"
    else:
        status, kind, code = 500, "server_error", "internal_error"
    if isinstance(error, errors.NotFound) and error.what:
        code = f"{error.what}_not_found"
    if isinstance(error, errors.Conflict):
        code = error.code
    if isinstance(error, NotTextError):
        code = "not_text"
    if isinstance(error, NameTaken):
        status, kind, code = 409, _KINDS[409], "name_taken"
        param = param or "name"
    if isinstance(error, errors.QueueFull):
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    elif status == 503:
        headers = {"Retry-After": "2", **headers}
    message = str(error) if isinstance(error, WeftError) else _INTERNAL
    if not isinstance(error, WeftError) and errors.is_out_of_memory(error):
        message = "out of memory"
    data: Json = {"message": message, "type": kind, "param": param, "code": code}
    if details:
        data["details"] = details
    if hint := getattr(error, "hint", ""):
        data["hint"] = hint
    if request_id:
        data["request_id"] = request_id
    return status, data, headers


def _param_in_message(message: str, names: Collection[str]) -> str | None:
    """Return the parameter that the message begins with, as in "n is 0; …"; None without one.

    names: the parameters of the request.
    """
    name, _, rest = message.partition(" ")
    return name if rest.startswith(("is ", "has ")) and name in names else None


def _error_details(error: BaseException) -> Json:
    """Return the error's own fields, such as the numbers of tokens of a ContextOverflow."""
    if isinstance(error, errors.ContextOverflow) and error.n_ctx:
        return {"n_prompt_tokens": error.n_tokens, "n_ctx": error.n_ctx}
    if isinstance(error, errors.KVFull) and error.capacity:
        return {"needed_tokens": error.needed, "capacity_tokens": error.capacity}
    if isinstance(error, errors.Conflict) and error.rev is not None:
        return {"rev": error.rev}
    return {}


def _from_validation_error(error: RequestValidationError) -> RequestError:
    """Return the error for the first field that FastAPI has rejected."""
    causes = _causes(error.errors())
    first, param = causes[0], _field_name(causes[0])
    code = "invalid_parameter"
    if first["type"] == "extra_forbidden":
        code, message = "unsupported_parameter", f"{param} is not a parameter of this call"
    elif first["type"] == "json_invalid":
        param, message = "", f"the body is not JSON: {first['msg']}"
    elif first["type"] == "missing":
        message = f"{param or 'the body'} is missing"
    elif isinstance(first.get("input"), bytes) and not param:
        message = "the body was not read as JSON: send it with Content-Type: application/json"
    else:
        given = first.get("input")
        shown = "" if isinstance(given, dict | list) else f" is {_as_json(given):.80}"
        # A field with several allowed types has one reason per type.
        reasons = list(dict.fromkeys(map(_reason, causes)))
        if all(reason.startswith("must be ") for reason in reasons):
            reasons = [reasons[0], *(reason.removeprefix("must be ") for reason in reasons[1:])]
        joined = " or ".join(reasons)
        must = joined.startswith("must ")
        separator = ("; it " if shown else " ") if must else ": "
        message = f"{param or 'the body'}{shown}{separator}{joined}"
    return RequestError(
        400, code, re.sub(r"[\ud800-\udfff]", "\ufffd", message), param=param or None
    )


def _causes(faults: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Select the validation errors that explain why a value is wrong. All are about one field.

    Pydantic reports errors for every member of a union. Errors of members for another type only say
    that the type differs, so they are left out if there are others. Of the rest, the deepest field
    is the one at fault.
    """
    place = _field_name(faults[0])
    nested = [
        fault
        for fault in faults
        if _field_name(fault) == place or (place and _field_name(fault).startswith(f"{place}."))
    ]
    causes = [fault for fault in nested if not _is_type_mismatch(fault)] or nested
    deepest = max((_field_name(fault) for fault in causes), key=lambda name: name.count("."))
    return [fault for fault in causes if _field_name(fault) == deepest]


def _is_type_mismatch(fault: Mapping[str, Any]) -> bool:
    """Return True for an error that only says that the value has another JSON type."""
    is_choice = fault["type"] == "literal_error" and isinstance(fault.get("input"), dict | list)
    return is_choice or fault["type"].endswith("_type")


# The reason of each of Pydantic's errors. {name} is a value of the error's context.
_REASONS: Mapping[str, str] = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "int_parsing_size": "must be a smaller integer",
    "int_type": "must be an integer",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be {le} or less",
    "list_type": "must be a list",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "none_required": "must be null",
    "string_pattern_mismatch": "must match the regular expression {pattern}",
    "string_type": "must be a string",
}
_NUMBERED = {
    "string_too_short": ("min_length", "character", "more"),
    "string_too_long": ("max_length", "character", "less"),
    "too_short": ("min_length", "entry", "more"),
    "too_long": ("max_length", "entry", "less"),
}


def _reason(fault: Mapping[str, Any]) -> str:
    """Return what a validation error requires of the value, such as "must be a string"."""
    kind, context = fault["type"], fault.get("ctx") or {}
    if kind == "literal_error":
        return f"must be {_expected(context['expected'])}"
    if kind in _NUMBERED:
        limit, unit, bound = _NUMBERED[kind]
        return _length_reason(context[limit], unit, bound)
    if (template := _REASONS.get(kind)) is not None:
        return template.format(**{name: _plain(value) for name, value in context.items()})
    message = str(fault["msg"]).removeprefix("Value error, ")
    return re.sub("^Input should ", "must ", message)


def _length_reason(n: int, unit: str, bound: str) -> str:
    """Return the requirement on a length. bound: "more" or "less"."""
    if n == 0:
        return "must be empty"
    units = unit if n == 1 else {"entry": "entries"}.get(unit, f"{unit}s")
    return f"must have {n} {units} or {bound}" if n > 1 or bound == "less" else "must not be empty"


def _expected(choices: str) -> str:
    """Return Pydantic's list of the allowed values with the values as JSON."""
    names = {"True": "true", "False": "false", "None": "null"}
    return re.sub(
        r"'([^']*)'|\b(True|False|None)\b",
        lambda match: names[match[2]] if match[2] else json.dumps(match[1], ensure_ascii=False),
        choices,
    )


def _plain(value: Any) -> Any:
    """Return a limit as people write it: 0 for 0.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_json(value: Any) -> str:
    """Return a value of a request as JSON."""
    return json.dumps(value, ensure_ascii=False, default=str)


@cache
def _native_field_names() -> frozenset[str]:
    """Return the names of all fields of native requests."""
    kinds: list[type[RequestModel]] = [RequestModel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return frozenset(name for kind in kinds for name in kind.model_fields)


_WHERE = ("body", "query", "path", "header")
# Pydantic's names of the union members it tried, which appear between field names.
_TRIED = re.compile(r"(?:str|int|float|bool|none|[A-Z]\w*|constrained-\w+|.*\[.*)")


def _field_name(error: Mapping[str, Any]) -> str:
    """Return the dotted path of the field that a validation error is about."""
    place = [str(part) for part in error["loc"] if part not in _WHERE]
    return ".".join(part for part in place if not _TRIED.fullmatch(part))


_APIS = (
    "OpenAI's API is below /v1 (POST /v1/chat/completions), Anthropic's is /v1/messages, Ollama's"
    " is below /api, Weft's below /api/v1"
)


def _from_http_exception(error: HTTPException) -> RequestError:
    """Convert an exception of Starlette, such as 404 or 405, to a RequestError."""
    codes = {404: "no_such_route", 405: "method_not_allowed", 413: "body_too_large"}
    code = codes.get(error.status_code, "invalid_request")
    message = {
        404: "no route matches this path",
        405: "this path does not support this method",
    }.get(error.status_code, _body_error(error.__cause__) or str(error.detail))
    hint = _APIS if error.status_code == 404 else ""
    return RequestError(error.status_code, code, message, headers=error.headers, hint=hint)


def _body_error(cause: BaseException | None) -> str:
    """Return the reason why a body could not be parsed; "" for other errors.

    cause: the exception behind FastAPI's error, which does not contain the reason.
    """
    if isinstance(cause, UnicodeDecodeError):
        reason = f"byte {cause.start} is not part of a character"
        return f"the body is not {cause.encoding.upper()}: {reason}; send JSON in UTF-8"
    if isinstance(cause, RecursionError):
        return "the body's JSON is nested too deeply"
    return ""


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def _methods(request: Request) -> list[str]:
    """Return all HTTP methods that the request's path supports, for the Allow header.

    Starlette reports only those of one route.
    """
    routes = request.app.router.routes
    scopes = ((method, {**request.scope, "method": method}) for method in _METHODS)
    return [
        method
        for method, scope in scopes
        if any(route.matches(scope)[0] is Match.FULL for route in routes)
    ]


def handle_errors(app: FastAPI) -> None:
    """Register exception handlers with the app, so that all errors have this module's format."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and error.status_code == 405:
            error.headers = {"Allow": ", ".join(_methods(request))}
        names = [*request.query_params, *_native_field_names()]
        request_id: str = request.scope.get("weft.request_id", "")
        return error_response(error, request_id, request.scope["path"], names)

    for kind in (WeftError, MemoryError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)
