"""The embedded model with other token ids: the same texts, in another vocabulary.

Its greedy text is that of the embedded model, so it shows whether text passes between vocabularies
unchanged.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from shallow import TINY, shallow

_EMBEDDING = "model.embed_tokens.weight"  # tied, so that it is the output layer, too


@cache
def _binding() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="weft-renumbered-")


@cache
def renumbered(*, layers: int = 2) -> Path:
    """Write the folder, which is removed when the tests end; return it.

    layers: 2, or 8 for all.
    """
    folder = Path(_binding().name) / f"renumbered-{layers}"
    shutil.copytree(shallow() if layers == 2 else TINY, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    n_special, vocab = len(tokenizer["added_tokens"]), tokenizer["model"]["vocab"]
    new_id = [
        old if old < n_special else len(vocab) - 1 - (old - n_special) for old in range(len(vocab))
    ]
    tokenizer["model"]["vocab"] = {token: new_id[old] for token, old in vocab.items()}
    file.write_text(json.dumps(tokenizer))
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    tensor = json.loads(raw[8:start])[_EMBEDDING]
    first, last = (start + offset for offset in tensor["data_offsets"])
    size = (last - first) // tensor["shape"][0]
    rows = [bytes(raw[first + size * row : first + size * (row + 1)]) for row in range(len(vocab))]
    for old, row in enumerate(rows):
        raw[first + size * new_id[old] : first + size * (new_id[old] + 1)] = row
    weights.write_bytes(raw)
    return folder
