"""GBNF: parsed as llama.cpp does, its language exact, errors with their line."""

from __future__ import annotations

import random
import string
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cases import one_in
from weft._core.tokens.tokenizer import Tokenizer
from weft.constraints import GBNF
from weft.constraints.base import Compiler
from weft.errors import GrammarError


@cache
def compiler() -> Compiler:
    text = Tokenizer.from_folder(Path(str(files("weft") / "data" / "tiny")))
    return Compiler(text, text.n_vocab)


def takes(grammar: str, *texts: str) -> list[bool]:
    """Return True for each text that the grammar accepts."""
    start = compiler().matcher(GBNF(grammar))
    accepted = []
    for text in texts:
        matcher, ids = start.clone(), compiler().ids_of(text.encode())
        fits = matcher.takes(ids)
        for token in ids if fits else ():
            matcher.accept(token)
        accepted.append(fits and matcher.may_end)
    return accepted


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (r'root ::= [a\-z]+ "\-"', ["a-", "z--", "-a-"], ["b-", "a"]),
        (r"root ::= [^\-\]\\^] [-a] [a-] [^-]", ["a-ab", "[a-b"], ["--ab", "^a-b", "]a-b", "ab-b"]),
        ("root ::= start\nstart ::= T0 r0\nT0 ::= [0-9]\nr0 ::= L1\nL1 ::= \"x\"", ["7x"], ["x"]),
        ('root ::= fooBar foo-bar foo_bar FOOBAR\nfooBar ::= "a"\nfoo-bar ::= "b"\n'
         'foo_bar ::= "c"\nFOOBAR ::= "d"', ["abcd"], ["aaaa", "abcc"]),
        ('root ::= (a | A)+\na ::= "x" a?\nA ::= "(" A ")" | "y"', ["xx((y))y"], ["xx(y", "(x)"]),
        (r'root ::= "\u0041\u00e9\U0001F642\x7A\n\t\"\\\[\]"', ['Aé🙂z\n\t"\\[]'], ["a"]),
        (r'root ::= "\/\.\+\*" [\x30-\x32]', ["/.+*1"], ["/.+*3"]),
        ("root ::= . . .", ["a\n🙂", '"\\x'], ["ab", "abcd"]),
        ("root ::= [^a]", ["\n", "é", "🙂"], ["a", ""]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2} "d"{,1}', ["aab", "aabbccd"], ["ab", "aabccc", "aabdd"]),
        ('root ::= "a"{0} [b]{0,0} ("c" "d"){0} e{0}{2} "z"\ne ::= "q"', ["z"], ["az", "bz", "qz"]),
        ('root ::= ("a" root){0} | "x"{0}', [""], ["a", "x"]),
        ('root ::= ("a" "b"?)* "c" # a comment\n# another\n', ["c", "aabc"], ["bc", ""]),
        ('root ::=\n  "a" |\n  "b"\n  | ( "c"\n      "d" |\n "e" )\n\nx ::= "y"',
         ["a", "b", "cd", "e"], ["c"]),
        ('root ::= "a" | ""', ["a", ""], ["aa"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= | "a" root', ["", "a", "aaa"], ["b"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["a", "ab"]),
        # A longest lexeme would be wrong in each of these.
        ('root ::= [a-z]* "x" root?', ["foox", "xx", "xaxbx"], ["foo", ""]),
        ('root ::= ("a" "bd" | "abc") root?', ["abd", "abc", "abdabc"], ["ab"]),
        ('root ::= "(" root ")" | ws [0-9]+ ws ws\nws ::= [ \\n]*', ["( 12 )", "1\n \n"], ["1 2"]),
        ('root ::= "if" " " root | [a-z]+ ("if" | "")', ["if x", "if", "ifif", "iif"], ["if "]),
        ("root ::= [0-9]+ [0-9] root?", ["12", "123", "1234"], ["1"]),
    ],
)  # fmt: skip
def test_grammar_accepts_its_texts_and_no_others(grammar: str, good: Any, bad: Any) -> None:
    assert takes(grammar, *good) == [True] * len(good)
    assert takes(grammar, *bad) == [False] * len(bad)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a"\n\n# x\nnext ::= "b', r"line 4: a text ends with"),
        ("root ::= a\na ::= [b", r"line 2: a set of characters ends with \]"),
        ('root ::= "a"\nother ::= ("b"', r"line 2: expected \) of the group on line 2"),
        ('root ::= "a"\n\nroot2 = "b"', r"line 3: expected ::= after 'root2', not '= "),
        ('root ::= "a" nosuch\n', "line 1: there is no rule named 'nosuch'"),
        ('root ::= "a"\n  nosuch ::= x\nx ::= nosuch', "line 2: rule 'nosuch' never ends"),
        ("root ::= root", "line 1: rule 'root' never ends"),
        ('root ::= "a"\nb ::= "x"\nb ::= "y"', "line 3: rule 'b' is there already, on line 2"),
        ('a ::= "a"', "no rule named root"),
        (r'root ::= "a"' + "\n" + r'b ::= "\q"', r"line 2: expected \\t"),
        (r'root ::= "\u00e"', r"line 1: expected 4 hexadecimal digits after \\u"),
        (r'root ::= "\x4"', "2 hexadecimal digits"),
        (r'root ::= "\ud800"', "0xd800 is no Unicode character"),
        (r'root ::= "\U00110000"', "0x110000 is no Unicode character"),
        ("root ::= [z-a]", "line 1: the range from 'z' to 'a' is empty"),
        ("root ::= []", "line 1: a set without characters"),
        (r"root ::= [^\x00-\U0010FFFF]", "set without characters"),
        ('root ::= "a"{3,2}', "is never"),
        ('root ::= "a"{,}', "how often is written"),
        ('root ::= "a"{x}', "how often is written"),
        ('root ::= "a"{12345678}', "999999 times"),
        ('root ::= "a" )', r"line 1: expected a new line, or a part of a rule, not '\)'"),
        ("root ::= *", "line 1: expected a new line"),
        ("root ::= <think>", "tokens cannot be named"),
        ("root ::= " + "(" * 101, "deeper than 100"),
        ('"a"', "line 1: expected the name of a rule"),
    ],
)
def test_invalid_text_raises_with_its_line(grammar: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        compiler().matcher(GBNF(grammar))
    assert "\n" not in str(caught.value)


def test_error_of_the_library_is_reported_with_the_users_line() -> None:
    grammar = GBNF('# twice\n\nroot ::= "x" | "(" root ")" other\n\nother ::= root "y"')
    n = len(grammar.grammar().splitlines())
    assert grammar._error_message(f"at {n}(5): no such thing\n   3 | T1: x\n      ^\n") == (
        "line 5: no such thing"
    )
    assert grammar._error_message("at 1(5): no such thing").startswith("line 3: no such")
    assert grammar._error_message("too large") == "too large"


# The language is exact ---------------------------------------------------------------------------


class Twin:
    """A grammar as nested tuples, written as GBNF and matched by trying everything."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names = ["root", "a", "B", "c-d"][: rng.randint(1, 4)]
        self.rules = {name: self.part(3) for name in self.names}
        for name in self.names:  # each ends
            self.rules[name] = ("either", [self.rules[name], ("text", rng.choice(["", "x", "ab"]))])

    def part(self, depth: int) -> Any:
        rng = self.rng
        kind = rng.choice(["text", "letters", "ref"] + ["chain", "either", "repeat"] * (depth > 0))
        if kind == "text":
            return kind, "".join(rng.choices("ab", k=rng.randint(0, 3)))
        if kind == "letters":
            return kind, rng.choice(["a", "ab", "bx", "^a", "^b", "é"])
        if kind == "ref":
            return kind, rng.choice(self.names)
        if kind == "repeat":
            return kind, self.part(depth - 1), *rng.choice([(0, None), (1, None), (0, 1), (2, 3)])
        return kind, [self.part(depth - 1) for _ in range(rng.randint(1, 3))]

    def text(self) -> str:
        return "\n".join(f"{name} ::= {self.written(part)}" for name, part in self.rules.items())

    def written(self, part: Any) -> str:
        kind, value = part[:2]
        if kind == "text":
            return f'"{value}"'
        if kind == "letters":
            return f"[{value}]"
        if kind == "ref":
            return str(value)
        if kind == "repeat":
            return f"({self.written(value)}){{{part[2]},{'' if part[3] is None else part[3]}}}"
        return "(" + {"chain": " ", "either": " | "}[kind].join(map(self.written, value)) + ")"

    def takes(self, text: str) -> bool:
        """Compute the ends of every rule from every place, until no new end appears."""
        ends_of: dict[tuple[str, int], frozenset[int]] = {}
        before = None
        while before != ends_of:
            before = dict(ends_of)
            for name, at in product(self.names, range(len(text) + 1)):
                ends_of[name, at] = self.ends(self.rules[name], text, at, before)
        return len(text) in ends_of["root", 0]

    def ends(self, part: Any, text: str, at: int, ends_of: Any) -> frozenset[int]:
        kind, value = part[:2]
        if kind == "text":
            return frozenset([at + len(value)] if text.startswith(value, at) else [])
        if kind == "letters":
            character = text[at : at + 1]
            fits = character and ((character in value) != value.startswith("^"))
            return frozenset([at + 1] if fits else [])
        if kind == "ref":
            return ends_of.get((value, at), frozenset())
        if kind == "either":
            return frozenset().union(*(self.ends(each, text, at, ends_of) for each in value))
        if kind == "chain":
            places = frozenset([at])
            for inner in value:
                places = frozenset().union(*(self.ends(inner, text, p, ends_of) for p in places))
            return places
        n_min, n_max = part[2:]
        places, all_places = frozenset([at]), frozenset([at] if n_min == 0 else [])
        for times in range(1, (len(text) + 2 if n_max is None else n_max) + 1):
            places = frozenset().union(*(self.ends(value, text, p, ends_of) for p in places))
            all_places |= places if times >= n_min else frozenset()
        return all_places


@pytest.mark.parametrize("seed", one_in(4, range(40)))
def test_random_grammar_accepts_the_texts_of_an_exhaustive_search(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        twin = Twin(rng)
        texts = ["".join(characters) for n in range(5) for characters in product("abx", repeat=n)]
        texts = rng.sample(texts, 40) + ["é", "aé", "", "a", "ab"]
        expected = [twin.takes(text) for text in texts]
        assert takes(twin.text(), *texts) == expected, twin.text()


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""


def test_grammar_of_llama_cpp_keeps_its_strings_as_lexemes() -> None:
    """Strings and numbers stay lexemes: only ambiguous parts are split."""
    good = ['{"a" : [1.5e3 ,-2,{}], "b": "x\\"\\u00e9🙂", "c":{"d":true}} ', "{}", '{"a":\n  null}']
    assert takes(JSON, *good) == [True] * 3
    assert takes(JSON, "[]", '{"a"}', '{"a":01}', '{"a":1,}', '{"a":"\n"}') == [False] * 5
    from weft.constraints.gbnf import as_lark

    lark, lines = as_lark(JSON)
    assert len(lark.splitlines()) == len(lines)
    assert max(map(len, lark.splitlines())) > 60
    words = [line for line in lark.splitlines() if line[0] in "TL"]
    assert any("22" in line and "5c" in line and "){0,}" in line for line in words)


@pytest.mark.programs
def test_long_and_deep_grammars_are_parsed_in_time() -> None:
    for n, is_refused in ((150, False), (3_000, True)):  # llguidance would crash
        rules = [f'r{i} ::= "a" r{i + 1}?' for i in range(n)]
        chain = "\n".join([*rules, f'r{n} ::= "b"', "root ::= r0"])
        for text in (chain, chain.replace(f'r{n} ::= "b"', f'r{n} ::= "b" | "c" root')):
            if is_refused:
                with pytest.raises(GrammarError, match="levels deep"):
                    takes(text, "a")
            else:
                assert takes(text, "a" * 20, "b") == [True, False]
    # A lexeme of rules in rules is taken apart unseen, and so are all where there are hundreds.
    deep = "\n".join(f'd{i} ::= "a"? d{i + 1}' for i in range(70)) + "\nd70 ::= [b-c]"
    assert takes(f'root ::= d0 | "(" root ")" root\n{deep}', "(aab)c", "(a)b") == [True, False]
    many = " | ".join(f'"<{i}>" root "</{i}>"' for i in range(400))
    assert takes(f'root ::= "x" | {many}', "<7><70>x</70></7>", "<7>x</70>") == [True, False]
    words = " | ".join(f'"{a}{b}{c}"' for a, b, c in product(string.ascii_lowercase[:15], repeat=3))
    assert takes(f"root ::= {words}", "abc", "ab") == [True, False]
    assert takes(f"root ::= ({words}) root?", "abcdef", "ab") == [True, False]
