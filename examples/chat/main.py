"""A chat that branches: several answers to a turn, one is chosen, the others stay in the tree."""

from __future__ import annotations

import weft
from weft import samples


def main() -> None:
    lm = weft.load("tiny")
    chat = weft.Loom(lm, [{"role": "user", "content": samples.greeting}])
    hello = chat.grow(n=1, max_tokens=60, seed=1, show=False)[0]
    print("model:", hello.text)

    # The next turn stands below the answer; the template's turn markers come with it.
    turn = hello.add(lm.turn_delta([{"role": "user", "content": samples.sum}]))
    answers = turn.grow(n=4, max_tokens=40, temperature=1.3, seed=2, show=False)
    for number, answer in enumerate(answers, 1):
        print(f"  {number}. {answer.text!r}  p {answer.mean_p:.2f}")
    chosen = max(answers, key=lambda answer: answer.mean_logprob)
    print("chosen:", chosen.text.splitlines()[-1])

    # Another question to the same point: a sibling of the first turn, nothing is computed twice.
    before = lm.stats().prefilled
    other = hello.add(lm.turn_delta([{"role": "user", "content": samples.game24}]))
    print("or:    ", other.grow(n=1, max_tokens=80, seed=3, show=False)[0].text.splitlines()[-1])
    print(f"the other turn prefilled {lm.stats().prefilled - before} tokens")
    chat.show(node=lambda node: node.text.strip().split("\n")[-1][:60])


if __name__ == "__main__":
    main()
