"""Grammars matched by llguidance: JSON schemas, regular expressions, Lark, GBNF, choices."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .._core.system_resources import usable_cores
from .._core.tokens.codec import is_panic
from ..errors import ConfigError, ConstraintError, GrammarError
from .base import Constraint, Matcher, n_words
from .gbnf import as_lark
from .regex_translate import as_regex
from .rules import MAX_DEPTH, is_too_deep
from .schema_reader import INSTEAD

if TYPE_CHECKING:
    from .base import Compiler
    from .cuts import Cuts

_LINE = re.compile(r"line (\d+)|at (\d+)\(\d+\)|^(\d+)[:(]")
_SHOWN = re.compile(r"(?m)^ *(\d+ \|.*|\^+) *$")
# Its option is none of ours: what any option allows would not be what oneOf says.
_ONE_OF = (
    "oneOf constraints are not supported."
    " Enable 'coerce_one_of' option to approximate oneOf with anyOf"
)
_PLACE = re.compile(r"(at|line) \d+(\(\d+\))?:? *")


class Grammar(Constraint):
    """A constraint that is matched by the llguidance library."""

    @abstractmethod
    def grammar(self) -> str:
        """Return the grammar in llguidance's serialized form. Raises: GrammarError."""

    def validated(self, guidance: Any = None) -> str:
        """Validate the grammar; return it in llguidance's form. Raises: GrammarError.

        guidance: a tokenizer in llguidance's form; None skips checks that need one.
        """
        from llguidance import LLMatcher

        try:
            text = self.grammar()
            is_error, messages = LLMatcher.validate_grammar_with_warnings(text, guidance)
        except GrammarError:
            raise
        except BaseException as error:  # the library's, for what it cannot read at all
            if not isinstance(error, ValueError) and not is_panic(error):
                raise
            raise GrammarError(
                f"{self._kind_name()} is not valid: {error_line(str(error))}"
            ) from error
        if is_error:
            raise GrammarError(
                f"{self._kind_name()} is not valid: {self._error_message(messages[0])}"
            )
        return text

    def compile(self, compiler: Compiler) -> Matcher:
        """Validate the grammar and return an llguidance matcher; see `Constraint.compile`.

        Raises: GrammarError naming the error's place in the grammar.
        """
        from llguidance import LLMatcher

        text = self.validated(compiler.guidance)
        matcher = LLMatcher(compiler.guidance, text, log_level=0)
        if matcher.is_error():
            raise GrammarError(
                f"{self._kind_name()} is not valid: {self._error_message(matcher.get_error())}"
            )
        begin = self.unique_names_after()
        if begin is None:
            return GrammarMatcher(matcher, compiler)
        from .unique_names import UniqueNamesMatcher

        return UniqueNamesMatcher(matcher, compiler, begin)

    def unique_names_after(self) -> str | None:
        """Return the text before the JSON whose objects must not repeat property names.

        "" if the text begins with JSON, or has no quotes and brackets before it; None if names need
        no check.
        """
        return None

    def _kind_name(self) -> str:
        """Return the grammar's kind for error messages."""
        return f"the {type(self).__name__}"

    def _error_message(self, message: str) -> str:
        """Return llguidance's error message with locations of this grammar."""
        return error_line(message)


@dataclass(frozen=True, slots=True)
class Regex(Grammar):
    """Text that fully matches a regular expression.

    pattern: a text in Rust's syntax, or a compiled pattern of Python's `re`. A compiled pattern has
    its meaning in Python, flags included; unsupported parts, such as look-around, raise
    GrammarError.
    """

    pattern: str

    def __init__(self, pattern: str | re.Pattern[str]) -> None:
        text = as_regex(pattern) if isinstance(pattern, re.Pattern) else pattern
        object.__setattr__(self, "pattern", validate_text("a regular expression", text))

    def grammar(self) -> str:
        """Return the pattern in llguidance's form. `validated` raises errors of the pattern."""
        from llguidance import LLMatcher

        grammar: str = LLMatcher.grammar_from_regex(self.pattern)
        return grammar

    def _error_message(self, message: str) -> str:
        """Remove the location, which refers to the library's form of the expression."""
        return f"line 1: {error_line(message).split('(in regex): ', 1)[-1]}"

    def to_dict(self) -> dict[str, Any]:
        """Return `{"regex": pattern}`, which `from_dict` reads."""
        return {"regex": self.pattern}


