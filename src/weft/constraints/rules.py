"""Rules of a grammar, whatever they are written in."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
class Chain:
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


Part = Letters | Chain | Either | Repeat | Ref


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A rule, and the line that its name stands on."""

    name: str
    body: Part
    line: int


def inside(part: Part) -> tuple[Part, ...]:
    """Return the parts of a part."""
    if isinstance(part, Chain | Either):
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


def refs(part: Part) -> Iterator[Ref]:
    """Yield all references in a part."""
    todo = [part]
    while todo:
        each = todo.pop()
        if isinstance(each, Ref):
            yield each
        todo += inside(each)


def passing(rules: Mapping[str, Rule], test: Callable[[Part, Container[str]], bool]) -> set[str]:
    """Return the rules that pass a test, where rules that pass help others to."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    for rule in rules.values():
        for ref in refs(rule.body):
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
    return all(ref.name in known for ref in refs(part))
