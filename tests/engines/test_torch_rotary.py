"""Heads that a model's own attention turns: which functions are known, what the kernel gives."""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from cases import first_of  # noqa: E402
from families import IDS, build, plain_logits, stepped  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.attention_hook import attach_context  # noqa: E402
from weft.engines.torch.fused import rotary  # noqa: E402
from weft.engines.torch.kv_backend import RotaryLayout  # noqa: E402
from weft.engines.torch.paged import elementwise, kernel  # noqa: E402
from weft.engines.torch.paged.step import PagedBackend  # noqa: E402

if not (kernel.is_interpreted() or torch.cuda.is_available()):
    pytest.skip("triton has neither its interpreter nor a card", allow_module_level=True)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.kernels,
    pytest.mark.usefixtures("one_load_check"),
]
DEVICE = torch.device("cpu" if kernel.is_interpreted() else "cuda")
FLOAT, BRAIN = torch.float32, torch.bfloat16


def actual(model: Any) -> int:
    return rotary.fuse_rotary(model, attach_context(model), next(model.parameters()).dtype)


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
@pytest.mark.parametrize(
    ("name", "n"),
    [("gemma2", 3), ("gemma3_text", 3), ("olmo2", 3), ("phi3", 3), ("gpt_neox", 3), ("gpt_oss", 3),
     ("gemma3n", 5), ("cohere", 3), ("glm", 3), ("ernie4_5", 3), ("gpt2", 0), ("opt", 0)],
)  # fmt: skip
def test_attention_with_rotary_embedding_is_patched(name: str, n: int, dtype: Any) -> None:
    assert actual(build(name, dtype)) == n


