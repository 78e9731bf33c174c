"""Compiled patterns as constraints and as triggers: they match what Python matches."""

from __future__ import annotations

import json
import random
import re
import sys
import unicodedata
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from core.tokens import builders
from weft._core.tokens.tokenizer import Tokenizer
from weft.constraints import Choice, Lark, Lazy, Regex, from_dict
from weft.constraints.base import Compiler, Matcher, n_words
from weft.constraints.regex_translate import _parse, as_regex, prefix_pattern
from weft.errors import ConfigError, ConstraintError, FormatError, GrammarError

PATTERNS = [
    re.compile("owl|fox{2}", re.I),
    re.compile("ä[é-ü]ß", re.I),
    re.compile("[à-ÿ]{2}|[^a-zà-ÿ]", re.I),
    re.compile("(?i:Straße)|K(?-i:el)"),
    re.compile(r"\w\W\d\D\s\S"),
    re.compile(r"\w\W\d\D\s\S", re.A),
    re.compile(r"[\w-][^\W_][\d.][^\s\d]", re.A),
    re.compile(r"[^\W\d_]+[\s\S]"),
    re.compile("a.b"),
    re.compile("a.b", re.S),
    re.compile("a[ #]b  # no [ ] here", re.X),
    re.compile(r"^(?P<first>a|b)*?(?:[\]\-^&~|]{2,3})$"),
    re.compile(r"\Aa{2,}?b?\Z"),
    re.compile("<[^<>]+>\n?"),
    re.compile("🙂+|日本"),
    re.compile("(?:a|b(?:c|d)?)e*"),
    re.compile(r"[\&\&\-\-\|\|~\~]"),
]
CHARACTERS = "abcdexABKkK \t\n\x1c_-.!&~|^]<>0123456789äéßẞſÄÉSs²½٣日本🙂ÿÀà\u0301"


@cache
def compiler() -> Compiler:
    text = Tokenizer.from_folder(Path(str(files("weft") / "data" / "tiny")))
    return Compiler(text, text.n_vocab)


def takes(matcher: Matcher, grammar_compiler: Compiler, text: str) -> bool:
    ids = grammar_compiler.ids_of(text.encode())
    if not matcher.takes(ids):
        return False
    for token in ids:
        matcher.accept(token)
    return matcher.may_end


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda each: f"{each.pattern} {each.flags:x}")
def test_compiled_pattern_matches_what_python_matches(pattern: re.Pattern[str]) -> None:
    """The twin: `fullmatch`, over texts whose characters differ in case, class and kind."""
    grammar_compiler = compiler()
    start = grammar_compiler.matcher(Regex(pattern))
    rng = random.Random(pattern.pattern)
    results = set()
    for _ in range(400):
        text = "".join(rng.choices(CHARACTERS, k=rng.randint(1, 6)))
        if rng.random() < 0.7:  # near what fits
            text = rng.choice(NEAR) + rng.choice(["", "", text[:1]])
        text = "".join(rng.choice([c, c.upper(), c.lower()]) for c in text)
        matches = pattern.fullmatch(text) is not None
        assert takes(start.clone(), grammar_compiler, text) == matches, text
        results.add(matches)
    assert False in results


NEAR = [
    *("owl fox foxx äéß ääß straße strasse kel Kel a!1a\tx _ä٣x é1 a-1a a\nb axb a b a#b").split(
        " "
    ),
    *("ab]- aa aaab <ab> <a>\n 🙂🙂 日本 bce bdee be a&& & ~ - | aß! éé É! ÿÀ ſ").split(" "),
    "a b",
    "ab\n",
]


@pytest.mark.programs
def test_python_character_classes_equal_the_unicode_categories() -> None:
    """`_CLASSES` relies on this, character by character."""
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        kind = unicodedata.category(character)
        assert (re.match(r"\w", character) is not None) == (kind[0] in "LN" or character == "_"), (
            code
        )
        assert (re.match(r"\d", character) is not None) == (kind == "Nd")


def test_unsupported_pattern_raises_and_is_named() -> None:
    for text, flags, message in (
        ("a(?=b)", 0, "look-around"),
        ("(?<!a)b", 0, "look-around"),
        (r"(a)\1", 0, "a reference to a group"),
        ("(a)?(?(1)b|c)", 0, "conditional"),
        ("(?>a)", 0, "atomic"),
        ("a++", 0, "possessive"),
        (r"\bfoo", 0, r"\\b"),
        ("^a$", re.M, "MULTILINE"),
        ("abc", re.A | re.I, "ASCII together"),
    ):
        with pytest.raises(GrammarError, match=message):
            Regex(re.compile(text, flags))
    with pytest.raises(GrammarError, match="of bytes"):
        Regex(re.compile(b"a"))  # type: ignore[arg-type]
    for text in ("a(?=b)", "(a", "[", "a{2", r"\q", "(?P<n", "*", "(?a)x", "\ud800"):
        with pytest.raises(GrammarError):
            compiler().matcher(Regex(text))


