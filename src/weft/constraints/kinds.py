"""Token sets and lazy constraints, and conversion of user values and JSON to constraints."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ConstraintError, FormatError, GrammarError
from .base import Constraint, Matcher, n_words
from .grammar import GBNF, Choice, Grammar, Lark, Prefixed, Regex
from .json_schema import JsonSchema, from_type
from .regex_translate import prefix_pattern

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .base import Compiler


@dataclass(frozen=True, slots=True)
class Allow(Constraint):
    """Allow only some tokens, in any order, and the end tokens.

    ids: the allowed token ids.
    """

    ids: frozenset[int]

    def __init__(self, ids: Iterable[int]) -> None:
        given = frozenset(ids)
        if not given or not all(type(each) is int and each >= 0 for each in given):
            raise ConfigError(f"Allow is of {sorted(given, key=str)!r}; allowed are token ids")
        object.__setattr__(self, "ids", given)

    def compile(self, compiler: Compiler) -> Matcher:
        """Return a matcher with one fixed mask of the ids and the end tokens.

        Raises: ConfigError for a token id outside the vocabulary.
        """
        import numpy as np

        outside = [each for each in self.ids if each >= compiler.n_vocab]
        if outside:
            raise ConfigError(
                f"token id {outside[0]} in Allow; allowed are 0 to {compiler.n_vocab - 1}"
            )
        allowed = np.zeros(n_words(compiler.n_vocab) * 32, dtype=np.uint8)
        ids = self.ids | compiler.stop_ids
        allowed[list(ids)] = 1
        bits = np.packbits(allowed, bitorder="little").view(np.int32)
        return AllowMatcher(ids, bits)

    def to_dict(self) -> dict[str, Any]:
        """Return `{"allow": [ids]}`, which `from_dict` reads."""
        return {"allow": sorted(self.ids)}


class AllowMatcher(Matcher):
    """Matcher of `Allow`: one fixed mask. It has no state, so all generations share it."""

    __slots__ = ("bits", "ids")

    def __init__(self, ids: frozenset[int], bits: NDArray[np.int32]) -> None:
        self.ids = ids
        self.bits = bits

    def fill(
        self,
        bits: NDArray[np.int32],
        banned: Set[int] = frozenset(),
        biased: Set[int] = frozenset(),
    ) -> None:
        bits[:] = self.bits

    def accept(self, token: int) -> None:
        if token not in self.ids:
            raise ConstraintError(f"token {token} is not among the {len(self.ids)} allowed ones")

    def is_allowed(self, token: int) -> bool:
        return token in self.ids

    @property
    def may_end(self) -> bool:
        return True

    @property
    def must_end(self) -> bool:
        return False

    def clone(self) -> AllowMatcher:
        return self


_WINDOW = 4096  # bytes of a text that a trigger may have, until its last token
_KEPT = 256  # beginnings of triggers whose masks are kept


@dataclass(frozen=True, slots=True)
class Lazy(Constraint):
    """Any text until a trigger; from the trigger's start on, the text must match the constraint.

    triggers: a word (str), a pattern (`re.compile`; searched, with its flags), or a token id (int).
    The trigger's text is the start of the grammar's text, as in tool calls: "<tool_call>" and what
    follows. A token that completes a trigger and continues with text that the grammar forbids is
    not drawn.
    """

    constraint: Constraint
    triggers: tuple[str | re.Pattern[str] | int, ...]

    def __init__(self, constraint: Any, triggers: Sequence[str | re.Pattern[str] | int]) -> None:

        inner = as_constraint(constraint)
        given = () if isinstance(triggers, str) else tuple(triggers)
        if not given or not all(map(_is_trigger, given)):
            raise ConfigError(
                f"triggers are {triggers!r}; allowed are words, re.compile patterns of text that is"
                " not empty, and token ids"
            )
        object.__setattr__(self, "constraint", inner)
        object.__setattr__(self, "triggers", given)

    def compile(self, compiler: Compiler) -> Matcher:
        """See `Constraint.compile`.

        Raises: GrammarError for a word that no text of the grammar starts with.

        Cost: one search in each token's text per distinct prefix of a trigger. Patterns with
        look-around or anchors are searched in each step.
        """
        return LazyMatcher(Triggers(compiler, self), None)

    def parse(self, text: str) -> Any:
        """Return the text itself, because free text precedes the trigger."""
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return `{"lazy": data, "triggers": [triggers]}`, which `from_dict` reads."""
        triggers = [
            {"pattern": each.pattern, "flags": each.flags} if isinstance(each, re.Pattern) else each
            for each in self.triggers
        ]
        return {"lazy": self.constraint.to_dict(), "triggers": triggers}


def _is_trigger(value: object) -> bool:
    """Return True for a valid trigger: a word, a pattern that does not match "", or a token id."""
    if isinstance(value, re.Pattern):
        return isinstance(value.pattern, str) and value.match("") is None
    return (isinstance(value, str) and bool(value)) or (type(value) is int and value >= 0)


class Triggers:
    """The triggers of a lazy constraint for one tokenizer; its matchers share this object.

    `begun` in its methods: the end of the text so far, as bytes, if it may be the start of a
    trigger; else b"". The methods ignore triggers that are token ids: `LazyMatcher` handles these.
    """

    def __init__(self, compiler: Compiler, lazy: Lazy) -> None:
        self.compiler = compiler
        self.inner = compiler.matcher(lazy.constraint)
        self.tokens = frozenset(each for each in lazy.triggers if isinstance(each, int))
        self._words = [each.encode() for each in lazy.triggers if isinstance(each, str)]
        self._patterns = [each for each in lazy.triggers if isinstance(each, re.Pattern)]
        self._prefix_patterns = [prefix_pattern(each) for each in self._patterns]
        self._forbidden: OrderedDict[bytes, NDArray[np.int32]] = OrderedDict()
        table = compiler.text.vocab_bytes[: compiler.n_vocab]
        self._spelled = [*table, *[b""] * (compiler.n_vocab - len(table))]
        self._check()

    def _check(self) -> None:
        """Raise GrammarError for a word or token trigger with which no text of the grammar starts.

        Patterns cannot be checked.
        """
        for word in self._words:
            if not self.takes(word):
                raise GrammarError(
                    f"the trigger {word.decode()!r} can come, but the grammar cannot begin with it:"
                    " a grammar that is switched on by a trigger begins with the trigger's own text"
                )
        n_vocab = self.compiler.n_vocab
        for token in self.tokens:
            if token >= n_vocab:
                raise ConfigError(f"token id {token} is a trigger; allowed are 0 to {n_vocab - 1}")
            if not self.inner.is_allowed(token):
                raise GrammarError(
                    f"token {token} is a trigger, but the grammar cannot begin with it: a grammar"
                    " that is switched on by a trigger begins with the trigger itself"
                )

    def start(self, text: bytes) -> int | None:
        """Return the index in bytes at which the first trigger in a text starts, or None."""
        starts = [at for word in self._words if (at := text.find(word)) >= 0]
        if self._patterns:
            decoded = text.decode(errors="surrogateescape")
            for pattern in self._patterns:
                match = pattern.search(decoded)
                if match is not None:
                    starts.append(_byte_length(decoded[: match.start()]))
        return min(starts, default=None)

    def begun(self, text: bytes) -> bytes:
        """Return the longest end of a text that may be the start of a trigger; b"" if none is.

        text: a text without a complete trigger.
        """
        text = text[-_WINDOW:]
        longest = max((_overlap_length(text, word) for word in self._words), default=0)
        if self._patterns:
            cut = _n_incomplete_bytes(text)
            decoded = text[: len(text) - cut].decode(errors="surrogateescape")
            longest = max(longest, cut)
            for beginning in self._prefix_patterns:
                if beginning is None:  # it looks at what stands around it
                    return text
                match = beginning.search(decoded)
                if match is not None:
                    longest = max(longest, cut + _byte_length(decoded[match.start() :]))
        return text[len(text) - longest :]

    def takes(self, text: bytes) -> bool:
        """Return True if some text of the grammar starts with this text."""
        return self.inner.takes(self.compiler.ids_of(text))

    def crosses(self, begun: bytes, token: int) -> bytes | None:
        """Return the forbidden text that `token` adds from a trigger on; None if it is allowed.

        A token can complete a trigger and continue. That is forbidden if no text of the grammar
        starts with the trigger and this continuation.
        """
        if token in self.tokens or token in self.compiler.stop_ids:
            return None
        text = begun + self.compiler.text.token_bytes(token)
        at = self.start(text)
        return None if at is None or self.takes(text[at:]) else text[at:]

    def fill(self, begun: bytes, bits: NDArray[np.int32]) -> None:
        """Write the mask of the tokens that may follow before a trigger, into `bits`.

        All tokens may, except those that complete a trigger and continue with forbidden text.
        """
        import numpy as np

        kept = self._forbidden.get(begun)
        if kept is None:
            n_vocab = self.compiler.n_vocab
            allowed = np.ones(n_words(n_vocab) * 32, dtype=np.uint8)
            start = self.start
            triggering = [
                t for t, each in enumerate(self._spelled) if start(begun + each) is not None
            ]
            allowed[[t for t in triggering if self.crosses(begun, t) is not None]] = 0
            kept = np.packbits(allowed, bitorder="little").view(np.int32)
            self._forbidden[begun] = kept
            while len(self._forbidden) > _KEPT:
                self._forbidden.popitem(last=False)
        bits[:] = kept


