"""Text without end: when the context is full, go on from its first tokens and its last ones."""

from __future__ import annotations

import argparse

import weft
from weft import Branch, samples

N_CTX, TAIL, N_TOKENS = 160, 64, 400
CAST = ("fox", "owl", "otter", "turtle", "rabbit", "bear")


def summary(text: str) -> str:
    """A sidecar that outlives the window: here the animals of the story so far."""
    animals = [animal for animal in CAST if animal in text]
    return "So far: " + ", ".join(animals) + "." if animals else ""


def seeded(lm: weft.LM, sinks: list[int], tail: list[int]) -> Branch:
    branch = Branch.create(lm, temperature=1.0, top_k=0, top_p=1.0, min_p=0.02, seed=7)
    branch.steer({lm.eog_token: float("-inf")})  # a text without end has no end token
    branch.prefill(sinks + tail)
    return branch


def main(model: str = "tiny") -> None:
    lm = weft.load(model, n_ctx=N_CTX)
    prompt = lm.format_chat([{"role": "user", "content": samples.story}])
    sinks = lm.tokenize(prompt, special=True, add_bos=False)
    branch, generated, windows, note_text = seeded(lm, sinks, []), [], 1, ""
    while len(generated) < N_TOKENS:
        if branch.position == N_CTX:
            note_text = summary(lm.detokenize(generated))
            note = lm.tokenize(f"{note_text}\n", add_bos=False) if note_text else []
            print(f"window {windows}: perplexity {branch.perplexity:.2f} · {note_text}")
            branch.prune()
            branch, windows = seeded(lm, sinks + note, generated[-TAIL:]), windows + 1
        token = branch.produce().token
        branch.commit(token)
        generated.append(token)
    print(f"{len(generated)} tokens in {windows} windows; one window ends after {N_CTX}")
    print("end:", lm.detokenize(generated)[-120:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a name, folder or file for weft.load")
    main(parser.parse_args().model)
