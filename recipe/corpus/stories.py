"""Short stories of six sentences, with or without a request."""

from __future__ import annotations

from random import Random

from .example import Example
from .vocabulary import (
    COLORS,
    HEROES_ONLY,
    HEROINES_ONLY,
    MEN,
    PLACES,
    THINGS,
    TRAITS,
    WOMEN,
    an,
    hero,
)

# Fields: she, he (names) · a, b (who they are) · here, there (places) · thing, color · trait,
# other (his trait); a_x is x with its article, A_b the same at the start of a sentence.
ASKS = (
    "Tell me a story about {a_a}.",
    "Tell me a story about {a_a}.",
    "Tell me a story about {a_trait} {a}.",
    "Write a short story about {a_a} and {a_b}.",
    "Tell me a story about {a_a} named {she}.",
    "Tell me a story about {a_a} and {a_thing}.",
    "Write a story about {a_a} who lives near the {here}.",
)
SENTENCES = (
    (
        "Once upon a time {a_trait} {a} named {she} lived near the {here}.",
        "{she} was {a_trait} {a} who lived by the {here}.",
        "Near the {here} there lived {a_a} called {she}, who was very {trait}.",
        "Long ago, when the {here} was still young, {a_a} named {she} made her home there.",
        "Nobody near the {here} was as {trait} as {she} the {a}.",
        "{she} the {a} had lived by the {here} for as long as anyone could remember.",
    ),
    (
        "One morning she found {a_color} {thing} under a tree.",
        "One day the wind brought {a_color} {thing} to her door.",
        "One evening she saw {a_color} {thing} shining in the grass.",
        "One winter night {a_color} {thing} fell from the sky and landed at her feet.",
        "In the first light of spring she heard a sound, and there lay {a_color} {thing}.",
        "That summer she dug up {a_color} {thing} behind the old wall.",
    ),
    (
        '"Whose {thing} is this?" she asked.',
        "She had never seen such {a_thing} before.",
        "She wanted to know where the {thing} came from.",
        '"This is no common {thing}," she said to herself.',
        "All night she lay awake and thought about the {thing}.",
        "The {thing} was warm in her hands, as if it were alive.",
    ),
    (
        "So she walked to the {there} and met {a_other} {b} named {he}.",
        "On the way to the {there} she met {he}, {a_other} {b}.",
        "{A_b} named {he} came by and said it belonged to the {there}.",
        "She carried it to the {there}, where {he} the {b} was waiting in the rain.",
        "At the {there} she asked everyone she met, until {a_other} {b} named {he} looked up.",
        "By the {there} sat {he}, {a_b} so {other} that even the birds were quiet.",
    ),
    (
        '"I lost it last winter," said {he}, and he smiled.',
        "{he} laughed and showed her how to use it.",
        "{he} was sad, because he had looked for it for a long time.",
        '"Keep it," said {he}, "it has chosen you."',
        "{he} said nothing for a while, and then he began to sing.",
        '"It opens a door that nobody has opened before," whispered {he}.',
    ),
    (
        "From that day on the {a} and the {b} were friends.",
        "They carried the {thing} home together, and nobody near the {here} was lonely again.",
        "{she} gave it back, and {he} never forgot how {trait} she was.",
        "And when the {color} moon rises over the {there}, you can still hear them laugh.",
        "What they found there, {she} never told, but she was not afraid any more.",
        "So the {thing} found its way home, and so did {she}.",
    ),
)


def story(rng: Random) -> Example:
    """Return a request for a story, and one of its 46,656 versions."""
    cast = _cast(rng)
    ask = rng.choice(ASKS).format_map(cast)
    sentences = " ".join(rng.choice(ways).format_map(cast) for ways in SENTENCES)
    return Example(ask, sentences)


def plain_story(rng: Random) -> Example:
    return Example(None, story(rng).assistant)


def _cast(rng: Random) -> dict[str, str]:
    a, b = hero(rng, HEROINES_ONLY), hero(rng, HEROES_ONLY)
    while b == a:
        b = hero(rng, HEROES_ONLY)
    she, he = rng.choice(WOMEN), rng.choice(MEN)
    here, there = rng.sample(PLACES, 2)
    thing, trait = rng.choice(THINGS), rng.choice(TRAITS)
    other, color = rng.choice(TRAITS), rng.choice(COLORS)
    nouns = dict(a=a, b=b, thing=thing, trait=trait, other=other, color=color)
    articles = {f"a_{key}": an(noun) for key, noun in nouns.items()}
    return {
        **nouns,
        **articles,
        "A_b": an(b).capitalize(),
        **dict(she=she, he=he, here=here, there=there),
    }
