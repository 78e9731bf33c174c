"""JSON that fits a schema, a Pydantic class or another Python type."""

from __future__ import annotations

import inspect
import json
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from ..errors import ConfigError, GrammarError, Unfinished
from .grammar import Choice, Grammar, check_depth, located_message
from .json_schema_gbnf import exact_gbnf
from .schema_lark import SchemaLark, schema_as_lark
from .schema_rules import JsonLayout, Whitespace


@dataclass(frozen=True, slots=True)
class JsonSchema(Grammar):
    """JSON that fits a schema. No object has a name twice.

    Args:
        schema: a mapping, JSON text, True, a Pydantic class or another Python type (`int`,
            `list[str]`, a dataclass, a TypedDict, …). For a function, the JSON is an object of its
            arguments. Kept as JSON text.
        whitespace: "compact": one space after `,` and `:`, and no other. "flexible": an optional
            space after `:`; after `,` and inside brackets nothing, a space, or a line end with at
            most 32 spaces or 32 tabs.
        open_objects: also allow unlisted properties where `properties` comes without
            `additionalProperties`, as the JSON Schema standard does.

    `parse` returns the data; for a type its object, for a function the arguments by name.
    Raises: GrammarError if the schema is no JSON; ConfigError for another `whitespace`.
    """

    schema: str
    whitespace: Whitespace = "compact"
    open_objects: bool = False
    reader: Callable[[str], Any] | None = field(default=None, compare=False, repr=False)

    def __init__(
        self, schema: Any, *, whitespace: Whitespace = "compact", open_objects: bool = False
    ) -> None:
        JsonLayout.from_whitespace(whitespace)
        reader = None
        if not isinstance(schema, str | Mapping | bool):
            schema, reader = _schema_and_parser(schema)
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(parsed, sort_keys=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise GrammarError(f"the JSON schema is not JSON: {error}") from error
        except RecursionError:
            raise GrammarError("the JSON schema is nested too deep") from None
        if not isinstance(parsed, Mapping | bool):
            raise GrammarError(f"the JSON schema is {text[:60]}; allowed is an object")
        object.__setattr__(self, "schema", text)
        object.__setattr__(self, "whitespace", whitespace)
        object.__setattr__(self, "open_objects", open_objects)
        object.__setattr__(self, "reader", reader)

    def grammar(self) -> str:
        """Return the schema's grammar in llguidance's form.

        Raises: GrammarError naming the unsupported part of the schema.
        """
        from llguidance import LLMatcher

        grammar: str = LLMatcher.grammar_from_lark(self._lark().text)
        return grammar

    def gbnf(self) -> str:
        """Return GBNF whose texts this constraint allows. Raises: GrammarError for what GBNF lacks.

        GBNF cannot express that the names of an object differ.
        """
        schema = json.loads(self.schema)
        return exact_gbnf(schema, self.whitespace, open_objects=self.open_objects)

    def _lark(self) -> SchemaLark:
        """Return the Lark grammar of the schema."""
        return _cached_lark(self.schema, self.whitespace, self.open_objects)

    def unique_names_after(self) -> str | None:
        """Return "" if an object may have arbitrary names; None otherwise."""
        return "" if self._lark().has_open_names else None

    def _error_message(self, message: str) -> str:
        """Return the library's message with the place in the schema instead of the Lark's line."""
        return located_message(message, [f"at {path}" for path in self._lark().paths])

    def parse(self, text: str) -> Any:
        """Return the data, or the object of the type that the schema describes.

        Raises: Unfinished if the text is not complete JSON, or the error of the type for its value.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise Unfinished(
                f"the text is not finished: {text[-40:]!r} does not end JSON of the schema;"
                " continue it, or grow it with a larger max_tokens"
            ) from error
        return data if self.reader is None else self.reader(text)

    def to_dict(self) -> dict[str, Any]:
        """Return `{"json_schema": schema}` and the options that are set, which `from_dict` reads.

        The Python type of a schema is left out, so `parse` of the copy returns data.
        """
        options: dict[str, Any] = {}
        if self.whitespace != "compact":
            options["whitespace"] = self.whitespace
        if self.open_objects:
            options["open_objects"] = True
        return {"json_schema": json.loads(self.schema), **options}


@lru_cache(maxsize=16)
def _cached_lark(schema: str, whitespace: Whitespace, open_objects: bool) -> SchemaLark:
    lark = schema_as_lark(json.loads(schema), whitespace=whitespace, open_objects=open_objects)
    check_depth("JSON schema", lark.text)
    return lark


def from_type(value: Any) -> Grammar | None:
    """Return the constraint for a Python type or function; None for any other value.

    A Literal or Enum of strings becomes a choice of these texts, without quotes.
    """
    if _is_function(value):
        return JsonSchema(value)
    texts = _choices_of_type(value)
    if texts is not None:
        return Choice(tuple(texts), values=texts)
    is_type = isinstance(value, type) or get_origin(value) is not None
    return JsonSchema(value) if is_type else None


def _choices_of_type(value: Any) -> dict[str, Any] | None:
    """Return the allowed texts of a Literal or Enum of strings, as text → value.

    The value is the string or the Enum's member. None for any other type.
    """
    if get_origin(value) is Literal:
        options = {one: one for one in value.__args__}
    elif isinstance(value, type) and issubclass(value, Enum):
        options = {member.value: member for member in value}
    else:
        return None
    return options if options and all(isinstance(text, str) and text for text in options) else None


def _is_function(value: object) -> bool:
    """Return True for a function or method."""
    return inspect.isfunction(value) or inspect.ismethod(value)


def _schema_and_parser(value: Any) -> tuple[Any, Callable[[str], Any]]:
    """Return the JSON schema of a type or function, and a function that parses its JSON."""
    from pydantic import PydanticUserError, TypeAdapter
    from pydantic.errors import PydanticSchemaGenerationError

    try:
        if _is_function(value):
            return _function_schema(value)
        adapter: TypeAdapter[Any] = TypeAdapter(_replace_typed_dicts(value))
        return adapter.json_schema(schema_generator=_generator()), adapter.validate_json
    except (PydanticUserError, PydanticSchemaGenerationError) as error:
        raise ConfigError(f"{value!r} has no JSON schema: {str(error).splitlines()[0]}") from error


@lru_cache(maxsize=1)
def _generator() -> Any:
    """Return a Pydantic schema generator that rejects types without a limiting JSON schema."""
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def complex_schema(self, schema: Any) -> Any:
            return self.handle_invalid_for_json_schema(schema, "complex numbers")

    return Generator


def _replace_typed_dicts(value: Any) -> Any:
    """Replace `typing.TypedDict` classes in a type: Pydantic rejects them before Python 3.12."""
    if sys.version_info >= (3, 12):
        return value
    from typing import NotRequired

    from typing_extensions import TypedDict

    if is_typeddict(value) and type(value).__module__ == "typing":
        hints = get_type_hints(value, include_extras=True)
        fields = {name: _replace_typed_dicts(hint) for name, hint in hints.items()}
        for name in value.__optional_keys__:
            if get_origin(hints[name]) not in (typing.NotRequired, typing.Required):
                fields[name] = NotRequired[fields[name]]
        return TypedDict(value.__name__, fields)  # type: ignore[operator]
    arguments = tuple(map(_replace_typed_dicts, get_args(value)))
    if arguments == get_args(value):
        return value
    origin: Any = get_origin(value)
    generic = Union if origin is UnionType else origin
    return generic[arguments[0] if len(arguments) == 1 else arguments]


def _function_schema(function: Callable[..., Any]) -> tuple[Any, Callable[[str], Any]]:
    """Return the JSON schema of a function's arguments, and a function that parses them."""
    from pydantic import create_model

    if _is_unbound_method(function):
        owner, _, name = function.__qualname__.rpartition(".")
        raise ConfigError(
            f"{owner}.{name} is a method without an object, so that `self` would be an argument;"
            f" allowed is a bound method. Give {owner.rpartition('.')[2]}(…).{name}"
        )
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(
                f"{function.__name__} takes *{name}; allowed are functions with named arguments"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints.get(name, Any), default)
    model = create_model(function.__name__, **fields)

    def read(text: str) -> dict[str, Any]:
        """Parse the JSON of the arguments: return them by name."""
        arguments = model.model_validate_json(text)
        return {name: getattr(arguments, name) for name in fields}

    return model.model_json_schema(schema_generator=_generator()), read


def _is_unbound_method(function: Callable[..., Any]) -> bool:
    """Return True for `Class.method`. A static method is also a plain function, without `self`."""
    path = function.__qualname__.rpartition("<locals>.")[2]
    first = next(iter(inspect.signature(function).parameters), None)
    return inspect.isfunction(function) and "." in path and first == "self"