def halves(x: Any) -> Any:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def complete(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + halves(q) * sin, k * cos + halves(k) * sin


def part(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    n = cos.shape[-1]
    turned = complete(q[..., :n], k[..., :n], cos, sin, unsqueeze_dim)
    rests = q[..., n:], k[..., n:]
    return tuple(torch.cat(pair, -1) for pair in zip(turned, rests, strict=True))


def half(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return complete(q, k, cos.repeat(1, 1, 2), sin.repeat(1, 1, 2), unsqueeze_dim)


def one(x: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return complete(x, x, cos, sin, unsqueeze_dim)[0]


def narrowed(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return tuple(each.to(q.dtype) for each in complete(q, k, cos, sin, unsqueeze_dim))


def backwards(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return complete(q, k, cos, -sin, unsqueeze_dim)


def neighbours(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    others = [torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) for x in (q, k)]
    return q * cos + others[0] * sin, k * cos + others[1] * sin


def by_pair(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """Of the cosines of halves it takes those of the first."""
    cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, -1) for x in (cos, sin))
    return neighbours(q, k, cos, sin, unsqueeze_dim)


def part_by_pair(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    n = cos.shape[-1]
    turned = by_pair(q[..., :n], k[..., :n], cos, sin, unsqueeze_dim)
    rests = q[..., n:], k[..., n:]
    return tuple(torch.cat(pair, -1) for pair in zip(turned, rests, strict=True))


def half_by_pair(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return by_pair(q, k, cos.repeat(1, 1, 2), sin.repeat(1, 1, 2), unsqueeze_dim)


def reordered(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """Neighbours turn, and lie in halves then."""
    pairs = [each.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for each in (q, k)]
    return complete(*pairs, cos, sin, unsqueeze_dim)


def with_keys_left(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return complete(q, k, cos, sin, unsqueeze_dim)[0], k


@pytest.mark.parametrize(
    ("function", "n", "cosines", "are_neighbours", "every", "with_wide"),
    [(complete, 2, "full", False, 1, False), (part, 2, "part", False, 1, False),
     (half, 2, "half", False, 1, False), (one, 1, "full", False, 1, False),
     (narrowed, 2, "full", False, 1, True), (neighbours, 2, "full", True, 1, False),
     (by_pair, 2, "full", True, 2, False), (part_by_pair, 2, "part", True, 2, False),
     (half_by_pair, 2, "half", True, 2, False)],
)  # fmt: skip
def test_functions_are_known_by_what_they_do(
    function: Any, n: int, cosines: str, are_neighbours: bool, every: int, *, with_wide: bool
) -> None:
    """With cosines of float32 where heads of bfloat16 stay so; else their results are wider."""
    known = rotary._recognize(function, BRAIN)
    assert known is not None
    form = known.form
    assert form == (n, cosines, are_neighbours, every)
    assert ((BRAIN, FLOAT) in known.dtypes) == with_wide
    for width in (64, 32):
        n_turned = {"full": width // 64 * 64, "part": width, "half": width % 64 * 2}[cosines]
        assert form.pairs(64, width) == ((n_turned, are_neighbours, every) if n_turned else None)


@pytest.mark.parametrize("function", [backwards, reordered, with_keys_left, len, torch.add])
def test_other_rotation_is_not_recognized(function: Any) -> None:
    assert rotary._recognize(function, FLOAT) is None


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("n", [12, 8])
@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("pairing", [(False, 1), (True, 1), (True, 2)])
def test_heads_of_many_programs_are_turned(
    axis: int, n: int, pairing: tuple[bool, int], *, is_half: bool
) -> None:
    """More heads than a program takes, that lie as projections leave them; rests pass."""
    seeded, pairs = torch.Generator(DEVICE).manual_seed(1), RotaryLayout(n, *pairing)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, device=DEVICE, generator=seeded)

    both = normal(1, 77, 9, 12)
    heads = [some.transpose(1, 3 - axis) for some in both.split([6, 3], 2)]
    # Of a token there is more than its cosines.
    cos, sin = normal(2, 1, 77, 20)[..., : n // 2 if is_half else n]
    for some in (heads, heads[:1], [heads[1].contiguous(), heads[0]]):
        assert elementwise.supports_rotary(some, cos, sin, axis)
        for result, x in zip(
            elementwise.apply_rotary(some, cos, sin, axis, pairs), some, strict=True
        ):
            want = rotary.reference_rotary(x, cos, sin, axis, pairs)
            torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-5)
    others = ((heads, cos[:, :70], sin[:, :70]), (heads, cos, sin.half()), (heads, cos[0], sin[0]))
    for some, other_cos, other_sin in others:
        assert not elementwise.supports_rotary(some, other_cos, other_sin, axis)
    assert not elementwise.supports_rotary([heads[0][..., ::2]], cos, sin, axis)


@pytest.mark.parametrize("name", first_of(["gemma2", "gpt_neox", "cohere", "glm", "ernie4_5"]))
def test_owners_classes_stay_what_they_are(name: str) -> None:
    """In one of the files forward is decorated, in the other it is not."""
    model = build(name).to(DEVICE)
    file = sys.modules[type(model).__module__]
    before = dict(vars(file))
    kinds = {type(module): type(module).forward for module in model.modules()}
    engine = TorchEngine.adopt(model, kv="paged", graphs=False)
    assert isinstance(engine.fragments, PagedBackend)
    assert engine.fragments.usage() == (0, 0)
    np.testing.assert_allclose(stepped(engine), plain_logits(build(name), IDS).numpy(), atol=2e-4)
    assert dict(vars(file)) == before
    assert {type(module): type(module).forward for module in model.modules()} == kinds
    kinds_here = [type(module).__name__ for module in engine.model.modules()]
    assert sum(kind.endswith("AttentionByStep") for kind in kinds_here) == 3


def test_forward_that_others_have_put_there_stays() -> None:
    """The forward may be of one module, or wrap that of the class without naming it."""
    model = build("gemma2")
    attention: Any = model.model.layers[0].self_attn
    own = type(attention).forward

    @wraps(own)
    def watched(self: Any, *given: Any, **named: Any) -> Any:
        return type(self).own_forward(self, *given, **named)

    attention.forward = own.__get__(attention)
    other: Any = model.model.layers[1].self_attn
    other.__class__ = type("Watched", (type(other),), {"own_forward": own, "forward": watched})
    assert actual(model) == 1
