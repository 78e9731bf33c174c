"""What was drawn last in a terminal."""

from __future__ import annotations

from pydantic import Field

from .base import RequestModel, ResponseModel


class LastLoom(ResponseModel):
    """The loom drawn last in a terminal, and the node read there."""

    loom: str | None = Field(default=None, description="A name; null: none, or it is gone.")
    node: int = Field(default=0, description="The number of the node read last.")
    anybodys: str | None = Field(
        default=None, description="The loom drawn last in any terminal, else changed last."
    )


class SetLastLoom(RequestModel):
    """What was drawn just now."""

    loom: str = Field(max_length=300, description="A name or id.")
    node: int = Field(default=0, ge=0, lt=2**31, description="The number of the node read.")
