"""Rules of a grammar, whatever they are written in, and which parts may be lexemes.

A text that one lexeme matches may be the beginning of what another matches, or of more of the same.
The longest is the right one unless the next letter may also come after the lexeme: then the two are
taken apart, at the end into single letters, which are all of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

Range = tuple[int, int]
T = TypeVar("T")

# Levels that things stand in each other, rules that lead to rules included. llguidance goes down by
# recursion, and at a few thousand its stack ends, and the process with it.
DEEPEST = 600


@dataclass(frozen=True, slots=True, eq=False)
class Letters:
    """One letter of some ranges, both ends included, in order."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RuleChain:
    """Parts, one after the other."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Either:
    """One of some parts."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """A part some times; most: None for any number."""

    part: Part
    least: int
    most: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Ref:
    """What a rule says."""

    name: str
    line: int


Part = Letters | RuleChain | Either | Repeat | Ref


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A rule, and the line that its name stands on."""

    name: str
    body: Part
    line: int


def inside(part: Part) -> tuple[Part, ...]:
    """Return the parts directly inside a part; letters and references have none."""
    if isinstance(part, RuleChain | Either):
        return part.parts
    return (part.part,) if isinstance(part, Repeat) else ()


def is_too_deep(start: T, inner: Callable[[T], Iterable[T]]) -> bool:
    """Whether going down from an object, each of which is visited once, goes below DEEPEST."""
    seen = {id(start)}
    path = [iter(inner(start))]
    while path:
        if len(path) > DEEPEST:
            return True
        for each in path[-1]:
            if id(each) not in seen:
                seen.add(id(each))
                path.append(iter(inner(each)))
                break
        else:
            path.pop()
    return False


def parts_of(part: Part, kind: type[T]) -> Iterator[T]:
    """Yield all parts of a kind in a part."""
    todo = [part]
    while todo:
        each = todo.pop()
        if isinstance(each, kind):
            yield each
        todo += inside(each)


