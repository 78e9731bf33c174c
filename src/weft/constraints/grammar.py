"""Grammars, matched by llguidance: JSON schemas, regular expressions, Lark, GBNF, choices."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ConstraintError, GrammarError
from .base import Constraint, Matcher

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .compiler import Compiler

_LINE = re.compile(r"line (\d+)|at (\d+)\(\d+\)|^(\d+)[:(]")


class Grammar(Constraint):
    """A constraint that llguidance matches."""

    @abstractmethod
    def grammar(self) -> str:
        """Return llguidance's own form. Raises: GrammarError."""

    def compile(self, compiler: Compiler) -> Matcher:
        """See `Constraint.compile`."""
        from llguidance import LLMatcher

        try:
            text = self.grammar()
        except GrammarError:
            raise
        except ValueError as error:  # the library's, for what it cannot read at all
            raise GrammarError(f"{self._what()} is not valid: {told(str(error))}") from error
        is_error, messages = LLMatcher.validate_grammar_with_warnings(text, compiler.guidance)
        if is_error:
            raise GrammarError(f"{self._what()} is not valid: {told(messages[0])}")
        matcher = LLMatcher(compiler.guidance, text, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"{self._what()} is not valid: {told(matcher.get_error())}")
        return GrammarMatcher(matcher, compiler.text.stop_ids)

    def _what(self) -> str:
        return f"the {type(self).__name__}"


@dataclass(frozen=True, slots=True)
class JsonSchema(Grammar):
    """JSON that fits a schema, without spaces beyond one after `,` and `:`.

    schema: a mapping, JSON text, or a Pydantic class; kept as text. `parse` gives what the text
    stands for, for a Pydantic class its object.
    """

    schema: str
    model: Any = field(default=None, compare=False, repr=False)

    def __init__(self, schema: Any) -> None:
        model = schema if is_pydantic(schema) else None
        try:
            given = schema.model_json_schema() if model is not None else schema
            parsed = json.loads(given) if isinstance(given, str) else given
            text = json.dumps(parsed, sort_keys=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"the JSON schema is not JSON: {error}") from error
        if not isinstance(parsed, Mapping | bool):
            raise GrammarError(f"the JSON schema is {text[:60]}; allowed is an object")
        object.__setattr__(self, "schema", text)
        object.__setattr__(self, "model", model)

    def grammar(self) -> str:
        """See `Grammar.grammar`."""
        from llguidance import LLMatcher

        form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        made: str = LLMatcher.grammar_from_json_schema(self.schema, defaults=form)  # type: ignore[arg-type]
        return made

    def parse(self, text: str) -> Any:
        """See `Constraint.parse`."""
        return json.loads(text) if self.model is None else self.model.model_validate_json(text)

    def to_dict(self) -> dict[str, Any]:
        """See `Constraint.to_dict`."""
        return {"json_schema": json.loads(self.schema)}


@dataclass(frozen=True, slots=True)
class Regex(Grammar):
    """Text that a regular expression matches from beginning to end."""

    pattern: str

    def __init__(self, pattern: str | re.Pattern[str]) -> None:
        text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
        object.__setattr__(self, "pattern", checked_text("a regular expression", text))

    def grammar(self) -> str:
        """See `Grammar.grammar`."""
        from llguidance import LLMatcher

        made: str = LLMatcher.grammar_from_regex(self.pattern)
        return made

    def to_dict(self) -> dict[str, Any]:
        """See `Constraint.to_dict`."""
        return {"regex": self.pattern}


@dataclass(frozen=True, slots=True)
class Lark(Grammar):
    """Text of a grammar in llguidance's Lark."""

    text: str

    def __post_init__(self) -> None:
        checked_text("a Lark grammar", self.text)

    def grammar(self) -> str:
        """See `Grammar.grammar`."""
        from llguidance import LLMatcher

        made: str = LLMatcher.grammar_from_lark(self.text)
        return made

    def to_dict(self) -> dict[str, Any]:
        """See `Constraint.to_dict`."""
        return {"lark": self.text}


