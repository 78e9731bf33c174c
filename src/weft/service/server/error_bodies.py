"""Error bodies, in the form of the API that a request's path belongs to."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_ANTHROPIC = "/v1/messages"
# By status; Anthropic's SDKs choose the class of an exception by the status, not by this type.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """Return True for paths of Anthropic's API."""
    return path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/")


def _is_ollama(path: str) -> bool:
    """Return True for paths of Ollama's API."""
    return path.startswith("/api/") and not path.startswith("/api/v1/")


def error_body(path: str, status: int, error: Json) -> Json:
    """Return the body of an error response, in the format of the API that serves the path.

    error: OpenAI's error object, with Weft's fields.
    """
    if is_anthropic(path):
        kind = "invalid_request_error" if status < 500 else "api_error"
        data = {**error, "type": _ANTHROPIC_TYPES.get(status, kind)}
        if error["code"] == "context_length_exceeded" and (size := error.get("details")):
            # Clients match this wording to shorten the conversation.
            data["message"] = (
                f"prompt is too long: {size['n_prompt_tokens']} tokens > {size['n_ctx']} maximum"
            )
        return {"type": "error", "error": data, "request_id": error.get("request_id")}
    if _is_ollama(path):
        return {"error": "; ".join(filter(None, (error["message"], error.get("hint"))))}
    return {"error": error}