@dataclass(frozen=True, slots=True)
class Lark(Grammar):
    """Text of a grammar in llguidance's Lark.

    unique_names: no object in the JSON of the text may have a name twice. Outside of its JSON the
    text must have no quotes, brackets or braces.

    json_after: the JSON starts after this text; quotes and brackets before it are allowed.
    """

    text: str
    unique_names: bool = False
    json_after: str = ""

    def __post_init__(self) -> None:
        validate_text("a Lark grammar", self.text)

    def grammar(self) -> str:
        """Return the grammar in llguidance's form. Raises: GrammarError if rules nest too deep."""
        from llguidance import LLMatcher

        check_depth("Lark", self.text)
        grammar: str = LLMatcher.grammar_from_lark(self.text)
        return grammar

    def unique_names_after(self) -> str | None:
        """Return `json_after` if names must be unique; None otherwise."""
        return self.json_after if self.unique_names else None

    def to_dict(self) -> dict[str, Any]:
        """Return `{"lark": text}` and the options that are set, which `from_dict` reads."""
        options: dict[str, Any] = {"unique_names": True} if self.unique_names else {}
        options |= {"json_after": self.json_after} if self.json_after else {}
        return {"lark": self.text, **options}


@dataclass(frozen=True, slots=True)
class GBNF(Grammar):
    """Text of a grammar in llama.cpp's GBNF; it starts at the rule `root`."""

    text: str

    def __post_init__(self) -> None:
        validate_text("a GBNF grammar", self.text)

    def grammar(self) -> str:
        """Return the grammar as llguidance's Lark. Raises: GrammarError naming the line."""
        return as_lark(self.text)[0]

    def _error_message(self, message: str) -> str:
        """Name the line of the user's text, not of the generated Lark."""
        return located_message(message, [f"line {line}" for line in as_lark(self.text)[1]])

    def to_dict(self) -> dict[str, Any]:
        """Return `{"gbnf": text}`, which `from_dict` reads."""
        return {"gbnf": self.text}


@dataclass(frozen=True, slots=True)
class Choice(Grammar):
    """One of several fixed texts.

    values: text → the object that `parse` returns for it; None means the texts themselves.
    """

    texts: tuple[str, ...]
    values: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def __init__(self, texts: Sequence[str], *, values: Mapping[str, Any] | None = None) -> None:
        given = () if isinstance(texts, str) else tuple(texts)
        good = all(isinstance(text, str) and text and _is_encodable(text) for text in given)
        if not given or not good:
            raise ConfigError(f"Choice is of {texts!r}; allowed are one or more non-empty strings")
        object.__setattr__(self, "texts", given)
        object.__setattr__(self, "values", values)

    def grammar(self) -> str:
        """Return a grammar with one terminal that matches the texts, in llguidance's form."""
        from llguidance import LLMatcher

        options = " | ".join(json.dumps(text, ensure_ascii=False) for text in self.texts)
        # A terminal, which is an automaton: of a rule's alternatives there can be 2,000.
        options = options.replace("\x7f", "\\u007f")  # Lark takes no control characters
        grammar: str = LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}")
        return grammar

    def parse(self, text: str) -> Any:
        """Return the object of this text in `values`; the text itself if it has none."""
        return text if self.values is None else self.values.get(text, text)

    def to_dict(self) -> dict[str, Any]:
        """Return `{"choice": [texts]}`, which `from_dict` reads. `values` is left out."""
        return {"choice": list(self.texts)}


@dataclass(frozen=True, slots=True)
class Prefixed(Grammar):
    """A fixed text, followed by a text that a grammar allows.

    prefix: the fixed text.
    constraint: the grammar.
    """

    prefix: str
    constraint: Grammar

    def compile(self, compiler: Compiler) -> Matcher:
        self.constraint.validated(compiler.guidance)  # its errors name the user's own lines
        return Grammar.compile(self, compiler)

    def grammar(self) -> str:
        own = self.constraint.grammar()
        parts = json.loads(own)["grammars"] if own.startswith("{") else [{"lark_grammar": own}]
        start = {"lark_grammar": f"start: {json.dumps(self.prefix)} @after"}
        return json.dumps({"grammars": [start, {**parts[0], "name": "after"}, *parts[1:]]})

    def unique_names_after(self) -> str | None:
        begin = self.constraint.unique_names_after()
        return self.prefix if begin == "" else begin

    def to_dict(self) -> dict[str, Any]:
        return {"prefixed": self.constraint.to_dict(), "prefix": self.prefix}


