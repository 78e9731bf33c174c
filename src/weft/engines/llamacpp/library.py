"""Access to the llama.cpp library: devices, log messages, and handles that free C objects.

`C` is the ctypes module of llama-cpp-python; its Python classes are not used.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from llama_cpp import llama_cpp as C

from ...errors import ConfigError, EngineUnavailable, ModelLoadError

# The newest fields that Weft sets: an older library has other structs and would misread ours.
if not all(hasattr(C.llama_model_params, name) for name in ("load_mode", "use_extra_bufts")):
    raise EngineUnavailable(
        "the installed llama-cpp-python is too old, 0.3.36 is needed; run:"
        ' pip install --upgrade "llama-cpp-python>=0.3.36"'
    )

_log = logging.getLogger("weft.engines.llamacpp")
# NOTE: levels of ggml.h; the constants of llama-cpp-python are from an older version.
_WARNING, _ERROR = 3, 4
_GPU_KINDS = (1, 2)  # ggml's device types for a discrete and an integrated GPU
_problems: deque[tuple[int, str]] = deque(maxlen=8)  # level and text of warnings and errors
_unlogged = threading.local()  # `is_on`: do not log what this thread loads
_report: dict[str, str] = {}  # "print_info" lines of the last model load, name: value


class Device(NamedTuple):
    """A device that llama.cpp can use: handle, name ("CUDA0", "CPU"), description and memory."""

    handle: int
    name: str
    description: str
    is_gpu: bool
    free_bytes: int
    total_bytes: int


@C.llama_log_callback
def _on_log_message(level: int, text: bytes, _: Any) -> None:
    """Handle a log message of llama.cpp, which would otherwise be written to stderr."""
    message = text.decode(errors="replace").strip()
    if not message:
        return
    if message.startswith("print_info: "):
        name, _, value = message.removeprefix("print_info: ").partition("=")
        _report[name.strip()] = value.strip()
    is_problem = level in (_WARNING, _ERROR)
    if is_problem:
        _problems.append((level, message))
    if getattr(_unlogged, "is_on", False):
        return
    # Warnings concern settings that Weft chooses on purpose; errors are raised with their text.
    _log.log(logging.INFO if level == _ERROR else logging.DEBUG, "%s", message)


C.llama_log_set(_on_log_message, ctypes.c_void_p(0))
C.llama_backend_init()


def last_error_message() -> str:
    """Return llama.cpp's first error since the last call, else its first warning; for exceptions.

    Without either, the text says that llama.cpp gives no reason.
    """
    problems = sorted(_problems, key=lambda problem: -problem[0])
    _problems.clear()
    if not problems:
        return "llama.cpp gives no reason"
    _, message = problems[0]
    return message.partition(": ")[2] or message


def devices() -> list[Device]:
    """Return the devices that the installed llama.cpp has back ends for, GPUs first."""
    # NOTE: llama-cpp-python does not wrap these calls of ggml.
    ggml = _ggml()
    available = []
    for index in range(ggml.ggml_backend_dev_count()):
        handle = ggml.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        ggml.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        name = ggml.ggml_backend_dev_name(handle).decode(errors="replace")
        described = ggml.ggml_backend_dev_description(handle).decode(errors="replace")
        is_gpu = ggml.ggml_backend_dev_type(handle) in _GPU_KINDS
        available.append(Device(handle, name, described, is_gpu, free.value, total.value))
    return sorted(available, key=lambda device: not device.is_gpu)


def _ggml() -> Any:
    """Return ggml's C library with the signatures of the device functions declared."""
    from llama_cpp._ggml import libggml

    calls = {
        "ggml_backend_dev_count": ((), ctypes.c_size_t),
        "ggml_backend_dev_get": ((ctypes.c_size_t,), ctypes.c_void_p),
        "ggml_backend_dev_name": ((ctypes.c_void_p,), ctypes.c_char_p),
        "ggml_backend_dev_description": ((ctypes.c_void_p,), ctypes.c_char_p),
        "ggml_backend_dev_type": ((ctypes.c_void_p,), ctypes.c_int),
        "ggml_backend_dev_memory": (
            (ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)),
            None,
        ),
    }
    for name, (takes, gives) in calls.items():
        call = getattr(libggml, name)
        call.argtypes, call.restype = takes, gives
    return libggml