@dataclass(frozen=True, slots=True)
class GBNF(Grammar):
    """Text of a grammar in the BNF of llama.cpp; it begins at `root`."""

    text: str

    def __post_init__(self) -> None:
        checked_text("a GBNF grammar", self.text)

    def grammar(self) -> str:
        """See `Grammar.grammar`."""
        from llguidance import LLMatcher, gbnf_to_lark

        try:
            lark = gbnf_to_lark.gbnf_to_lark(self.text)
        except Exception as error:  # the converter has no error class of its own
            raise GrammarError(f"the GBNF is not valid: {told(str(error))}") from error
        made: str = LLMatcher.grammar_from_lark(lark)
        return made

    def to_dict(self) -> dict[str, Any]:
        """See `Constraint.to_dict`."""
        return {"gbnf": self.text}


@dataclass(frozen=True, slots=True)
class Choice(Grammar):
    """One of some texts."""

    texts: tuple[str, ...]

    def __init__(self, texts: Sequence[str]) -> None:
        given = () if isinstance(texts, str) else tuple(texts)
        if not given or not all(isinstance(text, str) and text for text in given):
            raise ConfigError(f"Choice is of {texts!r}; allowed are one or more non-empty strings")
        object.__setattr__(self, "texts", given)

    def grammar(self) -> str:
        """See `Grammar.grammar`."""
        from llguidance import LLMatcher

        options = " | ".join(json.dumps(text, ensure_ascii=False) for text in self.texts)
        made: str = LLMatcher.grammar_from_lark(f"start: {options}")
        return made

    def to_dict(self) -> dict[str, Any]:
        """See `Constraint.to_dict`."""
        return {"choice": list(self.texts)}


class GrammarMatcher(Matcher):
    """An llguidance matcher."""

    __slots__ = ("_ends", "inner")

    def __init__(self, inner: Any, ends: frozenset[int]) -> None:
        self.inner = inner
        self._ends = ends

    def fill(self, bits: NDArray[np.int32]) -> None:
        """See `Matcher.fill`."""
        self.inner.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def accept(self, token: int) -> None:
        """See `Matcher.accept`."""
        if not self.is_allowed(token):
            raise ConstraintError(f"the grammar does not allow token {token} here")
        if not self.inner.is_stopped():
            self.inner.consume_token(token)

    def is_allowed(self, token: int) -> bool:
        """See `Matcher.is_allowed`."""
        if token in self._ends:
            return bool(self.inner.is_accepting())
        return bool(self.inner.validate_tokens([token]) == 1)

    def forced(self) -> list[int]:
        """See `Matcher.forced`."""
        return [] if self.inner.is_stopped() else list(self.inner.compute_ff_tokens())

    @property
    def may_end(self) -> bool:
        """See `Matcher.may_end`."""
        return bool(self.inner.is_accepting())

    @property
    def must_end(self) -> bool:
        """See `Matcher.must_end`."""
        return bool(self.inner.is_stopped())

    def clone(self) -> GrammarMatcher:
        """See `Matcher.clone`."""
        return GrammarMatcher(self.inner.deep_copy(), self._ends)


def checked_text(what: str, text: object) -> str:
    """Return a text, or refuse what is none."""
    if not isinstance(text, str) or not text.strip():
        raise GrammarError(f"{what} is {text!r}; allowed is a text that is not empty")
    return text


def is_pydantic(value: object) -> bool:
    """Whether a value is a Pydantic class."""
    return isinstance(value, type) and callable(getattr(value, "model_json_schema", None))


def told(message: str) -> str:
    """Return a library's message on one line, the line of the grammar first if it is named."""
    text = " ".join(message.split())
    found = _LINE.search(text)
    if found is None or text.startswith("line "):
        return text
    return f"line {next(filter(None, found.groups()))}: {text}"
