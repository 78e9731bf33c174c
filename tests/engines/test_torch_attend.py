"""The attention products against one softmax over everything."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from weft.engines.torch.kv_backend import AttentionSpec  # noqa: E402
from weft.engines.torch.padded import attention  # noqa: E402
from weft.engines.torch.padded.attention import Mask  # noqa: E402

pytestmark = pytest.mark.torch
B, K, Q, S, D = 2, 3, 4, 9, 8


def _inputs(
    dtype: Any = torch.float32, value_dim: int = D, queries: int = Q
) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((B, K, queries, D), (B, K, S, D), (B, K, S, value_dim))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def _full_softmax(q: Any, k: Any, v: Any, spec: AttentionSpec, bias: Any = 0.0) -> tuple[Any, Any]:
    scores = (q.double() @ k.double().transpose(-1, -2)) * spec.scale
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores = scores + bias
    return torch.softmax(scores, -1) @ v.double(), torch.logsumexp(scores, -1)


@pytest.mark.parametrize("queries", [1, 2, Q])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)],
)
def test_fused_and_plain_products_equal_a_softmax(
    dtype: Any, tolerance: float, queries: int
) -> None:
    q, k, v = _inputs(dtype, queries=queries)
    spec = AttentionSpec(0.3)
    want, want_lse = _full_softmax(q, k, v, spec)
    for out, lse in (attention.attend(q, k, v, spec), attention.plain(q, k, v, spec)):
        assert lse.dtype == torch.float32
        assert (out.double() - want).abs().max() < tolerance
        assert (lse.double() - want_lse).abs().max() < tolerance


def test_softcap_and_unequal_head_sizes_take_the_plain_product() -> None:
    q, k, v = _inputs(value_dim=5)
    for spec in (AttentionSpec(0.3), AttentionSpec(0.3, softcap=1.5)):
        out, lse = attention.attend(q, k, v, spec)
        want, want_lse = _full_softmax(q, k, v, spec)
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_query_that_sees_nothing_weighs_nothing(softcap: float | None) -> None:
    q, k, v = _inputs()
    hidden = torch.zeros(Q, S, dtype=torch.bool)
    hidden[1] = True
    hidden[2, 3:] = True
    mask = Mask(torch.zeros(Q, S).masked_fill(hidden, -math.inf), hidden.all(-1))
    spec = AttentionSpec(0.3, softcap)
    out, lse = attention.attend(q, k, v, spec, mask)
    assert torch.isneginf(lse[:, :, 1]).all()
    assert (out[:, :, 1] == 0).all()
    recorded = [0, 2, 3]
    want, want_lse = _full_softmax(q[:, :, recorded], k, v, spec, mask.bias[recorded])
    torch.testing.assert_close(out[:, :, recorded].double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse[:, :, recorded].double(), want_lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cut", range(1, S))
def test_merged_parts_equal_full_attention(cut: int) -> None:
    q, k, v = _inputs()
    spec = AttentionSpec(0.3)
    out, lse = attention.attend(q, k[:, :, :cut], v[:, :, :cut], spec)
    attention.merge(out, lse, *attention.attend(q, k[:, :, cut:], v[:, :, cut:], spec))
    want, want_lse = _full_softmax(q, k, v, spec)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)


def test_merging_a_dead_piece_changes_nothing() -> None:
    q, k, v = _inputs()
    out, lse = attention.attend(q, k, v, AttentionSpec(0.3))
    before, before_lse = out.clone(), lse.clone()
    attention.merge(out, lse, torch.zeros_like(out), torch.full_like(lse, -math.inf))
    assert torch.equal(out, before)
    assert torch.equal(lse, before_lse)


def test_sinks_equal_one_key_without_a_value() -> None:
    q, k, v = _inputs()
    sinks = torch.tensor([0.5, -1.0, 2.0])
    out, lse = attention.attend(q, k, v, AttentionSpec(0.3))
    attention.apply_sinks(out, lse, sinks[None, :, None])
    scores = torch.cat(
        [q @ k.transpose(-1, -2) * 0.3, sinks[None, :, None, None].expand(B, K, Q, 1)], -1
    )
    want = torch.softmax(scores, -1)[..., :-1] @ v
    torch.testing.assert_close(out, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("block", [3, 256])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_causal_rows_equal_a_masked_softmax(
    monkeypatch: pytest.MonkeyPatch, block: int, window: int | None, softcap: float | None
) -> None:
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(B, 2 * K, S, D, generator=generator)
    k, v = (torch.randn(B, K, S, D, generator=generator) for _ in range(2))
    spec = AttentionSpec(0.3, softcap, window)
    behind = torch.arange(S)[:, None] - torch.arange(S)[None]
    hidden = (behind < 0) | (behind >= (window or S))
    bias = torch.zeros(S, S).masked_fill(hidden, -math.inf)
    repeated = (t.repeat_interleave(2, 1) for t in (k, v))
    want, want_lse = _full_softmax(q, *repeated, spec, bias)
    choices = [attention.causal_bands(S, window, q)] + ([None] if window is None else [])
    for bands in choices:
        out, lse = attention.attend_causal(q, k, v, spec, bands)
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)
