"""Kinds of word problem. Each draws its numbers, and returns None when they make no sense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from .arithmetic import step
from .vocabulary import GOODS, ITEMS, number, person


class Step(NamedTuple):
    """One line of a solution: what is worked out, and how."""

    text: str
    left: int
    op: str
    right: int

    @property
    def result(self) -> int:
        return step(self.left, self.op, self.right)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and the steps to its answer, which is the last step's result."""

    text: str
    steps: list[Step]

    @property
    def answer(self) -> int:
        return self.steps[-1].result


Template = Callable[[Random], Problem | None]


def shoes(rng: Random) -> Problem | None:
    who = person(rng)
    months, allowance = rng.randint(2, 6), rng.choice([5, 10, 4, 6, 8])
    mow, shovel = rng.randint(8, 20), rng.randint(3, 12)
    lawns, driveways, change = rng.randint(2, 6), rng.randint(2, 9), rng.randint(2, 20)
    cost = months * allowance + mow * lawns + shovel * driveways - change
    if cost < 15:
        return None
    goods = rng.choice(GOODS)
    text = (
        f"{who.name} is buying a new pair of {goods} that costs ${cost}. {who.He} has been saving "
        f"up {who.his} money each month for the past {number(rng, months)} months. {who.He} gets a "
        f"${allowance} allowance a month. {who.He} also mows lawns and shovels driveways. {who.He} "
        f"charges ${mow} to mow a lawn and ${shovel} to shovel. After buying the {goods}, {who.he} "
        f"has ${change} in change. If {who.he} mows {number(rng, lawns)} lawns, how many driveways "
        f"did {who.he} shovel?"
    )
    total, saved = cost + change, months * allowance
    steps = [
        Step(f"In total {who.he} had", cost, "+", change),
        Step(f"The allowance gave {who.him}", months, "*", allowance),
        Step("The lawns gave", lawns, "*", mow),
        Step("Without the allowance that is", total, "-", saved),
        Step("Without the lawns that is", total - saved, "-", lawns * mow),
        Step("The number of driveways is", shovel * driveways, "/", shovel),
    ]
    return Problem(text, steps)


def buy(rng: Random) -> Problem:
    who = person(rng)
    one, other = rng.sample(ITEMS, 2)
    n_one, n_other = rng.randint(2, 12), rng.randint(2, 12)
    price_one, price_other = rng.randint(2, 9), rng.randint(2, 9)
    cost_one, cost_other = n_one * price_one, n_other * price_other
    paid = cost_one + cost_other + rng.randint(1, 40)
    forms = [
        f"{who.name} buys {number(rng, n_one)} {one} for ${price_one} each and "
        f"{number(rng, n_other)} {other} for ${price_other} each. {who.He} pays with ${paid}. How "
        f"much change does {who.he} get?",
        f"A shop sells {one} at ${price_one} each and {other} at ${price_other} each. {who.name} "
        f"takes {number(rng, n_one)} {one} and {number(rng, n_other)} {other} and hands over "
        f"${paid}. How many dollars does {who.he} get back?",
    ]
    steps = [
        Step(f"The {one} cost", n_one, "*", price_one),
        Step(f"The {other} cost", n_other, "*", price_other),
        Step("Together they cost", cost_one, "+", cost_other),
        Step("The change is", paid, "-", cost_one + cost_other),
    ]
    return Problem(rng.choice(forms), steps)


def give(rng: Random) -> Problem | None:
    who, friend = person(rng), person(rng)
    item = rng.choice(ITEMS)
    boxes, each = rng.randint(2, 12), rng.randint(3, 12)
    given, n_more = rng.randint(2, 20), rng.randint(2, 20)
    total = boxes * each
    if total <= given:
        return None
    text = (
        f"{who.name} has {number(rng, boxes)} boxes with {number(rng, each)} {item} in each. "
        f"{who.He} gives {number(rng, given)} {item} to {friend.name} and then finds "
        f"{number(rng, n_more)} more. How many {item} does {who.name} have now?"
    )
    steps = [
        Step(f"At first {who.he} has", boxes, "*", each),
        Step(f"After giving some to {friend.name} {who.he} has", total, "-", given),
        Step(f"After finding more {who.he} has", total - given, "+", n_more),
    ]
    return Problem(text, steps)


def share(rng: Random) -> Problem:
    who = person(rng)
    item = rng.choice(ITEMS)
    friends, each, kept = rng.randint(2, 9), rng.randint(2, 12), rng.randint(1, 15)
    shared = friends * each
    text = (
        f"{who.name} picks {number(rng, shared + kept)} {item} and keeps {number(rng, kept)} of "
        f"them. {who.He} shares the rest equally among {number(rng, friends)} friends. How many "
        f"{item} does each friend get?"
    )
    steps = [
        Step("To share there are", shared + kept, "-", kept),
        Step("Each friend gets", shared, "/", friends),
    ]
    return Problem(text, steps)


def age(rng: Random) -> Problem | None:
    a, b, c = person(rng).name, person(rng).name, person(rng).name
    if len({a, b, c}) < 3:
        return None
    years, times, less = rng.randint(3, 15), rng.randint(2, 4), rng.randint(2, 9)
    text = (
        f"{a} is {number(rng, years)} years old. {b} is {number(rng, times)} times as old as {a}. "
        f"{c} is {number(rng, less)} years younger than {b}. How old is {c}?"
    )
    return Problem(
        text, [Step(f"{b} is", years, "*", times), Step(f"{c} is", years * times, "-", less)]
    )


