"""The form that an answer must have: free text, a JSON object, or JSON of a schema."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field

from ...constraints import JsonSchema
from .fields import OpenAIModel
from .refusals import named, unsupported

if TYPE_CHECKING:
    from ...chat import ChatPrompt
    from ...constraints.base import Constraint
    from ...lm import LM


class NamedSchema(OpenAIModel):
    """A JSON schema with its name. `strict` is taken: answers always fit here."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: str = Field(min_length=1)
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(OpenAIModel):
    """As chat completions are asked for a form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def constraint(self) -> Constraint | None:
        """Return what makes the text fit. Raises: Refused."""
        if self.type == "json_schema" and self.json_schema is None:
            raise unsupported("response_format.json_schema", "is missing")
        schema = None if self.json_schema is None else self.json_schema.schema_
        return json_constraint("response_format", self.type, schema)


def json_constraint(param: str, kind: str, schema: Any) -> Constraint | None:
    """Return the constraint of a `response_format` by its type; JSON whitespace is flexible."""
    if kind == "text":
        return None
    if kind == "json_object" or schema is None:
        return JsonSchema({"type": "object"}, whitespace="flexible")
    return named(param, lambda: JsonSchema(schema, whitespace="flexible"))


async def compiled(
    lm: LM, constraint: Constraint | None, param: str, prompt: ChatPrompt | None = None
) -> Constraint | None:
    """Compile a constraint beside the loop, and return it. Raises: Refused for one that is none."""
    if constraint is None:
        return None
    if prompt is not None and prompt.thinking_open:
        raise unsupported(
            param,
            "this chat template begins inside the model's reasoning, which JSON would replace",
            hint='turn it off: "chat_template_kwargs": {"enable_thinking": false}',
        )
    await asyncio.to_thread(named, param, lambda: lm.constraints.matcher(constraint))
    return constraint
