"""One table says what becomes of every error."""

from __future__ import annotations

import inspect

import pytest

from weft import errors
from weft._core.error_mapping import ERROR_MAPPINGS, map_error

KINDS = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, errors.WeftError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_has_a_mapping(kind: type[errors.WeftError]) -> None:
    outcome = ERROR_MAPPINGS[kind]
    assert outcome is map_error(kind("x"))
    assert outcome.exit_code in (1, 2, 3, 4, 130)
    assert outcome.status in (400, 404, 409, 422, 429, 499, 500, 501, 503)
    assert outcome.kind.endswith("_error")
    assert outcome.code == outcome.code.lower()


def test_errors_of_clients_map_to_4xx_and_ours_to_5xx() -> None:
    for kind, outcome in ERROR_MAPPINGS.items():
        assert (outcome.status < 500) == (outcome.kind not in _OURS), kind


def test_error_that_is_its_own_cause_ends_the_search() -> None:
    error = errors.KVFull("x")
    error.__cause__ = error
    assert map_error(error).status == 503


_OURS = ("server_error", "unavailable_error", "not_supported_error")


def test_out_of_memory_errors_of_all_libraries_are_recognized() -> None:
    """PyTorch's error on a CPU is a RuntimeError like any other, but for its words."""

    def caused(error: Exception) -> errors.ForwardError:
        outer = errors.ForwardError("the model call failed")
        outer.__cause__ = error
        return outer

    torch_error = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
    )
    for error in (MemoryError(), torch_error, caused(MemoryError()), caused(torch_error)):
        assert errors.is_out_of_memory(error)
        assert map_error(error).exit_code == 4
    for message in (
        "Triton Error [CUDA]: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED when calling …",
        "[metal::malloc] Attempting to allocate 48736917632 bytes which is greater than …",
        "[malloc_or_wait] Unable to allocate 2147483648 bytes.",
        "could not create a primitive",
        "can't start new thread",
    ):
        assert errors.is_out_of_memory(RuntimeError(message))
        assert not errors.is_out_of_memory(ValueError(message))
    unknown = RuntimeError("could not create a primitive descriptor for a matmul primitive")
    for error in (
        unknown,
        RuntimeError("shapes differ"),
        caused(ValueError("can't allocate memory")),
    ):
        assert not errors.is_out_of_memory(error)
    assert map_error(error).exit_code == 1
