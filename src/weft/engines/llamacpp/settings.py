"""Load options: validate them and convert them to llama.cpp's parameters."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llama_cpp import llama_cpp as C

from ..._core.validation import check_choice, check_int, check_number
from ...errors import ConfigError, ModelLoadError, Unsupported
from ..gguf import GGUF, TYPES
from .library import Device, Handle, load_model

# (stage: "load", bytes read, total bytes, "") -> None
Progress = Callable[[str, int, int, str], None]

N_BATCH = 512
REPRODUCIBLE_BATCH = 63  # tokens; llama.cpp attends in tiles from 64 on, which round differently
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "auto": "f16"}
FLOATS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64"}
_LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
_SPLIT_LAYERS, _ONE_GPU = C.LLAMA_SPLIT_MODE_LAYER, C.LLAMA_SPLIT_MODE_NONE
_KV_BYTES = 4 << 30
_GPU_SHARE = 0.8  # of the free GPU memory, for KV without a budget
_MAX_SLOTS = 1 << 15  # maximum without a budget
_FIRST_SLOTS, _FIRST_LEASES = 8192, 32  # maximum initial sizes of a growing context


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """Validated options for a llama.cpp context: sizes, KV types, threads and devices."""

    n_ctx: int  # maximum path length in tokens
    n_slots: int  # maximum tokens of KV, after growth
    first_slots: int  # tokens of KV allocated at load
    n_paths: int  # maximum resident branches
    type_k: str  # type of keys, one of KV_TYPES
    type_v: str  # type of values
    flash: bool | None  # use flash attention; None lets llama.cpp choose
    n_threads: int  # maximum threads of a model call
    may_use_fewer: bool  # choose the thread count per call, up to n_threads
    reproducible: bool  # a row's logits do not depend on other rows in the batch
    gpus: tuple[Device, ...]  # GPUs that hold the model and the KV; empty for the CPU

    @property
    def can_grow(self) -> bool:
        """True if the context starts with fewer than `n_slots` slots."""
        return self.first_slots < self.n_slots

    @property
    def first_leases(self) -> int:
        """Number of leases that the context starts with."""
        return _FIRST_LEASES if self.can_grow else self.n_paths

    def context_values(self, n_cells: int, n_sequences: int, n_ubatch: int) -> dict[str, Any]:
        """Return the fields of `llama_context_params` that differ from llama.cpp's defaults.

        Args:
            n_cells: tokens of KV.
            n_sequences: llama.cpp sequences.
            n_ubatch: tokens that are computed together; larger batches are split.
        """
        numbers = {name: number for number, (name, _, _) in TYPES.items()}
        flash = {
            None: C.LLAMA_FLASH_ATTN_TYPE_AUTO,
            True: C.LLAMA_FLASH_ATTN_TYPE_ENABLED,
            False: C.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        }
        return {
            "n_ctx": n_cells,
            "n_batch": N_BATCH,
            "n_ubatch": n_ubatch,
            "n_seq_max": n_sequences,
            "n_threads": self.n_threads,
            "n_threads_batch": self.n_threads,
            "type_k": numbers[self.type_k],
            "type_v": numbers[self.type_v],
            "flash_attn_type": flash[self.flash],
            "pooling_type": C.LLAMA_POOLING_TYPE_NONE,
            "offload_kqv": bool(self.gpus),
            "op_offload": bool(self.gpus),
            "kv_unified": True,  # else a fork would copy KV
            "swa_full": True,  # else no branch could start before the window
            "no_perf": True,
        }


def kv_types(
    dtype: str,
    type_k: str | None,
    type_v: str | None,
    flash: bool | None,
    *,
    reproducible: bool = False,
) -> tuple[str, str, bool | None]:
    """Validate the options for the KV's types and flash attention, and resolve defaults.

    Args:
        dtype: "auto" (float16), "float16", "bfloat16" or "float32".
        type_k: type of keys, one of KV_TYPES; None for `dtype`.
        type_v: type of values, likewise.
        flash: use flash attention; None lets llama.cpp choose.
        reproducible: requires flash attention.

    Returns:
        The type of keys, the type of values, and `flash`: None still lets llama.cpp choose.

    Raises:
        ConfigError: a value is invalid, or two options contradict each other.
    """
    check_choice(
        "dtype", dtype, _DTYPES, ": it is that of the KV, and weights are as the file has them"
    )
    for name, value in (("type_k", type_k), ("type_v", type_v)):
        check_choice(name, value, (None, *KV_TYPES))
    check_choice("flash_attention", flash, (None, True, False))
    if reproducible:
        if flash is False:
            raise ConfigError(
                "reproducible=True needs flash attention, whose sums do not depend on the cells of"
                " other branches; leave flash_attention out"
            )
        flash = True
    of_keys, of_values = type_k or _DTYPES[dtype], type_v or _DTYPES[dtype]
    if flash is None and dtype == "float32":
        flash = False
    if flash is False and of_values not in FLOATS:
        raise ConfigError(f"type_v={of_values!r} needs flash attention; leave that to llama.cpp")
    return of_keys, of_values, flash


def context_length(header: GGUF, n_ctx: int | None) -> int:
    """Return the maximum path length: `n_ctx`, or the model's context length if it is None.

    Raises: ConfigError if `n_ctx` is below 1 or above the model's context length.
    """
    of_model: int = header.of_model("context_length")
    if n_ctx is None:
        return of_model
    return check_int("n_ctx", n_ctx, 1, of_model)


def slot_bytes(header: GGUF, *types: str) -> int:
    """Estimate the KV bytes of one token over all layers from the header.

    The estimate assumes ordinary attention in every layer.
    types: of keys and of values, two of KV_TYPES.
    """
    n_layers, n_embd = header.of_model("block_count"), header.of_model("embedding_length")
    heads = header.of_model("attention.head_count", 1)
    kv_heads = header.of_model("attention.head_count_kv", heads)
    each = kv_heads if isinstance(kv_heads, list) else [kv_heads] * n_layers
    n_heads = max(1, *heads) if isinstance(heads, list) else max(1, heads)
    sizes = {name: block / count for name, count, block in TYPES.values()}
    of_key = header.of_model("attention.key_length", n_embd // n_heads)
    of_value = header.of_model("attention.value_length", n_embd // n_heads)
    width = of_key * sizes[types[0]] + of_value * sizes[types[1]]
    return max(1, math.ceil(sum(each[:n_layers]) * width))


class SlotCounts(NamedTuple):
    """Numbers of KV slots: `first` are allocated at load, `maximum` after full growth."""

    first: int
    maximum: int


def slot_counts(
    header: GGUF, kv_bytes: int | None, n_ctx: int, types: tuple[str, str], gpus: Sequence[Device]
) -> SlotCounts:
    """Return the number of KV slots for a budget, or a default without one.

    With a budget, or on a GPU, all slots are allocated at load. Otherwise a context starts with
    twice its length, at most 8,192 slots, and grows. For longrope models llama.cpp chooses the
    rotary factors by the size of its cache. Their cache therefore never grows, and its size stays
    on the side of the trained length that `n_ctx` needs.

    Args:
        kv_bytes: the budget; None for the default of up to 32,768 slots.
        n_ctx: maximum path length in tokens.
        types: of keys and of values.
        gpus: the GPUs for the KV, with their free bytes; empty for the CPU.

    Raises:
        ConfigError: the budget exceeds the free memory.
    """
    size = slot_bytes(header, *types)
    free = sum(gpu.free_bytes for gpu in gpus) if gpus else available_bytes()
    if kv_bytes is not None and free is not None and kv_bytes > free:
        where = gpus[0].name if gpus else "memory"
        raise ConfigError(
            f"kv_budget is {kv_bytes} bytes, which llama.cpp takes at once, but {where} has {free}"
        )
    if kv_bytes is not None:
        maximum = max(1, kv_bytes // size)
    else:
        room = int(free * _GPU_SHARE) if gpus and free is not None else _KV_BYTES
        maximum = max(1, min(room // size, _MAX_SLOTS))
    trained = header.of_model("rope.scaling.original_context_length")
    if trained and any("rope_factors_short" in name for name in header.tensors):
        short = trained - N_BATCH
        maximum = min(maximum, short) if n_ctx <= short else max(maximum, trained)
        return SlotCounts(maximum, maximum)
    if kv_bytes is not None or gpus:
        return SlotCounts(maximum, maximum)
    return SlotCounts(min(maximum, 2 * n_ctx, _FIRST_SLOTS), maximum)


def min_batch(header: GGUF) -> int:
    """Return the smallest number of tokens in a batch that rounds like larger batches: 1 or 2.

    With float weights, llama.cpp uses a different matrix product for a single token.
    """
    has_floats = any(t.type in FLOATS and len(t.shape) > 1 for t in header.tensors.values())
    return 2 if has_floats else 1


def check_memory(header: GGUF, types: tuple[str, str], n_cells: int) -> None:
    """Check that KV of `n_cells` tokens fits into free host memory.

    types: of keys and of values. Raises: ModelLoadError.
    """
    needed, free = slot_bytes(header, *types) * n_cells, available_bytes()
    if free is not None and needed > free:
        raise ModelLoadError(
            f"KV of {n_cells} tokens takes {needed} bytes of memory, and {free} are free",
            hint="give a smaller kv_budget, or a smaller n_ctx",
        )


def available_bytes() -> int | None:
    """Return the bytes of free host memory (RAM); None if the system does not report them."""
    try:
        text = Path("/proc/meminfo").read_text("ascii")
        line = next(each for each in text.splitlines() if each.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError, StopIteration, IndexError):
        return None


def load_weights(
    header: GGUF,
    gpus: Sequence[Device],
    *,
    n_gpu_layers: int | None,
    main_gpu: int | None,
    tensor_split: Sequence[float] | None,
    load_mode: str,
    repack: bool,
    check_tensors: bool,
    progress: Progress | None,
) -> Handle:
    """Load the model of a GGUF file onto GPUs or the CPU; see `LlamaCppEngine.load`.

    Args:
        gpus: the GPUs to use; empty for the CPU.
        progress: called with "load", bytes read, total bytes, and "". If it raises, the load stops
            and its error is raised.

    Raises:
        ModelLoadError: llama.cpp cannot load the file.
        ConfigError: an option is invalid.
    """
    check_choice("load_mode", load_mode, _LOAD_MODES)
    check_choice("repack", repack, (True, False))
    check_choice("check_tensors", check_tensors, (True, False))
    values: dict[str, Any] = {
        "load_mode": C.llama_load_mode_from_str(load_mode.encode()),
        "use_extra_bufts": repack,
        "check_tensors": check_tensors,
        "n_gpu_layers": -1 if n_gpu_layers is None else check_int("n_gpu_layers", n_gpu_layers, 0),
        "split_mode": _SPLIT_LAYERS if len(gpus) > 1 else _ONE_GPU if gpus else _SPLIT_LAYERS,
    }
    handles = (ctypes.c_void_p * (len(gpus) + 1))(*[gpu.handle for gpu in gpus], None)
    values["devices"] = ctypes.cast(handles, ctypes.c_void_p)
    if main_gpu is not None:
        values["main_gpu"] = check_int("main_gpu", main_gpu, 0, max(0, len(gpus) - 1))
    if tensor_split is not None:
        if isinstance(tensor_split, str) or not isinstance(tensor_split, Sequence):
            raise ConfigError(f"tensor_split is {tensor_split!r}; allowed are numbers, one a GPU")
        shares = [check_number("a share of tensor_split", share, low=0) for share in tensor_split]
        if len(shares) != len(gpus):
            raise ConfigError(
                f"tensor_split is {tensor_split!r}; allowed are {len(gpus)} numbers, one a GPU"
            )
        room = (ctypes.c_float * int(C.llama_max_devices()))(*shares)
        values["tensor_split"] = ctypes.cast(room, ctypes.POINTER(ctypes.c_float))
    total = sum(tensor.n_bytes for tensor in header.tensors.values())

    stopped: list[BaseException] = []

    def report_progress(share: float, _: Any) -> bool:
        try:
            if progress is not None:
                progress("load", int(share * total), total, "")
        except BaseException as error:  # exceptions cannot pass through C code
            stopped.append(error)
        return not stopped

    values["progress_callback"] = C.llama_progress_callback(report_progress)
    try:
        return load_model(header.file, **values)
    except ModelLoadError:
        if stopped:
            raise stopped[0] from None
        raise


def check_decoder_only(header: GGUF, model: Handle) -> None:
    """Check that a model is a decoder-only language model whose KV can be cut at any token.

    Raises: Unsupported.
    """
    pointer, name = model.pointer, f"{header.file} ({header.architecture})"
    if C.llama_model_has_encoder(pointer):
        raise Unsupported(f"{name} is an encoder-decoder model; Weft runs decoder-only models")
    if header.of_model("attention.causal", True) is False:
        raise Unsupported(f"{name} is an encoder: it generates no text")
    if C.llama_model_is_diffusion(pointer):
        raise Unsupported(
            f"{name} is a diffusion model; Weft runs those that go from left to right"
        )
    if C.llama_model_is_recurrent(pointer) or C.llama_model_is_hybrid(pointer):
        raise Unsupported(
            f"{name} keeps a recurrent state, which llama.cpp cannot cut at a token;"
            ' try its Transformers folder with engine="torch"'
        )
