"""Engines for the laws on a card: paged KV, some families, each in every precision.

    pytest tests/contract --engine on_card:Qwen3Bfloat16

On a CPU they run in Triton's interpreter (TRITON_INTERPRET=1), those in bfloat16 excepted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from families import OF_LAWS, build_for_laws
from weft.engines.torch import TorchEngine
from weft.engines.torch.model import DTYPES
from weft.engines.torch.weight_layout import merge_sibling_weights

# The names of the classes below: Llama, LlamaBfloat16 …, by family and dtype.
NAMES: dict[str, tuple[str, str]] = {
    f"{family.capitalize()}{dtype.capitalize()}": (family, dtype)
    for family in OF_LAWS
    for dtype in DTYPES
}


def __getattr__(name: str) -> type[TorchEngine]:
    if name not in NAMES:
        raise AttributeError(name)
    family, dtype = NAMES[name]

    def load(cls: type[TorchEngine], folder: Path, **options: Any) -> Any:
        """A random model over the vocabulary and the context of the model in `folder`."""
        config = json.loads((folder / "config.json").read_text())
        model = build_for_laws(
            family, DTYPES[dtype], config["vocab_size"], config["max_position_embeddings"]
        )
        place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = model.to(place)
        merge_sibling_weights(model)  # as one that is loaded there is
        return TorchEngine.adopt(model, **{"kv": "paged", **options})

    return type(name, (TorchEngine,), {"load": classmethod(load)})
