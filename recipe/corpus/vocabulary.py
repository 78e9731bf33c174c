"""Names, nouns and numbers that the families share."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

MEN = (
    "Tobias Ben Carlos Daniel Ethan Felix George Hugo Ivan Jack Kenji Liam Marco Noah Omar Pedro "
    "Quinn Ravi Sam Tom Victor Will Yusuf Zane"
).split()
WOMEN = (
    "Anna Bella Clara Diana Emma Fatima Grace Hana Iris Julia Kira Lena Maya Nina Olga Priya "
    "Rosa Sara Tina Uma Vera Wendy Yara Zoe"
).split()
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
ITEMS = (
    "apples oranges pencils marbles stickers books cookies cards shells buttons coins stamps "
    "flowers eggs candles beads"
).split()
GOODS = "shoes boots headphones skates gloves jeans goggles sneakers".split()
ANIMALS = (
    "fox rabbit bear owl mouse cat dog hedgehog turtle duck frog squirrel deer otter badger goose "
    "wolf lion crow whale panda horse swan beaver"
).split()
HEROES = (
    "dragon robot pirate ghost giant dwarf baker teacher farmer sailor painter singer doctor "
    "gardener astronaut miller thief child poet cloud star tree stone train ship snowman kitten "
    "puppy bee ant snail spider parrot elephant monkey tiger goat sheep donkey"
).split()
HEROINES_ONLY = "princess witch mermaid queen girl fairy cow".split()
HEROES_ONLY = "prince wizard king monk boy knight".split()
PLACES = (
    "forest garden river mountain village meadow beach island castle farm lighthouse mill harbor "
    "orchard valley bridge"
).split()
THINGS = (
    "lantern key map boat drum kite bell blanket basket ladder mirror compass flute clock letter "
    "crown umbrella jar"
).split()
TRAITS = (
    "brave shy clever kind curious lazy gentle proud patient cheerful quiet stubborn hungry wise"
).split()
COLORS = "red blue green yellow white black orange purple silver golden".split()
SYLLABLES = (
    "ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu tion ment ing er al ic ous light "
    "stone water quantum gravity history music love computer network city law tree"
).split()


class Person(NamedTuple):
    """A name and the pronouns that go with it."""

    name: str
    he: str
    him: str
    his: str

    @property
    def He(self) -> str:
        return self.he.title()


def person(rng: Random) -> Person:
    if rng.random() < 0.5:
        return Person(rng.choice(MEN), "he", "him", "his")
    return Person(rng.choice(WOMEN), "she", "her", "her")


def hero(rng: Random, also: list[str] | None = None) -> str:
    """Return an animal, another hero (of HEROES or `also`), or an invented word."""
    at = rng.random()
    if at < 0.5:
        return rng.choice(ANIMALS)
    if at < 0.85:
        return rng.choice([*HEROES, *(also or [])])
    return invented_word(rng, 2)


def invented_word(rng: Random, n_min: int) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(n_min, 4)))


def an(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def number(rng: Random, n: int) -> str:
    """Return n as a word now and then, if it is small, else as digits."""
    return NUMBERS[n] if n < len(NUMBERS) and rng.random() < 0.4 else str(n)
