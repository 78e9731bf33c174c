"""The loom shown last in a terminal."""

from __future__ import annotations

from pydantic import Field

from .base import RequestModel, ResponseModel


class LastLoom(ResponseModel):
    """The loom shown last in a terminal, and the node read last."""

    loom: str | None = Field(default=None, description="The loom's name; null: none, or removed.")
    node: int = Field(default=0, description="The number of the node read last.")
    anybodys: str | None = Field(
        default=None, description="The loom shown last in any terminal, else changed last."
    )


class SetLastLoom(RequestModel):
    """The loom that a terminal has shown, and the node that was read."""

    loom: str = Field(max_length=300, description="A name or id.")
    node: int = Field(default=0, ge=0, lt=2**31, description="The number of the node read.")