def trip(rng: Random) -> Problem:
    who = person(rng)
    fast, hours = rng.randint(3, 20), rng.randint(2, 6)
    slow, more = rng.randint(3, 20), rng.randint(2, 6)
    text = (
        f"{who.name} rides {number(rng, hours)} hours at {fast} miles an hour and then "
        f"{number(rng, more)} hours at {slow} miles an hour. How many miles does {who.he} ride in "
        f"all?"
    )
    return Problem(text, _two_parts(hours, fast, more, slow))


def week(rng: Random) -> Problem | None:
    who = person(rng)
    pay, days, weeks, spent = (
        rng.randint(4, 20),
        rng.randint(3, 7),
        rng.randint(2, 6),
        rng.randint(10, 60),
    )
    if pay * days * weeks <= spent:
        return None
    text = (
        f"{who.name} earns ${pay} a day and works {number(rng, days)} days a week. After "
        f"{number(rng, weeks)} weeks {who.he} spends ${spent}. How many dollars does {who.he} have "
        f"left?"
    )
    steps = [
        Step(f"In a week {who.he} earns", pay, "*", days),
        Step(f"In all {who.he} earns", pay * days, "*", weeks),
        Step("What is left is", pay * days * weeks, "-", spent),
    ]
    return Problem(text, steps)


def pages(rng: Random) -> Problem:
    who = person(rng)
    first, days, more = rng.randint(5, 25), rng.randint(2, 6), rng.randint(2, 12)
    then = rng.randint(3, 15)
    total = first * days + then * more
    text = (
        f"A book has {total} pages. {who.name} reads {number(rng, first)} pages a day for "
        f"{number(rng, days)} days and then {number(rng, then)} pages a day until the end. How "
        f"many more days does {who.he} need?"
    )
    steps = [
        Step(f"First {who.he} reads", first, "*", days),
        Step("Still to read are", total, "-", first * days),
        Step("The days needed are", then * more, "/", then),
    ]
    return Problem(text, steps)


def farm(rng: Random) -> Problem | None:
    who = person(rng)
    hens, eggs, days = rng.randint(3, 12), rng.randint(2, 6), rng.randint(2, 7)
    eaten, price = rng.randint(1, 15), rng.randint(2, 5)
    n_eggs = hens * eggs * days
    if n_eggs <= eaten:
        return None
    text = (
        f"{who.name} has {number(rng, hens)} hens and each hen lays {number(rng, eggs)} eggs a "
        f"day. In {number(rng, days)} days {who.he} eats {number(rng, eaten)} eggs and sells the "
        f"rest for ${price} each. How many dollars does {who.he} make?"
    )
    steps = [
        Step("In a day there are", hens, "*", eggs),
        Step("In all there are", hens * eggs, "*", days),
        Step("Left to sell are", n_eggs, "-", eaten),
        Step("The money made is", n_eggs - eaten, "*", price),
    ]
    return Problem(text, steps)


def half(rng: Random) -> Problem:
    who = person(rng)
    item = rng.choice(ITEMS)
    had, bought, times = rng.randint(4, 40) * 2, rng.randint(2, 15), rng.randint(2, 4)
    text = (
        f"{who.name} had {had} {item}. {who.He} lost half of them, bought {number(rng, bought)} "
        f"more and then made the number {number(rng, times)} times as large. How many {item} does "
        f"{who.he} have?"
    )
    steps = [
        Step(f"After losing half {who.he} has", had, "/", 2),
        Step(f"After buying more {who.he} has", had // 2, "+", bought),
        Step(f"At the end {who.he} has", had // 2 + bought, "*", times),
    ]
    return Problem(text, steps)


def large_buy(rng: Random) -> Problem:
    who = person(rng)
    item = rng.choice(ITEMS)
    n, price = rng.randint(12, 99), rng.randint(12, 99)
    paid = n * price + rng.randint(5, 900)
    text = (
        f"{who.name} buys {n} {item} for ${price} each and pays with ${paid}. How much change does "
        f"{who.he} get?"
    )
    return Problem(
        text, [Step(f"The {item} cost", n, "*", price), Step("The change is", paid, "-", n * price)]
    )


def large_trip(rng: Random) -> Problem:
    person(rng)  # no person rides this train; the draw keeps the stream of random numbers as it was
    fast, hours = rng.randint(21, 95), rng.randint(6, 19)
    slow, more = rng.randint(21, 95), rng.randint(6, 19)
    text = (
        f"A train runs {hours} hours at {fast} miles an hour and then {more} hours at {slow} miles "
        f"an hour. How many miles does it run in all?"
    )
    return Problem(text, _two_parts(hours, fast, more, slow))


def large_farm(rng: Random) -> Problem | None:
    who = person(rng)
    rows, per_row = rng.randint(11, 40), rng.randint(11, 40)
    baskets, lost = rng.randint(3, 12), rng.randint(20, 400)
    trees = rows * per_row
    if trees * baskets <= lost:
        return None
    text = (
        f"{who.name} plants {rows} rows of {per_row} trees. Each tree gives {baskets} baskets of "
        f"fruit, but {lost} baskets go bad. How many good baskets does {who.he} have?"
    )
    steps = [
        Step("The number of trees is", rows, "*", per_row),
        Step("The baskets in all are", trees, "*", baskets),
        Step("The good baskets are", trees * baskets, "-", lost),
    ]
    return Problem(text, steps)


def _two_parts(hours: int, fast: int, more: int, slow: int) -> list[Step]:
    return [
        Step("The first part is", hours, "*", fast),
        Step("The second part is", more, "*", slow),
        Step("In all that is", hours * fast, "+", more * slow),
    ]


# Twice in the list: drawn twice as often.
SMALL: tuple[Template, ...] = (
    *(shoes, shoes, buy, buy, give, share),
    *(age, trip, week, pages, farm, half),
)
LARGE: tuple[Template, ...] = (large_buy, large_trip, large_farm)
