"""Logits of the torch engine stay where they are until somebody reads them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from weft.engines.torch.output import TorchOutput  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("indices", [[4], [1, 3, 4], range(6)])
def test_kept_rows_keep_their_dtype_and_only_what_is_wanted(
    dtype: torch.dtype, indices: Sequence[int]
) -> None:
    with torch.inference_mode():
        logits = torch.randn(6, 50).to(dtype)
    output = TorchOutput(logits, [])
    kept = output.keep(indices)
    assert kept.tensor.dtype == dtype
    n_held = len(indices) if len(indices) < 3 else 6
    assert kept.n_bytes == n_held * 50 * dtype.itemsize
    for number, index in enumerate(indices):
        expected = logits[index].float().numpy()
        assert np.array_equal(kept.logits(number), expected)
        with ThreadPoolExecutor(1) as other:
            assert np.array_equal(other.submit(kept.logits, number).result(), expected)
        own = output.logits(index)
        own[:] = 0
        assert np.array_equal(output.logits(index), expected)