def chosen_devices(device: str) -> list[Device]:
    """Return the GPUs for a `device` option; an empty list means the CPU.

    Args:
        device: "auto" (all GPUs, possibly none), "cpu", "gpu" (all GPUs, at least one), or the
            name of a back end with an optional index: "cuda", "cuda:1", "metal".

    Raises:
        ConfigError: the installed library has no such device.
    """
    gpus = [each for each in devices() if each.is_gpu]
    if device == "auto":
        return gpus
    if device == "cpu":
        return []
    kind, _, number = device.lower().partition(":")
    named = [e for e in gpus if kind == "gpu" or e.name.lower().startswith(_backend_prefix(kind))]
    if number:
        named = named[int(number) : int(number) + 1] if number.isdecimal() else []
    if not named:
        has = ", ".join(f"{each.name} ({each.description})" for each in devices())
        raise ConfigError(
            f"device is {device!r}, which the installed llama.cpp has not; it has: {has}",
            hint="docs/llamacpp.md says where builds for CUDA, Metal and Vulkan are had",
        )
    return named


def _backend_prefix(kind: str) -> str:
    """Return the start of ggml's device names for a back end: "metal" → "mtl"."""
    return {"mps": "mtl", "metal": "mtl", "rocm": "rocm", "hip": "rocm"}.get(kind, kind)


def features() -> str:
    """Return llama.cpp's system info in one line: CPU instruction sets and back ends."""
    text: str = C.llama_print_system_info().decode(errors="replace")
    return " ".join(text.replace("|", " ").split())


class Handle:
    """A pointer to a C object, freed once: by `close`, or when the handle is collected.

    report: of a model: its numbers as llama.cpp prints them, by llama.cpp's names.
    """

    def __init__(self, pointer: Any, free: Any, *keeps: object) -> None:
        """Take ownership of a pointer.

        Args:
            free: called with `pointer` to free it.
            keeps: objects that must outlive the pointer, such as the model of a context.
        """
        self.report: dict[str, str] = {}  # set by `load_model`
        self._pointer = pointer
        self._keeps = keeps
        # `keeps` is an argument of the finalizer, so that its objects outlive the call of `free`.
        self._finalizer = weakref.finalize(self, _free, free, pointer, keeps)
        self._finalizer.atexit = False

    @property
    def pointer(self) -> Any:
        """The pointer, to pass to C calls. Invalid after `close`."""
        return self._pointer

    def close(self) -> None:
        """Free the C object; idempotent."""
        self._finalizer()
        self._keeps = ()


def _free(free: Any, pointer: Any, keeps: tuple[object, ...]) -> None:
    """Free a C object by `free(pointer)`, before the objects in `keeps`."""
    free(pointer)


def load_model(file: Path, *, vocab_only: bool = False, **values: Any) -> Handle:
    """Load a GGUF file that `read_gguf` accepts.

    Args:
        vocab_only: load only the tokenizer. Nothing is logged then, because llama.cpp would
            print all metadata a second time.
        values: fields of `llama_model_params`; other fields keep llama.cpp's defaults.

    Returns:
        The model; its `report` has the numbers that llama.cpp printed.

    Raises:
        ModelLoadError: with llama.cpp's message.
    """
    params = C.llama_model_default_params()
    params.vocab_only = vocab_only
    for name, value in values.items():
        assert hasattr(params, name), name
        setattr(params, name, value)
    _problems.clear()
    _report.clear()
    _unlogged.is_on = vocab_only
    pointer = C.llama_model_load_from_file(os.fsencode(file), params)
    _unlogged.is_on = False
    if not pointer:
        raise ModelLoadError(f"llama.cpp cannot load {file}: {last_error_message()}")
    handle = Handle(pointer, C.llama_model_free)
    handle.report = dict(_report)
    return handle


def new_context(model: Handle, **values: Any) -> Handle:
    """Create a context of a model.

    Args:
        values: fields of `llama_context_params`; other fields keep llama.cpp's defaults.

    Raises:
        ModelLoadError: with llama.cpp's message, for example that memory is short.
    """
    params = C.llama_context_default_params()
    for name, value in values.items():
        assert hasattr(params, name), name
        setattr(params, name, value)
    _problems.clear()
    pointer = C.llama_init_from_model(model.pointer, params)
    if not pointer:
        raise ModelLoadError(
            f"llama.cpp cannot make room for {values.get('n_ctx')} tokens: {last_error_message()}",
            hint="give a smaller kv_budget (docs/troubleshooting.md#out-of-memory)",
        )
    return Handle(pointer, C.llama_free, model)