def passing(rules: Mapping[str, Rule], test: Callable[[Part, Container[str]], bool]) -> set[str]:
    """Return the rules that pass a test, where rules that pass help others to."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    for rule in rules.values():
        for ref in parts_of(rule.body, Ref):
            users[ref.name].append(rule.name)
    known: set[str] = set()
    todo = list(rules)
    while todo:
        name = todo.pop()
        if name not in known and test(rules[name].body, known):
            known.add(name)
            todo += users[name]
    return known


def ends(part: Part, known: Container[str]) -> bool:
    """Whether some text of a part ends, if those of known rules do."""
    if isinstance(part, Ref):
        return part.name in known
    if isinstance(part, Either):
        return any(ends(each, known) for each in part.parts)
    if isinstance(part, Repeat) and not part.least:
        return True
    return all(ends(each, known) for each in inside(part))


def is_flat(part: Part, known: Container[str]) -> bool:
    """Whether a part leads to no recursion, if known rules do not."""
    return all(ref.name in known for ref in parts_of(part, Ref))


_MOST = 60_000  # letters in a lexeme that is looked at; a larger one is taken apart
_DEEPEST = 60  # rules in rules in it
_WORK = 200_000  # places that are looked at to compare two lexemes
_LEXEMES = 300  # lexemes that are compared; of more, all are taken apart


@dataclass(frozen=True, slots=True)
class Lexeme:
    """Parts in a row that are matched as one regular expression. of: what they are parts of."""

    parts: tuple[Part, ...]
    of: Part


@dataclass(frozen=True, slots=True, eq=False)
class Compound:
    """A chain, an either or a repeat of which not all is one lexeme."""

    of: Part
    parts: tuple[Compound | Lexeme | Ref, ...]


Cut = Compound | Lexeme | Ref


class Lexemes:
    """The cut of a grammar into lexemes: `shape` of what rules say.

    open_rules: the rules that are not matched as regular expressions, root first, if it is.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self.rules = rules
        self._flat = passing(rules, is_flat)
        self._apart: set[int] = set()  # ids of parts that are no lexemes though they could be
        self._masks = _masks(rules)
        self._automata: dict[Lexeme, _Automaton | None] = {}
        self.open_rules: list[str] = []
        self._shapes: dict[str, Cut] = {}
        while True:
            self._cut()
            wrong = self._wrong()
            if not wrong:
                break
            for lexeme in wrong:
                self._take_apart(lexeme)

    def shape(self, part: Part) -> Cut:
        """Return a part with its lexemes marked."""
        if self._is_lexeme(part):
            return Lexeme((part,), part)
        if isinstance(part, Ref):
            return part
        if not isinstance(part, RuleChain) or id(part) in self._apart:
            return Compound(part, tuple(self.shape(each) for each in inside(part)))
        found: list[Cut] = []
        run: list[Part] = []
        for each in part.parts:
            if self._is_lexeme(each):
                run.append(each)
                continue
            found += [Lexeme(tuple(run), part)] * bool(run) + [self.shape(each)]
            run = []
        return Compound(part, tuple(found + [Lexeme(tuple(run), part)] * bool(run)))

    def _is_lexeme(self, part: Part) -> bool:
        return id(part) not in self._apart and is_flat(part, self._flat)

    def _take_apart(self, lexeme: Lexeme) -> None:
        """Make more lexemes of one. The rules that are referred to are then open."""
        (part, *more) = lexeme.parts
        if more:
            self._apart.add(id(lexeme.of))
        elif isinstance(part, Ref):
            self._flat.discard(part.name)
        else:
            self._apart.add(id(part))

    def _cut(self) -> None:
        """Find all that is reached from the root, as it is cut now."""
        root = Ref("root", self.rules["root"].line)
        self.open_rules, self._shapes = [], {"": self.shape(root)}
        todo = [self._shapes[""]]
        while todo:
            shape = todo.pop()
            if isinstance(shape, Compound):
                todo += shape.parts
            elif isinstance(shape, Ref) and shape.name not in self._shapes:
                self.open_rules.append(shape.name)
                self._shapes[shape.name] = self.shape(self.rules[shape.name].body)
                todo.append(self._shapes[shape.name])

    # What may come after a lexeme ----------------------------------------------------------------

    def _wrong(self) -> list[Lexeme]:
        """Return the lexemes of which a longest one can be wrong; one letter never is."""
        if not self.open_rules:
            return []
        after = self._after()
        large = [each for each in after if self._automaton(each) is None]
        if large or len(after) > _LEXEMES:
            return large or [each for each in after if _can_be_cut(each)]
        wrong: dict[Lexeme, None] = {}
        for one, letters in after.items():
            for other in after:
                if self._crosses(one, other, letters):
                    wrong |= dict.fromkeys(each for each in (one, other) if _can_be_cut(each))
        return list(wrong)

    def _crosses(self, one: Lexeme, other: Lexeme, after: int) -> bool:
        """Whether `other` may go on with a letter that may come after `one`, which it begins with.

        Both are walked side by side, from letter to letter: where each may be after the same text.
        """
        short, long = self._automaton(one), self._automaton(other)
        assert short is not None
        assert long is not None
        todo = [(short.first, long.first)]
        seen = set[tuple[frozenset[int], frozenset[int]]]()
        work = 0
        while todo:
            state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            work += len(state[0]) + len(state[1])
            if work > _WORK:
                return True
            there = long.by_letter(state[1])
            for letter, p in short.by_letter(state[0]).items():
                if letter in there:
                    goes_on = long.after(there[letter])
                    if not p.isdisjoint(short.last) and long.mask(goes_on) & after:
                        return True
                    todo.append((short.after(p), goes_on))
        return False

    def _after(self) -> dict[Lexeme, int]:
        """Return for every lexeme the letters that may come after it, as bits."""
        first = self._first()
        after: dict[str, int] = dict.fromkeys(self._shapes, 0)
        found: dict[Lexeme, int] = {}

        def walk(shape: Cut, then: int) -> None:
            if isinstance(shape, Lexeme):
                found[shape] = found.get(shape, 0) | then
            elif isinstance(shape, Ref):
                after[shape.name] |= then
            elif isinstance(shape.of, RuleChain):
                for part in reversed(shape.parts):
                    walk(part, then)
                    begins, is_empty = self._begins(part, first)
                    then = begins | then if is_empty else begins
            else:
                again = isinstance(shape.of, Repeat) and shape.of.most != 1
                for part in shape.parts:
                    walk(part, then | self._begins(part, first)[0] if again else then)

        before = None
        while before != (after, found):
            before = (dict(after), dict(found))
            for name, shape in self._shapes.items():
                walk(shape, after[name])
        return found

    def _first(self) -> dict[str, tuple[int, bool]]:
        """Return for every open rule the letters it may begin with, and whether it may be empty."""
        found = dict.fromkeys(self._shapes, (0, False))
        before = None
        while before != found:
            before = dict(found)
            for name, shape in self._shapes.items():
                found[name] = self._begins(shape, found)
        return found

    def _begins(self, shape: Cut, known: Mapping[str, tuple[int, bool]]) -> tuple[int, bool]:
        if isinstance(shape, Lexeme):
            made = self._automaton(shape)
            if made is None:
                return -1, True
            return made.mask(made.first), made.is_empty
        if isinstance(shape, Ref):
            return known[shape.name]
        parts = [self._begins(each, known) for each in shape.parts]
        letters = 0
        if isinstance(shape.of, RuleChain):
            for begins, is_empty in parts:
                letters |= begins
                if not is_empty:
                    return letters, False
            return letters, True
        for begins, _ in parts:
            letters |= begins
        is_empty = any(each for _, each in parts)
        return letters, is_empty or (isinstance(shape.of, Repeat) and not shape.of.least)

    def _automaton(self, lexeme: Lexeme) -> _Automaton | None:
        if lexeme not in self._automata:
            made: _Automaton | None = _Automaton(self.rules, self._masks)
            try:
                assert made is not None
                made.take(RuleChain(lexeme.parts))
            except _TooLargeError:
                made = None
            self._automata[lexeme] = made
        return self._automata[lexeme]


