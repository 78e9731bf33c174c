"""A real draft model: a model without its last layers, of the same vocabulary."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import weft


def draft_model(folder: Path, n_layers: int = 6, source: str = "tiny") -> weft.LM:
    """Write the smaller model into a folder and load it. source: a name or a folder."""
    origin = files("weft") / "data" / "tiny" if source == "tiny" else source
    shutil.copytree(str(origin), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = n_layers
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    raw = weights.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    kept, data = {}, b""
    for name, tensor in json.loads(raw[8:start]).items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "0"
        if name != "__metadata__" and int(layer) < n_layers:
            first, last = tensor["data_offsets"]
            kept[name] = {**tensor, "data_offsets": [len(data), len(data) + last - first]}
            data += raw[start + first : start + last]
    header = json.dumps(kept).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return weft.load(folder, engine="numpy")