class GrammarMatcher(Matcher):
    """An llguidance matcher.

    After an internal error llguidance still returns masks, as if the text had ended; check for an
    error after each step. If a text is forced, its mask allows only the tokenizer's own next token.
    """

    __slots__ = ("_compiler", "inner")

    def __init__(self, inner: Any, compiler: Compiler) -> None:
        self.inner = inner
        self._compiler = compiler

    def fill(
        self,
        bits: NDArray[np.int32],
        banned: Set[int] = frozenset(),
        biased: Set[int] = frozenset(),
    ) -> None:
        self.inner.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self.correct(bits, banned, biased)

    def correct(self, bits: NDArray[np.int32], banned: Set[int], biased: Set[int]) -> None:
        """Correct a mask, in place, that llguidance has just filled.

        After an error of the library the mask allows nothing. If the library forces a tokenization
        with a token of `banned` or `biased`, the mask allows other tokenizations of the same text.

        banned, biased: as for `fill`.
        """
        if self.inner.is_error():
            bits[:] = 0
            return
        avoided = banned | biased if biased else banned
        if not avoided or avoided.isdisjoint(tokens := self._forced()):
            return
        bits[:] = 0
        allowed = self._forced_instead(tokens, banned, biased)[:1]
        if biased and not allowed:
            allowed = self._first_tokens(tokens, banned)
        for token in allowed:
            bits.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token: int) -> None:
        if not self.is_allowed(token):
            raise ConstraintError(self.failure or f"the grammar does not allow token {token} here")
        if not self.inner.is_stopped() and not self.inner.consume_token(token):
            raise ConstraintError(self.failure or f"the grammar cannot go on after token {token}")

    def is_allowed(self, token: int) -> bool:
        if self.inner.is_error():
            return False
        if token in self._compiler.stop_ids:
            return bool(self.inner.is_accepting())
        return bool(self.inner.validate_tokens([token]) == 1)

    def takes(self, tokens: Sequence[int]) -> bool:
        if self.inner.is_error():
            return False
        return bool(self.inner.validate_tokens(list(tokens)) == len(tokens))

    def forced(self, banned: Set[int] = frozenset(), biased: Set[int] = frozenset()) -> list[int]:
        return self._forced_instead(self._forced(), banned, biased)

    def _forced(self) -> list[int]:
        """Return the library's forced tokens, up to a byte that no token writes."""
        if self.inner.is_stopped():
            return []
        n_vocab = self._compiler.n_vocab
        return list(takewhile(lambda token: token < n_vocab, self.inner.compute_ff_tokens()))

    def _forced_instead(self, tokens: list[int], banned: Set[int], biased: Set[int]) -> list[int]:
        """Return the tokens that are forced if the library forces `tokens`; see `forced`.

        [] if the draw decides, because a token has a finite bias.
        """
        avoided = banned | biased if biased else banned
        if avoided.isdisjoint(tokens):
            return tokens
        cut = self._without(tokens, avoided)
        is_drawn = not biased.isdisjoint(tokens) and cut != tokens[: len(cut)]
        return [] if is_drawn else cut

    def _without(self, tokens: Sequence[int], avoided: Set[int]) -> list[int]:
        """Return the tokens to force instead of `tokens`, some of which are to be avoided.

        They are the longest start of `tokens` that another tokenization of the text continues.
        Otherwise it is the first token of the shortest other tokenization; [] if there is none.
        """
        spelled = self._spelled(tokens)
        first = next(at for at, token in enumerate(tokens) if token in avoided)
        if first > len(spelled):
            return list(tokens[: len(spelled) + 1])
        if first == len(spelled):
            return []
        _, cuts = self._cuts(tokens, avoided)
        ends = list(accumulate(map(len, spelled[:first])))
        for n in range(first, 0, -1):
            if cuts.has_cut(ends[n - 1]):
                return list(tokens[:n])
        return cuts.from_start()[:1]

    def _first_tokens(self, tokens: Sequence[int], banned: Set[int]) -> list[int]:
        """Return the tokens with which a tokenization of the forced text may begin.

        tokens: the usual tokenization. banned: tokens that no tokenization has.
        """
        if not self._spelled(tokens):  # a special token has one spelling
            return [token for token in tokens[:1] if token not in banned]
        text, cuts = self._cuts(tokens, banned)
        ends = (end for end in range(1, len(text) + 1) if cuts.has_cut(end))
        starts = (token for end in ends for token in self._compiler.vocabulary.tokens(text[:end]))
        return [token for token in starts if token not in banned and self.is_allowed(token)]

    def _spelled(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of forced tokens, up to a special token."""
        spelled = (self._compiler.spellings[token] for token in tokens)
        return list(takewhile(bool, spelled))

    def _cuts(self, tokens: Sequence[int], avoided: Set[int]) -> tuple[bytes, Cuts]:
        """Return the forced text, and its shortest tokenizations without the avoided tokens.

        The text may go on after `tokens`, because a token may cross their end.
        """
        spelled = self._spelled(tokens)
        text = b"".join(spelled)
        goal = len(text)
        if len(spelled) == len(tokens):  # a token may go on into forced text that has no cut yet
            text = bytes(self.inner.compute_ff_bytes())
        return text, self._compiler.vocabulary.cuts(text, goal, avoided)

    @property
    def may_end(self) -> bool:
        return bool(self.inner.is_accepting())

    @property
    def must_end(self) -> bool:
        if self.inner.is_stopped():
            return not self.inner.is_error()
        # Without end tokens no draw can end the text where it is all that is left.
        return not self._compiler.stop_ids and self.may_end and not self._allows_any_token()

    def _allows_any_token(self) -> bool:
        """Return True if the mask allows at least one token of the model."""
        mask = int.from_bytes(self.inner.compute_bitmask(), "little")
        return mask & ((1 << self._compiler.n_vocab) - 1) != 0

    @property
    def failure(self) -> str | None:
        if not self.inner.is_error():
            return None
        reason = str(self.inner.get_error()).split("<state>")[0].split("<backtrace>")[0]
        if reason.startswith("NoExtensionBias"):  # no token goes on: a dead end, not a fault
            return None
        return f"the grammar library gave up: {error_line(reason)}"

    def clone(self) -> GrammarMatcher:
        return GrammarMatcher(self.inner.deep_copy(), self._compiler)


def check_depth(name: str, lark: str) -> None:
    """Raise GrammarError if the rules of a Lark grammar are nested too deep.

    name: the grammar's name in the message.
    """
    if _is_deep_lark(lark):
        raise GrammarError(f"the {name} has rules that lead more than {MAX_DEPTH} levels deep")


def _is_deep_lark(text: str) -> bool:
    """Return True if a Lark grammar's rules are nested too deep.

    It follows all names in a rule, also in its strings, so it may overestimate.
    """
    bodies: dict[str, list[str]] = {}
    words: list[str] = []
    for line in text.splitlines():
        begun = re.match(r"\s*[?!]?(\w+)\s*(\[[^\]]*\]|\{[^}]*\}|\.\d+)?\s*:", line)
        if begun:
            words = bodies.setdefault(begun[1], [])
        words += re.findall(r"\w+", line[begun.end() :] if begun else line)
    start = bodies.get("start", [])
    return is_too_deep(start, lambda body: [bodies[word] for word in body if word in bodies])


def validate_text(name: str, text: object) -> str:
    """Return `text`; raise GrammarError unless it is a non-empty str without surrogates.

    name: the argument's name in the message.
    """
    if not isinstance(text, str) or not text.strip():
        raise GrammarError(f"{name} is {text!r}; allowed is a text that is not empty")
    if not _is_encodable(text):
        raise GrammarError(f"{name} contains a surrogate, half of a character: {text[:60]!r}")
    return text


def _is_encodable(text: str) -> bool:
    """Return True if the text can be encoded as UTF-8, so has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def error_line(message: str) -> str:
    """Return llguidance's error message on one line, with its line number first if it has one."""
    text = " ".join(_SHOWN.sub("", message).split())
    text = text.replace(_ONE_OF, f"a oneOf whose options may overlap is not supported; {INSTEAD}")
    match = _LINE.search(text)
    if match is None or text.startswith("line "):
        return text
    return f"line {next(filter(None, match.groups()))}: {text}"


def located_message(message: str, places: Sequence[str]) -> str:
    """Return llguidance's error message with a place of the user's input instead of a line number.

    places: the place for each line of the generated grammar.
    """
    match = _LINE.search(message)
    if match is None:
        return error_line(message)
    number = int(next(filter(None, match.groups())))
    place = places[min(number, len(places)) - 1]
    return f"{place}: {_PLACE.sub('', ' '.join(_SHOWN.sub('', message).split()))}"


class Masks:
    """The masks of B samplers, filled on another thread while the model runs.

    A sampler without a matcher has None. The object is reused while the samplers step together.

    banned, biased: the tokens that each sampler never draws, and those with another bias.
    """

    def __init__(self, banned: Sequence[Set[int]], biased: Sequence[Set[int]]) -> None:
        self._banned = banned
        self._biased = biased
        self._bits: NDArray[np.int32] | None = None
        self._filling: Future[None] | None = None

    def start(self, matchers: Sequence[Matcher | None], n_vocab: int) -> None:
        """Start filling the masks on another thread; matchers must not change until `finish`.

        matchers: one per sampler; None for a sampler without a constraint.
        """
        try:
            self._filling = _worker().submit(self._fill, list(matchers), n_vocab)
        except RuntimeError:  # the program ends, and threads take no more work: `finish` does it
            self._filling = None

    def finish(self, matchers: Sequence[Matcher | None], n_vocab: int) -> NDArray[np.int32]:
        """Return the masks, int32 [B, words]; wait for `start`, or fill them if it was not called.

        matchers: as for `start`.
        """
        filling, self._filling = self._filling, None
        if filling is None:
            self._fill(matchers, n_vocab)
        else:
            filling.result()
        assert self._bits is not None
        return self._bits

    def apply(self, logits: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return a copy of logits with -inf for forbidden tokens: float32 [B, V].

        rows: int64 [B], the sampler of each row; its mask is filled (see `finish`).
        """
        assert self._bits is not None
        allowed = np.unpackbits(self._bits[rows].view(np.uint8), axis=1, bitorder="little")
        return np.where(allowed[:, : logits.shape[1]].view(bool), logits, np.float32(-np.inf))

    def _fill(self, matchers: Sequence[Matcher | None], n_vocab: int) -> None:
        """Fill the masks of all matchers."""
        shape = (len(self._banned), n_words(n_vocab))
        if self._bits is None or self._bits.shape != shape:
            self._bits = np.empty(shape, dtype=np.int32)
        bits = self._bits
        grammars: list[tuple[GrammarMatcher, int]] = []
        for row, matcher in enumerate(matchers):
            if matcher is None:
                bits[row] = -1
            elif isinstance(matcher, GrammarMatcher):
                grammars.append((matcher, row))
            else:
                matcher.fill(bits[row], self._banned[row], self._biased[row])
        if len(grammars) == 1:
            ((matcher, row),) = grammars
            matcher.fill(bits[row], self._banned[row], self._biased[row])
        elif grammars:
            inner = [(matcher.inner, row) for matcher, row in grammars]
            width = bits.shape[1] * bits.itemsize
            _executor().unsafe_compute_mask_ptr(inner, bits.ctypes.data, width, len(bits))
            for matcher, row in grammars:
                matcher.correct(bits[row], self._banned[row], self._biased[row])


@cache
def _worker() -> ThreadPoolExecutor:
    """Return the thread that fills masks; one for the process."""
    return ThreadPoolExecutor(1, thread_name_prefix="weft-masks")


@cache
def _executor() -> Any:
    """Return llguidance's thread pool, which fills several masks at once."""
    from llguidance import LLExecutor

    return LLExecutor(max(1, min(8, usable_cores() // 2)))
