"""What is asked of llama.cpp beyond its plain calls: devices, messages, handles that free.

`C` is llama-cpp-python's layer of plain C calls; its classes above that are not used.
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

# What is newest of what is used: an older library would take our words for something else.
if not all(hasattr(C.llama_model_params, name) for name in ("load_mode", "use_extra_bufts")):
    raise EngineUnavailable(
        "the installed llama-cpp-python is too old, 0.3.36 is needed; run:"
        ' pip install --upgrade "llama-cpp-python>=0.3.36"'
    )

_log = logging.getLogger("weft.engines.llamacpp")
# NOTE: levels of ggml.h; llama-cpp-python's own table of them is of an older version.
_WARNING, _ERROR = 3, 4
_GPU_KINDS = (1, 2)  # of its own, or with the host's memory
_problems: deque[tuple[int, str]] = deque(maxlen=8)  # level and text of warnings and errors
_unlogged = threading.local()  # `is_on` while this thread loads what was logged before
_report: dict[str, str] = {}  # the numbers that llama.cpp prints of a model that it loads


class Device(NamedTuple):
    """A device of llama.cpp's: `name` as it calls it, such as "CUDA0" or "CPU"."""

    handle: int
    name: str
    description: str
    is_gpu: bool
    free_bytes: int
    total_bytes: int


@C.llama_log_callback
def _hear(level: int, text: bytes, _: Any) -> None:
    """Take a message of the library: it writes to stderr otherwise."""
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
    # Warnings are about contexts that Weft chose on purpose; errors are raised with their text.
    _log.log(logging.INFO if level == _ERROR else logging.DEBUG, "%s", message)


C.llama_log_set(_hear, ctypes.c_void_p(0))
C.llama_backend_init()


def last_words() -> str:
    """Return the first recent error of llama.cpp, else the first warning; clear both lists."""
    problems = sorted(_problems, key=lambda problem: -problem[0])
    _problems.clear()
    if not problems:
        return "llama.cpp gives no reason"
    _, message = problems[0]
    return message.partition(": ")[2] or message


def devices() -> list[Device]:
    """Return the devices that the installed library has back ends for, GPUs first."""
    # NOTE: ggml's calls, which llama-cpp-python has no names for; the one place that makes them.
    ggml = _ggml()
    found = []
    for index in range(ggml.ggml_backend_dev_count()):
        handle = ggml.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        ggml.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        name = ggml.ggml_backend_dev_name(handle).decode(errors="replace")
        described = ggml.ggml_backend_dev_description(handle).decode(errors="replace")
        is_gpu = ggml.ggml_backend_dev_type(handle) in _GPU_KINDS
        found.append(Device(handle, name, described, is_gpu, free.value, total.value))
    return sorted(found, key=lambda device: not device.is_gpu)


def _ggml() -> Any:
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
    """Return the GPUs that "auto", "cpu", "gpu", or a name ("cuda", "cuda:1", "metal") stands for.

    Raises: ConfigError where the installed library has no such device.
    """
    gpus = [each for each in devices() if each.is_gpu]
    if device == "auto":
        return gpus
    if device == "cpu":
        return []
    kind, _, number = device.lower().partition(":")
    named = [e for e in gpus if kind == "gpu" or e.name.lower().startswith(_spelled(kind))]
    if number:
        named = named[int(number) : int(number) + 1] if number.isdecimal() else []
    if not named:
        has = ", ".join(f"{each.name} ({each.description})" for each in devices())
        raise ConfigError(
            f"device is {device!r}, which the installed llama.cpp has not; it has: {has}",
            hint="docs/llamacpp.md says where builds for CUDA, Metal and Vulkan are had",
        )
    return named


def _spelled(kind: str) -> str:
    return {"mps": "mtl", "metal": "mtl", "rocm": "rocm", "hip": "rocm"}.get(kind, kind)


def features() -> str:
    """Return what the installed library says of itself: its CPU's instructions, its back ends."""
    said: str = C.llama_print_system_info().decode(errors="replace")
    return " ".join(said.replace("|", " ").split())


class Handle:
    """A pointer of the library's that is freed once: by `close`, or when nobody holds it."""

    def __init__(self, pointer: Any, free: Any, *keeps: object) -> None:
        """keeps: what must live as long, such as the model of a context."""
        self.report: dict[str, str] = {}  # of a model: its numbers, by llama.cpp's names for them
        self._pointer = pointer
        self._keeps = keeps
        # Those that it keeps are arguments, so that they outlive the call.
        self._finalizer = weakref.finalize(self, _free, free, pointer, keeps)
        self._finalizer.atexit = False

    @property
    def pointer(self) -> Any:
        """The pointer, for calls."""
        return self._pointer

    def close(self) -> None:
        """Free it; idempotent."""
        self._finalizer()
        self._keeps = ()


def _free(free: Any, pointer: Any, keeps: tuple[object, ...]) -> None:
    free(pointer)


def load_model(file: Path, *, vocab_only: bool = False, **values: Any) -> Handle:
    """Load a GGUF file that was checked. values: of `llama_model_params`.

    vocab_only: load the tokenizer. It logs nothing: llama.cpp would print all metadata once more.
    Raises: ModelLoadError with what the library says.
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
        raise ModelLoadError(f"llama.cpp cannot load {file}: {last_words()}")
    handle = Handle(pointer, C.llama_model_free)
    handle.report = dict(_report)
    return handle


def new_context(model: Handle, **values: Any) -> Handle:
    """Make a context. values: of `llama_context_params`.

    Raises: ModelLoadError where there is no memory for it, say.
    """
    params = C.llama_context_default_params()
    for name, value in values.items():
        assert hasattr(params, name), name
        setattr(params, name, value)
    _problems.clear()
    pointer = C.llama_init_from_model(model.pointer, params)
    if not pointer:
        raise ModelLoadError(
            f"llama.cpp cannot make room for {values.get('n_ctx')} tokens: {last_words()}",
            hint="give a smaller kv_budget",
        )
    return Handle(pointer, C.llama_free, model)
