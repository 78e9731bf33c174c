"""What all requests and replies share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Json = dict[str, Any]


class Asked(BaseModel):
    """A request: what is not known in it is refused by name, never ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Reply(BaseModel):
    """A reply. A later server may tell more."""

    model_config = ConfigDict(extra="ignore")


class ErrorDetail(Reply):
    """What went wrong. `message`, `type`, `param` and `code` are OpenAI's fields."""

    message: str = Field(description="What was wrong, what is allowed and what to do.")
    type: str = Field(description="The kind of error, as invalid_request_error.")
    code: str = Field(description="The error, as node_not_found.")
    param: str | None = Field(
        default=None, description="The parameter that is wrong, where it is one."
    )
    details: Json = Field(default_factory=dict, description="Figures, as n_ctx or the revision.")
    hint: str = Field(default="", description="What to do.")
    request_id: str = Field(
        default="", description="The request, for who looks into the server's log."
    )


class ErrorReply(Reply):
    """The body of every reply that is not 2xx."""

    error: ErrorDetail
