"""How a step is captured on a card: by which streams, and what a capture that fails leaves behind.

`Cuda` stands in for `torch.cuda`, whose captures need a card: it records the calls. The
tests in `tests/gpu` run on a card.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from weft.engines.torch.paged import capture  # noqa: E402
from weft.engines.torch.paged.capture import GraphRecorder, retry_with_free_memory  # noqa: E402

pytestmark = pytest.mark.torch
CARD = torch.device("cuda", 0)


class Cuda:
    """A stand-in for `torch.cuda`. calls: all calls, in order; now: the name of a stream."""

    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now = "lane"
        self.n_streams = 0
        self.fails_to_end = False

    def Stream(self, _: Any, priority: int) -> Any:
        assert priority == -1
        self.n_streams += 1
        return _Stream(self, ("root", "side")[self.n_streams - 1])

    def CUDAGraph(self) -> Any:
        return _Graph(self)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.name
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def device(self, _: Any) -> Iterator[None]:
        yield

    def current_stream(self, _: Any = None) -> Any:
        return _Stream(self, self.now)

    def default_stream(self, _: Any = None) -> Any:
        return _Stream(self, "lane")

    def current_device(self) -> int:
        return 0

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 7)

    def empty_cache(self) -> None:
        self.calls.append("empties")


class _Stream:
    device = CARD

    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: Any) -> None:
        self.cuda.calls.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.cuda.calls.append(f"host waits for {self.name}")


class _Graph:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def capture_begin(self, **_: Any) -> None:
        self.cuda.calls.append(f"begins on {self.cuda.now}")

    def capture_end(self) -> None:
        self.cuda.calls.append("ends")
        if self.cuda.fails_to_end:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    result = Cuda()
    low = SimpleNamespace(
        _cuda_endAllocateToPool=lambda *_: result.calls.append("ends allocations"),
        _cuda_releasePool=lambda *_: result.calls.append("releases"),
    )
    fake_torch = SimpleNamespace(
        cuda=result, _C=low, OutOfMemoryError=torch.OutOfMemoryError, zeros=lambda *_, **__: None
    )
    monkeypatch.setattr(capture, "torch", fake_torch)
    monkeypatch.setattr(capture, "_streams", {})
    as_of(monkeypatch, 2, 15)
    return result


def as_of(monkeypatch: pytest.MonkeyPatch, *release: int) -> None:
    monkeypatch.setattr(capture, "_ENDS_ALLOCATIONS", release >= (2, 13))
    monkeypatch.setattr(capture, "_RELEASES_MEMORY", release >= (2, 14))
    monkeypatch.setattr(capture, "_HAS_GLOBAL_FLAG", release < (2, 12))


def running(cuda: Cuda, errors: list[BaseException | None] | None = None) -> Callable[[], Any]:
    """A step that notes where it runs; errors: of its runs in turn."""
    left = list(errors or [])

    def run() -> Any:
        cuda.calls.append(f"runs on {cuda.now}")
        error = left.pop(0) if left else None
        if error is not None:
            raise error
        return torch.zeros(1)

    return run


WARM = ["side waits for lane", "runs on side", "runs on side", "lane waits for side"]
CAPTURE = ["begins on root", "side waits for root", "runs on side", "root waits for side"]
WAITS = ["host waits for root", "host waits for side"]


def test_capture_begins_where_nothing_is_multiplied(cuda: Cuda) -> None:
    """PyTorch 2.12 to 2.14 give back cuBLAS's memory of that stream when any of its graphs goes."""
    GraphRecorder(CARD)(running(cuda))
    assert cuda.calls == [*WARM, *CAPTURE, "ends"]


def test_recorders_of_a_card_share_its_streams(cuda: Cuda) -> None:
    for _ in range(40):
        GraphRecorder(CARD)
    assert cuda.n_streams == 2


def test_capture_without_memory_is_tried_with_what_pytorch_keeps(cuda: Cuda) -> None:
    run = running(cuda, [None, None, torch.OutOfMemoryError()])
    GraphRecorder(CARD)(run)
    tight = [*WARM, "empties", *CAPTURE, "ends"]
    assert cuda.calls == [*WARM, *CAPTURE, "ends", *WAITS, *tight]


def test_failed_attempt_releases_its_tensors() -> None:
    class Large:
        pass

    stored: list[weakref.ref[Large]] = []

    def attempt(is_tight: bool) -> str:
        if is_tight:
            assert stored[0]() is None
            return "found"
        large = Large()
        stored.append(weakref.ref(large))
        raise torch.OutOfMemoryError

    gc.disable()
    try:
        assert retry_with_free_memory(attempt) == "found"
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("release", "mended"),
    [
        ((2, 11), ["ends allocations", "releases", "begins on root", "ends"]),
        ((2, 12), ["ends allocations", "releases"]),
        ((2, 13), ["releases"]),
        ((2, 14), []),
        ((2, 15), []),
    ],
)
def test_capture_that_another_thread_ended_leaves_nothing(
    release: tuple[int, int], mended: list[str], cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_of(monkeypatch, *release)
    cuda.fails_to_end = True
    recorder = GraphRecorder(CARD)
    with pytest.raises(RuntimeError, match="previous error"):
        recorder(running(cuda))
    assert cuda.calls == [*WARM, *CAPTURE, "ends", *WAITS, *mended]
    cuda.calls.clear()
    with pytest.raises(ValueError, match="elsewhere"):  # before a capture has begun
        recorder(running(cuda, [ValueError("elsewhere")]))
    assert ("releases" in cuda.calls) == (release < (2, 13))


def test_error_of_a_step_ends_its_capture(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    as_of(monkeypatch, 2, 13)
    run = running(cuda, [None, None, ValueError("of a layer")])
    with pytest.raises(ValueError, match="of a layer"):
        GraphRecorder(CARD)(run)
    assert cuda.calls == [*WARM, *CAPTURE, "ends", *WAITS]  # it ended well: the graph gives back


def test_graph_is_freed_after_its_replay(cuda: Cuda) -> None:
    captured = GraphRecorder(CARD)(running(cuda))
    cuda.calls.clear()
    captured.release()
    assert cuda.calls == ["side waits for lane"]