class LazyMatcher(Matcher):
    """Matcher of `Lazy`: searches the text for a trigger, then applies the grammar's matcher.

    inner: the grammar's matcher; None before a trigger.
    """

    __slots__ = ("_begun", "_inner", "_triggers")

    def __init__(self, triggers: Triggers, inner: Matcher | None, begun: bytes = b"") -> None:
        self._triggers = triggers
        self._inner = inner
        self._begun = begun

    def fill(
        self,
        bits: NDArray[np.int32],
        banned: Set[int] = frozenset(),
        biased: Set[int] = frozenset(),
    ) -> None:
        if self._inner is not None:
            self._inner.fill(bits, banned, biased)
        else:
            self._triggers.fill(self._begun, bits)

    def accept(self, token: int) -> None:
        if self._inner is not None:
            self._inner.accept(token)
            return
        triggers = self._triggers
        if token in triggers.tokens:
            self._switch_on([token])
            return
        wrong = triggers.crosses(self._begun, token)
        if wrong is not None:
            raise ConstraintError(
                f"token {token} completes a trigger and leads to {wrong!r}, which the grammar does"
                " not allow: a grammar that is switched on by a trigger begins with the trigger's"
                " own text"
            )
        text = self._begun + triggers.compiler.text.token_bytes(token)
        at = triggers.start(text)
        if at is not None:
            self._switch_on(triggers.compiler.ids_of(text[at:]))
        else:
            self._begun = triggers.begun(text)

    def _switch_on(self, tokens: Sequence[int]) -> None:
        """Start the grammar's matcher with the tokens of the trigger's text."""
        started = self._triggers.inner.clone()
        for token in tokens:
            started.accept(token)
        self._inner = started

    def is_allowed(self, token: int) -> bool:
        if self._inner is not None:
            return self._inner.is_allowed(token)
        return self._triggers.crosses(self._begun, token) is None

    def forced(self, banned: Set[int] = frozenset(), biased: Set[int] = frozenset()) -> list[int]:
        return self._inner.forced(banned, biased) if self._inner is not None else []

    @property
    def may_end(self) -> bool:
        return self._inner is None or self._inner.may_end

    @property
    def must_end(self) -> bool:
        return self._inner is not None and self._inner.must_end

    @property
    def failure(self) -> str | None:
        return None if self._inner is None else self._inner.failure

    def clone(self) -> LazyMatcher:
        inner = None if self._inner is None else self._inner.clone()
        return LazyMatcher(self._triggers, inner, self._begun)


def _overlap_length(text: bytes, word: bytes) -> int:
    """Return the length of the longest prefix of a word that the text ends with."""
    sizes = range(min(len(text), len(word) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(word[:size])), 0)


def _n_incomplete_bytes(text: bytes) -> int:
    """Return how many bytes at the end of a text belong to an incomplete UTF-8 character."""
    for size, byte in enumerate(reversed(text[-3:]), start=1):
        if byte >= 0xC0:
            return size if size < 2 + (byte >= 0xE0) + (byte >= 0xF0) else 0
        if byte < 0x80:
            return 0
    return 0


