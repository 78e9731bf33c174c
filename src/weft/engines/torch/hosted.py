"""KV between a device and the host arrays of `export`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ModelMismatch


def to_host(tensor: Tensor) -> NDArray[Any]:
    """Copy to the host, contiguous; bfloat16, which NumPy lacks, as its uint16 bits."""
    dense = tensor.contiguous()
    bits = dense.view(torch.uint16) if dense.dtype == torch.bfloat16 else dense
    array: NDArray[Any] = bits.cpu().numpy()
    return array


def from_host(data: dict[str, NDArray[Any]], name: str, like: Tensor) -> Tensor:
    """Read one exported array as [S, K, D]; `like` is one layer's, of any number of slots."""
    dtype = str(like.dtype).removeprefix("torch.")
    if name not in data or str(data.get("dtype", "")) != dtype:
        raise ModelMismatch(
            f"the exported KV has no {dtype} array {name!r}; load it with the model and dtype that "
            "wrote it"
        )
    held = "uint16" if like.dtype == torch.bfloat16 else dtype
    if str(data[name].dtype) != held:
        raise ModelMismatch(
            f"the exported KV has {data[name].dtype} for {name!r}, this model needs {held}"
        )
    tensor = torch.from_numpy(np.array(data[name]))
    if like.dtype == torch.bfloat16:
        tensor = tensor.view(torch.bfloat16)
    if tensor.ndim != 3 or (tensor.shape[0], tensor.shape[2]) != tuple(like.shape[1:]):
        raise ModelMismatch(
            f"the exported KV has shape {tuple(tensor.shape)} for {name!r}, this model needs "
            f"{(like.shape[1], 'n', like.shape[2])}"
        )
    return tensor.transpose(0, 1).to(like.device)
