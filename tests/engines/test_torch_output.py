"""Logits of the torch engine stay on their device until they are read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import weft  # noqa: E402
from shallow import shallow  # noqa: E402
from weft._core.sampling.metrics import log_softmax  # noqa: E402
from weft.engines.torch.output import DeviceLogits, TorchOutput, _LogprobsBlock  # noqa: E402
from weft.errors import ForwardError  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("indices", [[4], [1, 3, 4], range(6)])
def test_kept_rows_keep_their_dtype_and_only_what_is_wanted(
    dtype: torch.dtype, indices: Sequence[int]
) -> None:
    with torch.inference_mode():
        logits = torch.randn(6, 50).to(dtype)
    output = TorchOutput(logits, [])
    kept = output.retain(indices)
    assert kept.tensor.dtype == dtype
    n_rows = len(indices) if len(indices) < 3 else 6
    assert kept.n_bytes == n_rows * 50 * dtype.itemsize
    for number, index in enumerate(indices):
        expected = logits[index].float().numpy()
        assert np.array_equal(kept.logits(number), expected)
        with ThreadPoolExecutor(1) as other:
            assert np.array_equal(other.submit(kept.logits, number).result(), expected)
        own = output.logits(index)
        own[:] = 0
        assert np.array_equal(output.logits(index), expected)


def test_logprobs_are_computed_on_the_device_of_the_logits() -> None:
    with torch.inference_mode():
        kept = TorchOutput(torch.randn(5, 300).bfloat16(), []).retain([1, 4, 2])
    for number in range(3):
        want = log_softmax(kept.logits(number))
        array, tensor = (kept.logprobs(number, on_host=on_host) for on_host in (True, False))
        np.testing.assert_allclose(array, want, atol=1e-5)
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.dtype == torch.float32
        assert not tensor.is_inference()  # a program may go on with it in any way
        array[:] = 0  # the caller's own
        tensor.zero_()


@pytest.mark.parametrize("on_host", [False, True])
def test_logprobs_of_neighbours_are_computed_together_and_cached_once(
    on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.engines.torch.output._BLOCK_BYTES", 4 * 300 * 3)  # three rows
    first, other = (TorchOutput(torch.randn(8, 300), []).retain(range(8)) for _ in range(2))
    wanted = first.tensor.log_softmax(-1).numpy()
    created = list[int]()
    real = _LogprobsBlock.from_logits.__func__  # type: ignore[attr-defined]

    def counted(cls: type, logits: torch.Tensor, first: int, *, on_host: bool) -> object:
        created.append(len(logits))
        return real(cls, logits, first, on_host=on_host)

    monkeypatch.setattr(_LogprobsBlock, "from_logits", classmethod(counted))
    for number in (0, 1, 2, 3, 7):
        row = first.logprobs(number, on_host=on_host)
        np.testing.assert_allclose(np.asarray(row), wanted[number], atol=1e-6)
        row[:] = 0  # the caller's own
    assert created == [1, 3, 3, 2]
    assert other.logprobs(5, on_host=on_host) is not None
    assert first.logprobs(6, on_host=on_host) is not None
    assert created == [1, 3, 3, 2, 1]  # a block for one row evicts nothing
    assert other.logprobs(4, on_host=on_host) is not None
    assert other._block is not None
    assert first._block is None


@pytest.mark.parametrize("on_device", [False, True])
def test_callers_get_far_rows_without_their_logits_on_the_host(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card: every answer without a fetched row is computed from the logits on the card."""
    contexts = [[5, 9, 40 + i] for i in range(6)] + [[5, 9, 40]]
    with weft.load(str(shallow()), engine="torch") as lm:
        near = weft.AsyncLM(lm)
        want = [row.numpy() for row in near.batch_next_token_logprobs_sync(contexts)]
        near.clear_cache()
        lm.engine.info = replace(lm.engine.info, logits_on_device=True)
        model = weft.AsyncLM(lm, on_device=on_device)
        with monkeypatch.context() as patch:
            patch.setattr(
                DeviceLogits, "logits", lambda self, number: pytest.fail("it was fetched")
            )

            async def ask() -> list[torch.Tensor]:
                return await asyncio.gather(*map(model.next_token_logprobs, contexts))

            single = asyncio.run(ask())
            repeated = model.next_token_logprobs_sync(contexts[2])
            together = model.batch_next_token_logprobs_sync(contexts)
            depths = model.prefix_logprobs_sync(contexts[0])
            tops = model.batch_top_logprobs_sync(contexts[:2], 3)
        for row, expected in zip(single, want, strict=True):
            np.testing.assert_allclose(row.numpy(), expected, atol=1e-5)
        np.testing.assert_allclose(repeated.numpy(), want[2], atol=1e-5)
        np.testing.assert_allclose(together.numpy(), np.stack(want), atol=1e-5)
        np.testing.assert_allclose(depths.numpy()[-1], want[0], atol=1e-5)
        assert tops.ids.tolist()[0][0] == int(want[0].argmax())
        # A row that another call has fetched is used as well.
        weft.Loom(lm, contexts[1]).next(1)
        mixed = model.batch_next_token_logprobs_sync(contexts[:3])
        np.testing.assert_allclose(mixed.numpy(), np.stack(want[:3]), atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("is_first", [True, False])
def test_row_with_nan_or_inf_raises_on_the_host(value: float, *, is_first: bool) -> None:
    """Alone or computed with its neighbours, which are valid."""
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    logits[2] = value
    kept = DeviceLogits(logits)
    for number in (2,) if is_first else (0, 1, 3):
        if number != 2:
            row = kept.logprobs(number, on_host=True)
            torch.testing.assert_close(torch.from_numpy(row), logits[number].log_softmax(-1))
    with pytest.raises(ForwardError, match="NaN or"):
        kept.logprobs(2, on_host=True)
    assert kept.logprobs(2, on_host=False).isnan().all()