def test_every_operation_of_pythons_parser_is_known() -> None:
    """A Python that parses to something new is to be noticed here, not by a user."""
    operations = {str(each) for each in re._constants.OPCODES}  # type: ignore[attr-defined]
    written = {"LITERAL", "NOT_LITERAL", "ANY", "IN", "BRANCH", "SUBPATTERN", "AT", "CATEGORY"}
    written |= {"MAX_REPEAT", "MIN_REPEAT", "RANGE", "NEGATE"}
    refused = {"ASSERT", "ASSERT_NOT", "GROUPREF", "GROUPREF_EXISTS", "ATOMIC_GROUP", "FAILURE"}
    refused |= {"POSSESSIVE_REPEAT"}
    # What only the compiled code has.
    compiled = {"SUCCESS", "ANY_ALL", "BIGCHARSET", "CHARSET", "INFO", "JUMP", "MARK", "MAX_UNTIL"}
    compiled |= {"MIN_UNTIL", "MIN_REPEAT_ONE", "REPEAT", "REPEAT_ONE"}
    rest = operations - written - refused - compiled
    assert all("IGNORE" in name or "POSSESSIVE" in name for name in rest), rest
    assert [str(name) for name, _ in _parse(re.compile("a|b."))] == ["BRANCH"]


def test_compiled_pattern_is_saved_with_its_flags() -> None:
    constraint = Regex(re.compile("owl", re.I))
    assert from_dict(json.loads(json.dumps(constraint.to_dict()))) == constraint
    assert Regex(re.compile("[0-9]+")) == Regex(as_regex(re.compile("[0-9]+")))
    lazy = Lazy(Choice(["owl", "OWL"]), [re.compile("o(w)l", re.I), "x"])
    restored = from_dict(json.loads(json.dumps(lazy.to_dict())))
    assert restored == lazy
    assert restored.triggers[0].flags & re.I
    for wrong in ({"pattern": "("}, {"flags": 1}, {"pattern": 3}, {"pattern": "a", "flags": "i"}):
        with pytest.raises(FormatError, match="no saved pattern"):
            from_dict({"lazy": {"regex": "a"}, "triggers": [wrong]})


# Triggers ----------------------------------------------------------------------------------------

LAZIES = [
    Lazy(Lark('start: "<call>" /[a-z]+/ "</call>"'), ["<call>"]),
    Lazy(Lark("start: /[oO][wW][lL] is [0-9]+/"), [re.compile("owl is", re.I)]),
    Lazy(Regex("the [0-9]|he [a-f]"), ["the ", "he "]),
    Lazy(Regex("a[b ][0-9]"), [re.compile("(?P<x>a)[b ]"), re.compile("(?P<x>a)b")]),
    Lazy(Regex("(aab|ab)[0-9]"), ["aab", "ab"]),
    Lazy(Regex("é[0-9]"), [re.compile("[éÉ]")]),
    Lazy(Regex("é[0-9]"), ["é"]),
    Lazy(Regex("<t[^>]*>[0-9]"), [re.compile("<t.*?>")]),
    Lazy(Regex("fox[0-9]"), [re.compile(r"\bfox\b")]),
    Lazy(Regex("\n[{][0-9]|[{][0-9]"), [re.compile("^[{]", re.M)]),
    Lazy(Regex("ab[0-9]"), [re.compile("(?=ab)")]),
]


def naive(grammar_compiler: Compiler, lazy: Lazy, text: bytes) -> set[int]:
    """The tokens that may come after a text without a trigger: every token tried, nothing kept."""
    inner = grammar_compiler.matcher(lazy.constraint)
    allowed = set()
    for token in range(grammar_compiler.n_vocab):
        full = text + grammar_compiler.text.token_bytes(token)
        starts = [full.find(each.encode()) for each in lazy.triggers if isinstance(each, str)]
        characters = full.decode(errors="surrogateescape")
        for trigger in lazy.triggers:
            if isinstance(trigger, re.Pattern) and (match := trigger.search(characters)):
                before = characters[: match.start()]
                starts.append(len(before.encode(errors="surrogateescape")))
        starts = [start for start in starts if start >= 0]
        is_end = token in grammar_compiler.stop_ids
        if is_end or not starts or inner.takes(grammar_compiler.ids_of(full[min(starts) :])):
            allowed.add(token)
    return allowed


