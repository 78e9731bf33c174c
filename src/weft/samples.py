"""Prompts that the embedded model answers well; examples, tests and the demo use these.

Each is a plain string for the chat template: `weft.Loom(lm, samples.game24)`. `opening` is a text
to continue without it: `template=False`, or `--raw`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# From GSM8K (MIT licence, see NOTICE); the right answer is 5.
word_problem = (
    "Tobias is buying a new pair of shoes that costs $95. He has been saving up his money each "
    "month for the past three months. He gets a $5 allowance a month. He also mows lawns and "
    "shovels driveways. He charges $15 to mow a lawn and $7 to shovel. After buying the shoes, he "
    "has $15 in change. If he mows 4 lawns, how many driveways did he shovel?"
)
# Large numbers: some samples slip, the majority does not; the right answer is 1216.
large_problem = (
    "Nina plants 24 rows of 18 trees. Each tree gives 3 baskets of fruit, but 80 baskets go bad. "
    "How many good baskets does she have?"
)
# The Tree of Thoughts paper's own example: (13 - 9) * (10 - 4), or 4 * (9 - (13 - 10)).
game24 = "Use 4 9 10 13 to make 24."
# The likeliest text ends in a wrong answer; a search finds 11 + (4 + (3 * 3)).
hard24 = "Use 3 3 4 11 to make 24."
verdict = "Can 4 4 10 make 24?"
step = "Suggest a step from 4 9 10 13."
story = "Tell me a story about a fox."
opening = "Once upon a time"
record = "Describe Lena the owl as JSON."
sum = "What is 37 + 58?"
greeting = "Hello, who are you?"

ALL: Mapping[str, str] = MappingProxyType(
    {
        "word_problem": word_problem,
        "large_problem": large_problem,
        "game24": game24,
        "hard24": hard24,
        "verdict": verdict,
        "step": step,
        "story": story,
        "opening": opening,
        "record": record,
        "sum": sum,
        "greeting": greeting,
    }
)