Ends = tuple[bool, frozenset[int], frozenset[int]]


class _TooLargeError(Exception):
    """A lexeme that is not looked at."""


class _Automaton:
    """The letters of a lexeme, and which may come after which (Glushkov's construction).

    A part that comes some times is taken to come any number of times, which crosses no less.
    """

    def __init__(self, rules: Mapping[str, Rule], masks: Mapping[Letters, int]) -> None:
        self.rules = rules
        self.masks = masks
        self.letters: list[int] = []
        self.follow: list[list[frozenset[int]]] = []  # shared, as many places are followed by many
        self.first: frozenset[int] = frozenset()
        self.last: frozenset[int] = frozenset()
        self.is_empty = False

    def take(self, part: Part) -> None:
        """Read a part: where its texts begin and end, and whether one is empty."""
        self.is_empty, self.first, self.last = self._of(part, 0)

    def mask(self, places: Iterable[int]) -> int:
        """Return the letters of some places."""
        made = 0
        for place in places:
            made |= self.letters[place]
        return made

    def after(self, places: Iterable[int]) -> frozenset[int]:
        """Return the places that may come after some."""
        found = {id(each): each for place in places for each in self.follow[place]}
        return frozenset().union(*found.values())

    def by_letter(self, places: Iterable[int]) -> dict[int, frozenset[int]]:
        """Return for each letter the places among some that have it."""
        found: dict[int, set[int]] = {}
        for place in places:
            for letter in _bits(self.letters[place]):
                found.setdefault(letter, set()).add(place)
        return {letter: frozenset(each) for letter, each in found.items()}

    def _of(self, part: Part, depth: int) -> Ends:
        """Return whether a part may be empty, and the places it may begin and end at."""
        if depth > _DEEPEST or len(self.letters) > _MOST:
            raise _TooLargeError
        if isinstance(part, Letters):
            self.letters.append(self.masks[part])
            self.follow.append([])
            place = frozenset([len(self.letters) - 1])
            return False, place, place
        if isinstance(part, Ref):
            return self._of(self.rules[part.name].body, depth + 1)
        made = [self._of(each, depth + 1) for each in inside(part)]
        if isinstance(part, Either):
            first = frozenset[int]().union(*(first for _, first, _ in made))
            last = frozenset[int]().union(*(last for _, _, last in made))
            return any(is_empty for is_empty, _, _ in made), first, last
        if isinstance(part, Repeat):
            ((is_empty, first, last),) = made
            if part.most == 0:
                return True, frozenset(), frozenset()
            if part.most != 1:
                self._join(last, first)
            return is_empty or not part.least, first, last
        return self._chained(made)

    def _chained(self, made: list[Ends]) -> Ends:
        is_empty, first, last = True, frozenset[int](), frozenset[int]()
        for each_is_empty, each_first, each_last in made:
            self._join(last, each_first)
            if is_empty:
                first = first | each_first
            last = last | each_last if each_is_empty else each_last
            is_empty = is_empty and each_is_empty
        return is_empty, first, last

    def _join(self, last: frozenset[int], first: frozenset[int]) -> None:
        for place in last:
            self.follow[place].append(first)


@lru_cache(maxsize=4096)
def _bits(mask: int) -> tuple[int, ...]:
    return tuple(bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def _can_be_cut(lexeme: Lexeme) -> bool:
    return len(lexeme.parts) > 1 or not isinstance(lexeme.parts[0], Letters)


def _masks(rules: Mapping[str, Rule]) -> dict[Letters, int]:
    """Return bits for the letters of each place: a bit stands for letters that no place parts."""
    places = [each for rule in rules.values() for each in parts_of(rule.body, Letters)]
    borders = sorted({code for each in places for a, b in each.ranges for code in (a, b + 1)})
    at = {code: bit for bit, code in enumerate(borders)}
    return {each: sum((1 << at[b + 1]) - (1 << at[a]) for a, b in each.ranges) for each in places}
