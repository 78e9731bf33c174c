"""A GGUF file as a Transformers model: dequantised weights, and the tokenizer of the file."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..._core.sampling.params import SamplingParams
from ..._core.tokens.tokenizer import Tokenizer
from ...errors import EngineError, ModelLoadError, Unsupported
from ..gguf import GGUF, read_gguf
from ..gguf.checkpoint import GGUFCheckpoint
from ..gguf.families import complete_config, family_of
from ..gguf.sampling import sampling_of
from ..gguf.tokenizer import read_tokenizer
from .compatibility import check_architecture
from .model import DTYPES, check_dtype, quiet_transformers


class Dequantised(NamedTuple):
    """A loaded GGUF file: model, fingerprint and tokenizer.

    sampling: parameters that the file names; None if it names none.
    """

    model: PreTrainedModel
    fingerprint: str
    tokenizer: Tokenizer
    sampling: SamplingParams | None


def load_gguf(file: Path, device: torch.device, dtype: str) -> Dequantised:
    """Load a GGUF file with its weights in `dtype` ("auto": float32).

    Raises: ModelLoadError for a broken file; Unsupported for a family that neither Weft's tables
    nor Transformers read from GGUF.
    Cost: memory for the weights in `dtype`, and 0.5 MB more during dequantisation. Transformers
    dequantises the families that only it reads to float32 first.
    """
    check_dtype(dtype)
    header = read_gguf(file)
    torch_dtype = DTYPES.get(dtype, torch.float32)
    load = _by_transformers if family_of(header) is None else _by_tables
    try:
        with quiet_transformers():
            model = load(header, torch_dtype)
    except EngineError:
        raise
    except Exception as error:
        if "not supported" in str(error):
            raise Unsupported(
                f"Transformers does not read {file.name} ({header.architecture}): {error};"
                ' engine="llamacpp" may'
            ) from error
        raise ModelLoadError(f"Transformers cannot load {file}: {error}") from error
    fingerprint = header.fingerprint("dequantised")
    return Dequantised(model.to(device), fingerprint, read_tokenizer(header), sampling_of(header))


def _by_tables(header: GGUF, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model from the header's numbers, and dequantise tensor by tensor into `dtype`."""
    checkpoint = GGUFCheckpoint(header)
    values = dict(checkpoint.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    check_architecture(config)
    kind: Any = getattr(transformers, checkpoint.config["architectures"][0])
    weights = {name: _dequantised(checkpoint, name, dtype) for name in checkpoint.tensors}
    model, report = kind.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    for what, key in (("lacks", "missing_keys"), ("has too many", "unexpected_keys")):
        if names := sorted(report[key]):
            raise ModelLoadError(
                f"{header.file} {what} tensors of a {kind.__name__}, {names[0]!r} among"
                f" {len(names)}; download it again"
            )
    model.config.name_or_path = str(header.file)
    loaded: PreTrainedModel = model
    return loaded


def _dequantised(checkpoint: GGUFCheckpoint, name: str, dtype: torch.dtype) -> Tensor:
    """Return one dequantised tensor in `dtype`, filled piece by piece."""
    shape = checkpoint.tensors[name].shape
    flat = torch.empty(torch.Size(shape).numel(), dtype=dtype)
    for start, values in checkpoint.pieces(name):
        flat[start : start + values.size] = torch.from_numpy(values)
    order = checkpoint.row_order(name)
    tensor = flat.view(shape)
    return tensor if order is None else tensor[torch.from_numpy(order)]


def _by_transformers(header: GGUF, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model with Transformers' GGUF reader, for families without a table here."""
    where: dict[str, Any] = {"gguf_file": header.file.name, "local_files_only": True}
    folder = header.file.parent
    with redirect_stderr(StringIO()):  # a progress bar that no setting turns off
        config = AutoConfig.from_pretrained(folder, **where)
        check_architecture(config)
        complete_config(config, header)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, **where
        )
    return model
