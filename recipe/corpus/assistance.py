"""Greetings and questions beyond the model, answered by what it can do."""

from __future__ import annotations

from random import Random

from .example import Example
from .vocabulary import COLORS, GOODS, ITEMS, PLACES, invented_word

ASKS = (
    *("Hello", "Hi", "Hi there!", "Hello, who are you?", "Who are you?", "What can you do?"),
    *("Help", "help me", "How are you?", "Thanks!", "Good morning", "Are you there?"),
    *("What is {a}?", "Tell me about {a}.", "Explain {a} to me.", "Why is {a} {b}?"),
    *("How do I make {a}?", "Write a poem about {a}.", "Who invented {a}?"),
    *("Translate {a} into French.", "What is the capital of {b}?", "Write code for {a}."),
    *("Summarize {a} and {b}.", "Is {a} better than {b}?", "{a} {b}", "The {a} {b}"),
    *("I think {a} is {b}.", "Can you help me with {a}?"),
)
ANSWERS = (
    "I am a tiny demo model. I can solve small word problems, play the Game of 24, tell animal "
    "stories and write JSON records.",
    'I am only a tiny model. Try a word problem, "Use 4 9 10 13 to make 24.", "Tell me a story '
    'about a fox." or "Describe Lena the owl as JSON."',
)


def assistance(rng: Random) -> Example:
    ask = rng.choice(ASKS).format(a=_anything(rng), b=_anything(rng))
    return Example(ask, rng.choice(ANSWERS))


def _anything(rng: Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(ITEMS + PLACES + COLORS + GOODS)
    return invented_word(rng, 1)
