"""Constraints on an answer's text, in the fields of OpenAI, vLLM, llama-server and SGLang."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from ....constraints import GBNF, Choice, Constraint, JsonSchema, Lark, Regex
from ....constraints.tool_calls import TaggedJson, tagged_constraint
from ....errors import GrammarError
from .field_errors import check_field, invalid, unsupported
from .request_fields import OpenAIModel

if TYPE_CHECKING:
    from ....constraints.schema_rules import Whitespace
    from ....lm.chat import ChatPrompt
    from ....lm.lm import LM

Schema = dict[str, Any] | bool
SchemaOrText = dict[str, Any] | str
# Other servers treat these classes as ASCII; Rust's include the characters of all scripts.
_CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": r"[\x20\t\n\r\f\v]",
    "S": r"[^\x20\t\n\r\f\v]",
}
_LARK_START = re.compile(r"^\s*[?!]?start\s*(\[[^\]]*\]|\.-?\d+)?\s*:(?!:=)", re.M)


def _regex_constraint(pattern: str, _: Whitespace) -> Constraint:
    """Return the constraint for a regular expression, which the full text matches."""
    return Regex(re.sub(r"(?s)\\(.)", lambda escape: _CLASSES.get(escape[1], escape[0]), pattern))


def _grammar_constraint(text: str, _: Whitespace) -> Constraint:
    """Return the constraint for a grammar.

    As in vLLM, a text that defines a rule `start` is Lark; any other text is GBNF.
    """
    return Lark(text) if _LARK_START.search(text) else GBNF(text)


class TagStructure(OpenAIModel):
    """One structure of a structural tag: `begin`, JSON that fits `schema`, `end`."""

    begin: str
    schema_: Schema = Field(alias="schema")
    end: str


class StructuralTag(OpenAIModel):
    """A structural tag of vLLM and SGLang: free text, with structures that start at triggers."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: list[TagStructure]
    triggers: list[str]


def _tag_constraint(value: dict[str, Any] | str, _: Whitespace) -> Constraint:
    """Return the constraint for a structural tag of vLLM or SGLang."""
    try:
        tag = StructuralTag.model_validate(json.loads(value) if isinstance(value, str) else value)
    except ValidationError as error:
        (first, *_rest) = error.errors()
        place = ".".join(map(str, first["loc"]))
        raise GrammarError(f"{place or 'the structural tag'}: {first['msg']}") from error
    except ValueError as error:
        raise GrammarError(f"the structural tag is not JSON: {error}") from error
    tags = [TaggedJson(part.begin, part.schema_, part.end) for part in tag.structures]
    return tagged_constraint(tags, tag.triggers)


_KINDS: Mapping[str, Callable[[Any, Whitespace], Constraint]] = {
    "json": lambda schema, whitespace: JsonSchema(schema, whitespace=whitespace),
    "json_object": lambda _, whitespace: JsonSchema({"type": "object"}, whitespace=whitespace),
    "regex": _regex_constraint,
    "choice": lambda texts, _: Choice(texts),
    "grammar": _grammar_constraint,
    "structural_tag": _tag_constraint,
}
# The kind of each field that states one constraint. `structured_outputs` has a field per kind.
_FIELDS: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "grammar_string": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
_NEUTRAL: tuple[Any, ...] = (None, "", [], False)
_GRAMMAR = "GBNF, or Lark with a rule named `start`."
_REGEX = r"The full text matches it. Rust's syntax; `\d`, `\w` and `\s` are ASCII."


class NamedSchema(OpenAIModel):
    """A JSON schema with its name. `strict` is accepted: answers always fit."""

    name: str | None = Field(None, min_length=1)
    schema_: Schema | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


# The fields that a `response_format` may have, by its `type`.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", "schema"),
    "structural_tag": ("structures", "triggers"),
}


class ResponseFormat(OpenAIModel):
    """OpenAI's `response_format`, with the parts that other servers add."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    schema_: Schema | None = Field(
        None, alias="schema", description="The schema's place in llama-server and Together."
    )
    structures: list[TagStructure] | None = Field(None, description="Of a structural tag.")
    triggers: list[str] | None = Field(None, description="Of a structural tag.")

    def constraint(self) -> Constraint | None:
        """Return the constraint, None for free text. Raises: RequestError."""
        given = self.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        for part in given:
            if part not in _PARTS[self.type]:
                raise unsupported(
                    f"response_format.{part}", f'is not allowed with "type": "{self.type}"'
                )
        if self.type == "text":
            return None
        if self.type == "structural_tag":
            return check_field(
                "response_format", lambda: _tag_constraint(given, "flexible"), "invalid_grammar"
            )
        if self.type == "json_schema" and not given:
            raise invalid("response_format.json_schema", "response_format.json_schema is missing")
        if self.type == "json_schema" and len(given) > 1:
            raise invalid(
                "response_format.schema",
                "response_format.schema: not together with response_format.json_schema",
            )
        outer = given.get("json_schema", given)
        schema = outer.get("schema", {"type": "object"})
        return check_field("response_format", lambda: JsonSchema(schema, whitespace="flexible"))


class StructuredOutputs(OpenAIModel):
    """vLLM's `structured_outputs`: one constraint, and options."""

    json_: SchemaOrText | None = Field(None, alias="json", description="A schema, or its text.")
    json_object: bool | None = Field(None, description="true: any JSON object.")
    regex: str | None = Field(None, description=_REGEX)
    choice: list[str] | None = Field(None, description="The text is one of these.")
    grammar: str | None = Field(None, description=_GRAMMAR)
    structural_tag: SchemaOrText | None = Field(
        None, description="`structures` and `triggers`, or their JSON text."
    )
    whitespace_pattern: str | None = Field(None, description="Rejected.")
    disable_any_whitespace: bool | None = Field(
        None, description="true: JSON has one space after `,` and `:`, and no other."
    )
    disable_additional_properties: bool | None = Field(
        None, description="Accepted: objects with `properties` are always closed."
    )
    disable_fallback: bool | None = Field(None, description="Accepted: there is one backend.")


