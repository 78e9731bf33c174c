"""A pull loop under a grammar: decode to a point, fork there, and let the forks finish."""

from __future__ import annotations

import argparse
import json

import weft
from weft import Branch, BranchStore, samples

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "animal": {"enum": ["owl", "fox", "otter", "bear"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "animal", "age"],
    "additionalProperties": False,
}


def main(model: str = "tiny") -> None:
    lm = weft.load(model)
    store = BranchStore(lm)
    prompt = lm.format_chat([{"role": "user", "content": samples.record}])
    root = Branch.create(lm, grammar=SCHEMA, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=3)
    root.prefill(lm.tokenize(prompt, special=True, add_bos=False))
    for _ in root:
        if '"age"' in root.text:
            break
    print("so far:", root.text)

    # A fork continues at the grammar's state: the matcher is cloned, not restarted.
    forks = [root.fork() for _ in range(4)]
    going = list(forks)
    while going:
        drawn = [(b, p) for b, p in zip(going, store.produce(going), strict=True) if not p.is_stop]
        store.commit([(branch, piece.token) for branch, piece in drawn])
        going = [branch for branch, _ in drawn]
    for fork in forks:
        print("with the grammar:   ", json.loads(fork.text))

    free = weft.Loom(lm, samples.record)
    answers = free.grow(n=4, max_tokens=60, temperature=1.5, seed=3, show=False)
    for answer in answers:
        print("without the grammar:", answer.text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a name, folder or file for weft.load")
    main(parser.parse_args().model)