def _byte_length(text: str) -> int:
    """Return the number of bytes of a text that was decoded with surrogateescape."""
    return len(text.encode(errors="surrogateescape"))


_ALLOWED = (
    "a Pydantic class, a type such as int, Literal[…] or list[str], a function (its arguments), a"
    " JSON-schema dict, JsonSchema, Regex, Lark, GBNF, Choice, Allow, TokenLimits, AnyOf,"
    " EachLine or Lazy of weft.constraints, or a set of token ids"
)


def as_constraint(value: Any) -> Constraint:
    """Convert a value of `constraint=` to a constraint. Raises: ConfigError, GrammarError."""
    if isinstance(value, Constraint):
        return value
    if isinstance(value, Mapping):
        return JsonSchema(value)
    if isinstance(value, set | frozenset):
        return Allow(value)
    if (typed := from_type(value)) is not None:
        return typed
    raise ConfigError(f"constraint is {value!r:.80}; allowed is {_ALLOWED}", hint=hint_for(value))


def hint_for(value: object) -> str:
    """Return a hint for an error message: a constraint that suits a text or a list of texts."""
    if isinstance(value, list | tuple) and value and all(isinstance(v, str) and v for v in value):
        return f"for one of these texts: Choice({list(value)!r})"
    if not isinstance(value, str):
        return ""
    if not value:
        return "for no constraint: constraint=None"
    text = value.strip()
    if text.startswith("{") and text.endswith("}"):
        return "it looks like a JSON schema: JsonSchema(text)"
    if "::=" in text:
        return "it looks like GBNF: GBNF(text)"
    if re.search(r"^\??start\s*:", text, re.M):
        return "it looks like Lark: Lark(text)"
    if re.search(r"[\\\[\](){}*+?^$|]", text):
        return f"it looks like a regular expression: Regex({value!r:.60})"
    return f"for exactly this text: Choice([{value!r:.60}])"


def from_dict(data: Mapping[str, Any]) -> Constraint:
    """Deserialize a constraint from the data of `to_dict`. Raises: FormatError."""
    kinds: dict[str, Any] = {
        "regex": Regex,
        "gbnf": GBNF,
        "choice": Choice,
        "allow": Allow,
    }
    if isinstance(data, Mapping) and "lazy" in data:
        triggers = [_parse_trigger(each) for each in data.get("triggers", ())]
        return Lazy(from_dict(data["lazy"]), triggers)
    if isinstance(data, Mapping) and "token_limits" in data:
        from .token_limits import TokenLimits

        inner = data.get("inner")
        return TokenLimits.from_dict(
            data["token_limits"], None if inner is None else from_dict(inner)
        )
    if isinstance(data, Mapping) and "each_line" in data:
        from .lines import EachLine

        first = None if "first" not in data else from_dict(data["first"])
        return EachLine(from_dict(data["each_line"]), data.get("ends", ("\n",)), first)
    if isinstance(data, Mapping) and "any_of" in data:
        from .any_of import AnyOf

        return AnyOf([from_dict(each) for each in data["any_of"]])
    if isinstance(data, Mapping) and "prefixed" in data:
        inner = from_dict(data["prefixed"])
        if not isinstance(inner, Grammar):
            raise FormatError(f"{data!r} is no saved constraint")
        return Prefixed(str(data.get("prefix", "")), inner)
    for name, kind, known in (
        ("json_schema", JsonSchema, {"whitespace", "open_objects"}),
        ("lark", Lark, {"unique_names", "json_after"}),
    ):
        if isinstance(data, Mapping) and name in data and set(data) <= {name} | known:
            options = {key: value for key, value in data.items() if key != name}
            typed: Constraint = kind(data[name], **options)
            return typed
    if isinstance(data, Mapping) and len(data) == 1:
        name, value = next(iter(data.items()))
        if name in kinds:
            constraint: Constraint = kinds[name](value)
            return constraint
    raise FormatError(f"{data!r} is no saved constraint")


def _parse_trigger(data: Any) -> Any:
    """Deserialize one trigger of a lazy constraint. Raises: FormatError."""
    if not isinstance(data, Mapping):
        return data
    try:
        return re.compile(data["pattern"], data.get("flags", 0))
    except (re.error, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FormatError(f"{data!r} is no saved pattern: {error}") from error
