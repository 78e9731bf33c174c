"""A chat that branches: several answers to a turn, one is chosen, the others stay in the tree."""

from __future__ import annotations

import argparse

import weft
from weft import samples


def main(model: str = "tiny") -> None:
    lm = weft.load(model)
    chat = weft.Loom(lm, [{"role": "user", "content": samples.greeting}])
    hello = chat.grow(n=1, max_tokens=60, seed=1, show=False)[0]
    print("model:", hello.text)

    # The next turn stands below the answer; the template's turn markers come with it.
    turn = hello.add(lm.turn_delta([{"role": "user", "content": samples.large_problem}]))
    answers = turn.grow(n=4, max_tokens=120, temperature=1.5, seed=2, show=False)
    for number, answer in enumerate(answers, 1):
        print(f"  {number}. {answer.text.splitlines()[-1]}  mean logprob {answer.mean_logprob:.2f}")
    chosen = max(answers, key=lambda answer: answer.mean_logprob)
    print("likeliest answer:", chosen.text.splitlines()[-1])

    # Another question to the same point: a sibling of the first turn, nothing is computed twice.
    before = lm.stats()
    other = hello.add(lm.turn_delta([{"role": "user", "content": samples.game24}]))
    (answer,) = other.grow(n=1, max_tokens=80, seed=3, show=False)
    print("to another question:", answer.text.splitlines()[-1])
    computed = lm.stats().prefilled - before.prefilled
    print(f"the other turn computed {computed} of its {len(other.get_prefix_tokens())} tokens")
    chat.show(node=lambda node: node.text.strip().split("\n")[-1][:60])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a name, folder or file for weft.load")
    main(parser.parse_args().model)