@pytest.mark.parametrize("lazy", LAZIES, ids=lambda each: str(each.triggers))
@pytest.mark.parametrize("kind", ["long words", "sentencepiece"])
def test_no_token_crosses_a_trigger_into_forbidden_text(kind: str, lazy: Lazy) -> None:
    """The twin tries every token on the full text."""
    grammar_compiler = _long_words() if kind == "long words" else _pieces()
    bits = np.empty(n_words(grammar_compiler.n_vocab), dtype=np.int32)
    rng = random.Random(str(lazy.triggers))
    kept_out = 0
    for text in ("", "x <", "the", "an o", "aa", "É", "<t 1", " fo", "x\n", "a"):
        matcher, prefix = grammar_compiler.matcher(lazy), b""
        for token in grammar_compiler.ids_of(text.encode()):
            if matcher.is_allowed(token) and matcher._inner is None:
                matcher.accept(token)
                prefix += grammar_compiler.text.token_bytes(token)
        if matcher._inner is not None:
            continue
        matcher.fill(bits)
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: grammar_compiler.n_vocab]
        expected = naive(grammar_compiler, lazy, prefix)
        assert set(allowed.nonzero()[0].tolist()) == expected
        kept_out += grammar_compiler.n_vocab - len(expected)
        for token in rng.sample(range(grammar_compiler.n_vocab), 60):
            assert matcher.is_allowed(token) == (token in expected)
            twin = matcher.clone()
            if token in expected:
                twin.accept(token)
            else:
                with pytest.raises(ConstraintError, match="completes a trigger"):
                    twin.accept(token)
                assert twin._begun == matcher._begun
    assert kept_out or kind == "sentencepiece"


@cache
def _long_words() -> Compiler:
    """Tokens that begin a trigger, end one, have one inside, with good and bad text after it."""
    words = " <call>ab| <call>1|ll>z|ll>!|howl is 4|OWL isn|wl is x|the 1|he he|ab9x|aab5|ab5|b5|b!"
    words += "|é7|éx|É|<t>x|<t>3>4|1>x|fox!|x!| fox7|x7|{a|{1|the xx|in the 1|he b|ab|bab!"
    text = Tokenizer.wrap(builders.with_words(*words.split("|")), stop_ids=[1])
    return Compiler(text, text.n_vocab)


@cache
def _pieces() -> Compiler:
    text = Tokenizer.wrap(builders.sentencepiece(), stop_ids=[2])
    return Compiler(text, text.n_vocab + 40)


def test_flags_of_a_trigger_are_applied() -> None:
    grammar_compiler = compiler()
    lazy = Lazy(Regex("(?i)owl[0-9]"), [re.compile("owl", re.I)])
    for text in ("an owl", "an OwL"):
        matcher = grammar_compiler.matcher(lazy)
        for token in grammar_compiler.ids_of(text.encode()):
            matcher.accept(token)
        assert not matcher.may_end
        assert matcher.takes(grammar_compiler.ids_of(b"7"))
        assert not matcher.takes(grammar_compiler.ids_of(b"s"))


def test_empty_or_bytes_trigger_raises() -> None:
    for trigger in (re.compile("y*"), re.compile(""), re.compile(b"a"), -1, True):
        with pytest.raises(ConfigError, match="triggers are"):
            Lazy(Regex("a"), [trigger])


def test_prefix_pattern_matches_every_prefix_of_a_match() -> None:
    """For texts that a pattern matches, and every cut of them, with anything before."""
    texts = {
        re.compile("ow(l|ls) [0-9]{2,3}", re.I): ["OwL 12", "owls 123"],
        re.compile("<[^>]*>"): ["<>", "<abc d>"],
        re.compile("(?:ab|cd){2}e?"): ["abcde", "cdab"],
        re.compile(r"\w+:", re.A): ["abc_9:"],
    }
    for pattern, matched in texts.items():
        begun = prefix_pattern(pattern)
        assert begun is not None
        for text in matched:
            assert pattern.fullmatch(text)
            for at in range(1, len(text)):
                match = begun.search("..." + text[:at])
                assert match is not None
                assert len(match[0]) >= at
        assert begun.search("...!") is None or pattern.search("!")
    assert prefix_pattern(re.compile(r"\bx")) is None
