"""The embedded model without its last layers: its words and numbers are real, its texts are not.

For laws that hold of any model: a forward costs a quarter, and nothing else is different.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

TINY = Path(str(files("weft") / "data" / "tiny"))
N_LAYERS = 2
SLOT = N_LAYERS * 1024  # bytes of one token's KV


@cache
def _binding() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="weft-shallow-")


@cache
def shallow_gguf() -> Path:
    """Write the model as a float32 GGUF file next to the folder."""
    from recipe.export_gguf import export_gguf

    file = Path(_binding().name) / "shallow.gguf"
    export_gguf(shallow(), file)
    return file


@cache
def shallow() -> Path:
    """Write the model into a folder that goes when the tests end; return the folder."""
    folder = Path(_binding().name) / "shallow"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = N_LAYERS
    (folder / "config.json").write_text(json.dumps(config))
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header, data = {}, b""
    for name, tensor in json.loads(raw[8:start]).items():
        parts = name.split(".")
        if name == "__metadata__" or (parts[1] == "layers" and int(parts[2]) >= N_LAYERS):
            continue
        first, last = tensor["data_offsets"]
        header[name] = {**tensor, "data_offsets": [len(data), len(data) + last - first]}
        data += raw[start + first : start + last]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder
