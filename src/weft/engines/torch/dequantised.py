"""A GGUF file as a Transformers model: its weights dequantised, its tokenizer converted."""

from __future__ import annotations

from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ...errors import EngineError, EngineUnavailable, ModelLoadError, Unsupported
from ...tokens.tokenizer import Tokenizer
from ..gguf import read_gguf
from .model import DTYPES, check_dtype, quiet
from .refusals import refuse_config

_HINT = 'pip install "gguf>=0.17"'


class Dequantised(NamedTuple):
    """What a GGUF file becomes."""

    model: PreTrainedModel
    fingerprint: str
    tokenizer: Tokenizer


def load_gguf(file: Path, device: torch.device, dtype: str) -> Dequantised:
    """Load a GGUF file, its weights in `dtype` ("auto": float32), as many bytes as they are then.

    Raises: ModelLoadError for a broken file, Unsupported for a family that Transformers does not
    read from GGUF, EngineUnavailable without the gguf package.
    """
    check_dtype(dtype)
    header = read_gguf(file)
    if find_spec("gguf") is None:
        raise EngineUnavailable(
            f"the torch engine reads {file.name} with the package 'gguf', which is not installed;"
            f" run: {_HINT}",
            hint=_HINT,
        )
    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        with quiet(), redirect_stderr(StringIO()):  # there is a bar that nothing else stops
            config = AutoConfig.from_pretrained(file.parent, **where)
            refuse_config(config)
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, config=config, dtype=DTYPES.get(dtype, torch.float32), **where
            )
            text = AutoTokenizer.from_pretrained(file.parent, **where)
    except EngineError:
        raise
    except Exception as error:
        if "not supported" in str(error):
            raise Unsupported(
                f"Transformers does not read {file.name} ({header.architecture}): {error};"
                ' engine="llamacpp" may'
            ) from error
        raise ModelLoadError(f"Transformers cannot load {file}: {error}") from error
    return Dequantised(model.to(device), header.fingerprint("dequantised"), Tokenizer.wrap(text))