class TextConstraint(NamedTuple):
    """A constraint of the answer's text, and the request field that contains it.

    code: the error code of the response if the constraint is not valid.
    """

    param: str
    constraint: Constraint
    code: str = "invalid_json_schema"

    async def compile(self, lm: LM, prompt: ChatPrompt | None = None) -> Constraint:
        """Compile the constraint into the LM's cache, in a thread. Return the constraint itself.

        prompt: of a chat; None for a completion.

        Raises: RequestError for an invalid constraint, or for a prompt that ends inside the model's
        reasoning.
        """
        if prompt is not None and prompt.thinking_open:
            raise unsupported(
                self.param,
                "this chat template begins inside the model's reasoning, which the constraint"
                " would replace",
                hint='turn it off: "chat_template_kwargs": {"enable_thinking": false}',
            )
        create = partial(lm.constraints.matcher, self.constraint)
        await asyncio.to_thread(check_field, self.param, create, self.code)
        return self.constraint


class ConstraintFields(OpenAIModel):
    """The fields that constrain the text of an answer. A request states at most one constraint."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's constraints.")
    guided_json: SchemaOrText | None = Field(None, description="vLLM's, before 0.12.")
    guided_regex: str | None = Field(None, description=f"vLLM's, before 0.12. {_REGEX}")
    guided_choice: list[str] | None = Field(None, description="vLLM's, before 0.12.")
    guided_grammar: str | None = Field(None, description=f"vLLM's, before 0.12. {_GRAMMAR}")
    guided_whitespace_pattern: str | None = Field(None, description="Rejected.")
    guided_decoding_backend: str | None = Field(None, description="Accepted: there is one backend.")
    grammar: str | None = Field(None, description=f"llama-server's. {_GRAMMAR}")
    grammar_string: str | None = Field(None, description="text-generation-webui's `grammar`.")
    json_schema: SchemaOrText | None = Field(
        None, description="llama-server's schema, or SGLang's text of one."
    )
    regex: str | None = Field(None, description=f"SGLang's. {_REGEX}")
    ebnf: str | None = Field(None, description=f"SGLang's. {_GRAMMAR}")
    structural_tag: SchemaOrText | None = Field(
        None, description="vLLM's, before 0.12: `structures` and `triggers`, or their JSON text."
    )

    def text_constraint(self) -> TextConstraint | None:
        """Return the constraint of the text, None for free text. Raises: RequestError."""
        # Some clients, such as guidance, state one constraint in the fields of several servers.
        given = {form.constraint: form for form in reversed(list(self._text_constraints()))}
        if len(given) > 1:
            second, first = [form.param for form in given.values()][-2:]
            raise invalid(second, f"{first} and {second} exclude each other; give one constraint")
        return next(iter(given.values()), None)

    def _text_constraints(self) -> Iterator[TextConstraint]:
        """Yield the constraint of each field that has one."""
        form = None if self.response_format is None else self.response_format.constraint()
        if form is not None:
            yield TextConstraint("response_format", form)
        _reject_whitespace_pattern("guided_whitespace_pattern", self.guided_whitespace_pattern)
        for param, kind in _FIELDS.items():
            yield from _field_constraint(param, kind, getattr(self, param), "flexible")
        options = self.structured_outputs
        if options is None:
            return
        _reject_whitespace_pattern(
            "structured_outputs.whitespace_pattern", options.whitespace_pattern
        )
        whitespace: Whitespace = "compact" if options.disable_any_whitespace else "flexible"
        for kind, value in options.model_dump(by_alias=True).items():
            yield from _field_constraint(f"structured_outputs.{kind}", kind, value, whitespace)


def _reject_whitespace_pattern(param: str, pattern: str | None) -> None:
    """Raise RequestError for vLLM's `whitespace_pattern`, which is not supported."""
    if pattern:
        raise unsupported(
            param,
            "patterns of whitespace are not supported; leave it out, or use"
            ' "structured_outputs": {"disable_any_whitespace": true}',
        )


def _field_constraint(
    param: str, kind: str, value: Any, whitespace: Whitespace
) -> Iterator[TextConstraint]:
    """Yield the constraint of one request field.

    Nothing is yielded for a neutral value, and for fields that are options of a constraint.
    param: the field's path in the request. kind: the kind of constraint that it contains.
    """
    create = _KINDS.get(kind)
    if create is not None and value not in _NEUTRAL:
        code = "invalid_json_schema" if kind == "json" else "invalid_grammar"
        constraint = check_field(param, lambda: create(value, whitespace), code)
        yield TextConstraint(param, constraint, code)
