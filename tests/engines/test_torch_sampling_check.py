"""The load check of a device's draws: what differs from the reference draws no token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from cases import first_of  # noqa: E402
from families import N_VOCAB, build  # noqa: E402
from weft._core.sampling.params import SamplingParams  # noqa: E402
from weft._core.sampling.sampler import BatchSampler, Sampler, draw_batch  # noqa: E402
from weft.engines.base import Row  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.paged.kernel import is_interpreted  # noqa: E402
from weft.engines.torch.recompute.engine import RecomputeEngine  # noqa: E402
from weft.engines.torch.sampling import check, kernel, sampler  # noqa: E402
from weft.engines.torch.sampling.sampler import TorchDraws, TorchSampler  # noqa: E402
from weft.engines.torch.sampling.sampling_tensors import SamplingTensors  # noqa: E402
from weft.errors import ForwardError, ModelLoadError  # noqa: E402

if not (is_interpreted() or torch.cuda.is_available()):
    pytest.skip("triton has neither its interpreter nor a card", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.kernels]
DEVICE = torch.device("cpu" if is_interpreted() else "cuda")


@pytest.fixture(autouse=True)
def _as_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines draw on the device, and repeat the check of its draws."""
    monkeypatch.setattr(sampler, "is_for_triton", lambda _: True)
    monkeypatch.setattr(check, "_agreed", set())


def difference(n_vocab: int = 700, dtype: Any = torch.float32) -> str:
    return check.sampling_difference(TorchSampler(DEVICE, kernels=True), n_vocab, dtype)


@pytest.mark.parametrize(
    ("n_vocab", "dtype"),
    first_of([(2, torch.float32), (700, torch.bfloat16), (5000, torch.float16)], n=2),
)
def test_correct_kernels_pass_the_check(n_vocab: int, dtype: Any) -> None:
    assert difference(n_vocab, dtype) == ""


def changed(owner: Any, name: str, change: Callable[[Any], Any]) -> tuple[Any, str, Any]:
    """Return the patch of a part of the draw whose result is changed."""
    complete = getattr(owner, name)
    return owner, name, lambda *args, **named: change(complete(*args, **named))


SET_POSITIONS = SamplingTensors.set_positions


def shifted(row: int) -> Callable[[Any], Any]:
    """Add 0.01 to the float32 bits of one line of the packed result."""

    def change(packed: Any) -> Any:
        stats = packed[row].int().view(torch.float32) + 0.01
        packed[row] = stats.view(torch.int32).long()
        return packed

    return change


def uncut(logits: Any, rows: Any, *_: Any, **__: Any) -> Any:
    threshold = torch.full(rows.shape, -torch.inf, device=rows.device)
    return kernel.Cutoffs(threshold, torch.full_like(rows, logits.shape[1]))


FAULTS: dict[str, tuple[tuple[Any, str, Any], str]] = {
    "positions": (
        (SamplingTensors, "set_positions", lambda self, at: SET_POSITIONS(self, at % 2**32)),
        "with temperatures alone",
    ),
    "logprobs": (changed(kernel, "draw_tokens", shifted(1)), "with temperatures alone values"),
    "entropies": (changed(kernel, "draw_tokens", shifted(2)), "with temperatures alone values"),
    "masks": ((SamplingTensors, "set_allowed", lambda *_: None), "with a constraint"),
    "penalties": ((SamplingTensors, "set_counts", lambda *_: None), "with penalties and a bias"),
    "top_p": ((kernel, "find_cutoffs", uncut), "with top_p"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_kernel_fault_is_reported(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault lies in one part of the draw, as if a compiler had it wrong."""
    broken, message = FAULTS[fault]
    monkeypatch.setattr(*broken)
    assert difference().startswith(message)


def first_tokens(engine: TorchEngine | RecomputeEngine) -> list[int]:
    output = engine.forward([Row((), [5, 9, 40, 7], 0, None, (0, 1, 2, 3))])
    chain = BatchSampler([Sampler(SamplingParams(), seed) for seed in range(4)])
    batch = draw_batch(chain, 0, [1, 2, 3, 4])
    drawn: list[int] = output.draw(batch).result().ids.tolist()
    assert isinstance(output.draw(batch), TorchDraws) == engine._sampler.on_device
    return drawn


@pytest.mark.parametrize("family", first_of(["llama", "bloom"]))
def test_wrong_kernels_fall_back_to_the_host(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    well = TorchEngine.adopt(build(family).to(DEVICE))
    assert well._sampler.on_device
    assert "tokens are sampled" not in caplog.text
    check._agreed.clear()
    monkeypatch.setattr(*changed(kernel, "draw_tokens", shifted(1)))
    ill = TorchEngine.adopt(build(family).to(DEVICE))
    assert not ill._sampler.on_device
    assert "tokens are sampled on the host" in caplog.text
    assert "values differ from the reference's by 0.01 nats" in caplog.text
    assert first_tokens(ill) == first_tokens(well)


@pytest.mark.slow
def test_check_runs_once_per_dtype_and_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []
    complete = TorchSampler.draw
    monkeypatch.setattr(TorchSampler, "draw", lambda *args: requested.append(1) or complete(*args))
    TorchEngine.adopt(build("llama").to(DEVICE))
    n = len(requested)
    assert n > 3
    TorchEngine.adopt(build("qwen2").to(DEVICE))
    assert len(requested) == n
    TorchEngine.adopt(build("llama").half().to(DEVICE))
    assert len(requested) == 2 * n


def test_error_in_a_kernel_falls_back_to_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise ForwardError("the device failed in a step")

    monkeypatch.setattr(TorchSampler, "draw", fails)
    engine = TorchEngine.adopt(build("llama").to(DEVICE))
    assert not engine._sampler.on_device
    assert "ForwardError: the device failed in a step" in caplog.text


def test_out_of_memory_in_the_check_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def has_none(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TorchSampler, "draw", has_none)
    with pytest.raises(ModelLoadError, match=r"no memory left to draw with: CUDA out of memory"):
        TorchEngine.adopt(build("llama").to(DEVICE))


def test_sampling_on_a_host_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "is_for_triton", lambda _: False)
    monkeypatch.setattr(TorchSampler, "draw", None)
    assert TorchEngine.adopt(build("llama").to(DEVICE)).info.n_vocab == N_VOCAB
