"""The cost of having no KV of single tokens: grow on BLOOM and Mamba, and `generate`.

8 branches of 32 new tokens after a prompt, temperature 0.8, float32, one thread, CPU time of the
process, medians of rounds in turn. Sides:

  weft       loom.grow(n=8, max_tokens=32), as it is: a path goes on from the model's own cache
  full       the same with state_bytes=0: nothing is cached, full paths run; once, as it is slow
  generate   Transformers' generate(num_return_sequences=8) over its own cache
  llama      loom.grow on a Llama of the same sizes, whose KV a tree can hold

Random models: 4 layers, 256 wide, 2,048 tokens in the vocabulary. Ratios: by generate, in tokens a
second.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from common import median, report
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import weft
from weft._core.tokens.tokenizer import Tokenizer

TINY = Path(weft.__file__).parent / "data" / "tiny"
N, NEW = 8, 32
WIDE = {"vocab_size": 2048, "hidden_size": 256}
ENDS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
SIZES: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 4, "n_head": 8},
    "mamba": {"num_hidden_layers": 4},
    "llama": {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1024,
    },
}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**WIDE, **SIZES[kind], **ENDS)
    return AutoModelForCausalLM.from_config(config).eval()


def by_weft(kind: str, ids: list[int], **options: Any) -> Callable[[], int]:
    tokenizer = Tokenizer.from_folder(TINY).object
    lm = weft.load(model_of(kind), tokenizer, engine_options=options)

    def run() -> int:
        lm.clear_cache()
        loom = weft.Loom(lm, ids, template=False)
        nodes = loom.grow(n=N, max_tokens=NEW, temperature=0.8, show=False)
        return sum(len(each.tokens) for each in nodes)

    return run


def by_generate(kind: str, ids: list[int]) -> Callable[[], int]:
    model = model_of(kind)
    given = torch.tensor([ids])

    def run() -> int:
        with torch.inference_mode():
            ids_of_rows = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=True,
                temperature=0.8,
                max_new_tokens=NEW,
                num_return_sequences=N,
            )
        return int(ids_of_rows[:, len(ids) :].numel())

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = []
    for n_prompt in given.prompts:
        ids = [(7 * i) % 2000 + 40 for i in range(n_prompt)]
        sides = {(kind, "weft"): by_weft(kind, ids) for kind in SIZES}
        for kind in ("bloom", "mamba"):
            sides[kind, "generate"] = by_generate(kind, ids)
            sides[kind, "full"] = by_weft(kind, ids, state_bytes=0)
        speeds: dict[tuple[str, str], list[float]] = {side: [] for side in sides}
        for number in range(given.rounds + 1):  # the first one warms up
            for side, run in sides.items():
                if side[1] == "full" and number != 1:
                    continue
                began = time.process_time()
                n_tokens = run()
                speeds[side].append(n_tokens / (time.process_time() - began))
        speed = {side: median(each[-given.rounds :]) for side, each in speeds.items()}
        for kind in ("bloom", "mamba"):
            weft_speed, own = speed[kind, "weft"], speed[kind, "generate"]
            rows.append(
                {
                    "model": kind,
                    "prompt": n_prompt,
                    "generate tok/s": own,
                    "weft tok/s": weft_speed,
                    "ratio": weft_speed / own,
                    "full tok/s": speed[kind, "full"],
                    "ratio, full": speed[kind, "full"] / own,
                    "llama by weft tok/s": speed["llama", "weft"],
                }
            )
    report("recomputed_paths", rows, n=N, new=NEW)


if __name__ == "__main__":
    main()
