"""A mixture's routers as one kernel: which are fused, and their choices."""

from __future__ import annotations

import importlib
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from compiled import compiled  # noqa: E402
from families import IDS, build, plain_logits, stepped  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.attention_hook import attach_context  # noqa: E402
from weft.engines.torch.fused.routers import fuse_routers  # noqa: E402
from weft.engines.torch.kv_backend import ExpertGroups, RouterSpec  # noqa: E402
from weft.engines.torch.paged import kernel, routers, step  # noqa: E402

if not (kernel.is_interpreted() or torch.cuda.is_available()):
    pytest.skip("triton has neither its interpreter nor a card", allow_module_level=True)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.kernels,
    pytest.mark.usefixtures("one_load_check"),
]
DEVICE = torch.device("cpu" if kernel.is_interpreted() else "cuda")
INFINITY = float("inf")
N_ROUTERS = {"mixtral": 3, "qwen2_moe": 3, "afmoe": 2, "deepseek_v3": 2, "gpt_oss": 3, "phi3": 0}


def actual(model: Any, dtype: Any = torch.float32) -> list[Any]:
    attach_context(model)
    n = fuse_routers(model, dtype)
    forms = [module.__dict__.get("weft_form") for module in model.modules()]
    assert sum(form is not None for form in forms) == n
    return [form for form in forms if form is not None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", N_ROUTERS)
def test_routers_of_a_family_are_patched(name: str, dtype: str) -> None:
    model = build(name, getattr(torch, dtype))
    assert len(actual(model, getattr(torch, dtype))) == N_ROUTERS[name]


SOFTMAX = RouterSpec(2, "softmax", is_normed=True, by_logits=False)
SIGMOID = RouterSpec(4, "sigmoid", is_normed=True, by_logits=False, scale=2.5)
BIAS = "e_score_correction_bias"
# Of which family: what its configuration says, and what its router does.
ROUTERS: dict[str, tuple[str, dict[str, Any], RouterSpec, str | None]] = {
    "MixtralTopKRouter": ("mixtral", {"num_local_experts": 6}, SOFTMAX, None),
    "OlmoeTopKRouter": (
        "olmoe",
        {"num_experts": 60, "num_experts_per_tok": 5},
        RouterSpec(5, "softmax", False, False),
        None,
    ),
    "GptOssTopKRouter": (
        "gpt_oss",
        {"num_local_experts": 32, "num_experts_per_tok": 2},
        SOFTMAX,
        None,
    ),
    "DeepseekV3TopkRouter": (
        "deepseek_v3",
        {"n_routed_experts": 32, "num_experts_per_tok": 4, "n_group": 8, "topk_group": 3},
        SIGMOID._replace(groups=ExpertGroups(8, 3, "two")),
        BIAS,
    ),
    "DeepseekV2TopkRouter": (
        "deepseek_v2",
        {"n_routed_experts": 16, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
        RouterSpec(3, "softmax", False, False, ExpertGroups(4, 2, "one"), 16.0),
        None,
    ),
    "Kolibri1TopKRouter": (
        "kolibri1",
        {"num_experts": 12, "num_experts_per_tok": 3},
        RouterSpec(3, "sigmoid", False, True),
        BIAS,
    ),
    "LongcatFlashTopkRouter": (
        "longcat_flash",
        {"n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 4},
        RouterSpec(4, "softmax", False, False, scale=6),
        BIAS,
    ),
    "HYV3TopKRouter": (
        "hy_v3",
        {"num_experts": 9, "num_experts_per_tok": 4, "router_scaling_factor": 2.5},
        SIGMOID,
        "",
    ),
}  # fmt: skip


def router_of(name: str, dtype: Any = torch.float32) -> Any:
    family, changed, *_ = ROUTERS[name]
    modelling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = transformers.AutoConfig.for_model(family, hidden_size=64, **changed)
    module = getattr(modelling, name)(config).to(DEVICE)
    seeded = torch.Generator().manual_seed(3)
    for stored in (*module.parameters(), *module.buffers()):
        scale = 0.3 if stored.dim() > 1 else 0.1
        stored.data.copy_(torch.randn(stored.shape, generator=seeded) * scale)
    return module.to(dtype)


class InStep:
    """A step that has nothing but these kernels, and counts."""

    has_fused_ops = True
    supports_routing = staticmethod(routers.supports_routing)

    def __init__(self) -> None:
        self.n = 0

    def select_experts(self, *given: Any) -> Any:
        self.n += 1
        return routers.select_experts(*given)


def both(module: Any, *given: Any) -> tuple[Any, Any, int]:
    """Return the results of a module without and with a step, and the number of fused calls."""
    in_step, call = InStep(), module.call
    with torch.inference_mode():
        plain = module.inner(*given)
        call.step = in_step
        try:
            return plain, module.inner(*given), in_step.n
        finally:
            call.step = None


def ours(module: Any, dtype: Any = torch.float32) -> Any:
    """A module in our copy's shape: seated, and fused if it is a router."""
    box = torch.nn.ModuleList([module])
    call = attach_context(box)
    n = fuse_routers(box, dtype)
    return SimpleNamespace(inner=box[0], call=call, n=n)


def check_same(plain: Any, result: Any, near: float = 1e-6) -> None:
    """The same experts with the same shares, in whatever order."""
    for one, other in zip(plain, result, strict=True):
        assert (one.shape, one.dtype.is_floating_point) == (
            other.shape,
            other.dtype.is_floating_point,
        )
    assert plain[1].dtype == result[1].dtype
    assert plain[2].dtype == result[2].dtype == torch.int64
    torch.testing.assert_close(plain[0].float(), result[0].float(), rtol=near, atol=near)
    (want, at), (got, to) = plain[2].sort(-1), result[2].sort(-1)
    assert torch.equal(want, got)
    torch.testing.assert_close(
        plain[1].gather(-1, at), result[1].gather(-1, to), rtol=near, atol=near
    )


@pytest.mark.parametrize("name", ROUTERS)
def test_router_chooses_as_its_own_code_does(name: str) -> None:
    module = ours(router_of(name))
    form = module.inner.__dict__["weft_form"]
    assert (form.router, form.bias) == ROUTERS[name][2:]
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    given = [torch.linspace(-1, 1, 9, device=DEVICE)] if form.bias == "" else []
    plain, result, n = both(module, x, *given)
    assert n == 1
    check_same(plain, result)


@pytest.mark.parametrize("name", ROUTERS)
def test_half_precision_shares_keep_their_dtype(name: str) -> None:
    """And logits are computed as before: of two equal ones, either may be chosen."""
    module = ours(router_of(name, torch.float16), torch.float16)
    form = module.inner.__dict__["weft_form"]
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    given = [torch.linspace(-1, 1, 9, device=DEVICE)] if form.bias == "" else []
    plain, result, n = both(module, x, *given)
    assert n == 1
    assert plain[1].dtype == result[1].dtype
    torch.testing.assert_close(plain[0].float(), result[0].float(), rtol=1e-3, atol=1e-3)
    is_same = (plain[2].sort(-1).values == result[2].sort(-1).values).all(-1)
    assert is_same.float().mean() > 0.9
    kept = [each[is_same] for each in plain], [each[is_same] for each in result]
    check_same(*kept, near=4e-3)


def wanted(logits: Any, bias: Any, router: RouterSpec) -> tuple[Any, Any]:
    """Token by token, in float64."""
    numbers, shares = [], []
    for row in np.asarray(logits, np.float64):
        if router.function == "softmax":
            result = np.exp(row - row.max())
            result /= result.sum()
        else:
            result = 1 / (1 + np.exp(-row))
        scores = (row if router.by_logits else result) + (0 if bias is None else bias)
        if router.groups is not None:
            by_group = scores.reshape(router.groups.n, -1)
            count = 2 if router.groups.by == "two" else 1
            best = np.sort(by_group, 1)[:, -count:].sum(1)
            for group in np.argsort(best, kind="stable")[: router.groups.n - router.groups.n_kept]:
                by_group[group] = -INFINITY
            scores = by_group.flatten()
        few = np.argsort(-scores, kind="stable")[: router.top_k]
        share = result[few] / (result[few].sum() if router.is_normed else 1)
        numbers.append(few)
        shares.append(share * router.scale)
    return np.stack(numbers), np.stack(shares)


# All combinations at one number of experts; at the others those of softmax and sigmoid families.
LAYOUTS = [
    (3, None), (300, None), (16, ExpertGroups(4, 2, "two")), (256, ExpertGroups(8, 4, "two")),
    (64, ExpertGroups(8, 3, "one")),
]  # fmt: skip
CHOICES = [
    *((60, None, *rest) for rest in product(("softmax", "sigmoid"), *[(False, True)] * 3)),
    *((*layout, "softmax", True, True, False) for layout in LAYOUTS),
    *((*layout, "sigmoid", True, False, True) for layout in LAYOUTS),
]


@pytest.mark.parametrize(
    ("n_experts", "groups", "function", "is_normed", "by_logits", "has_bias"), CHOICES
)
def test_kernel_chooses_the_largest(
    n_experts: int, groups: Any, function: Any, *, is_normed: bool, by_logits: bool, has_bias: bool
) -> None:
    seeded = torch.Generator().manual_seed(n_experts)
    logits = torch.randn(9, 2 * n_experts, generator=seeded)[:, :n_experts] * 3
    bias = torch.randn(n_experts, generator=seeded) * 0.2 if has_bias else None
    router = RouterSpec(min(6, n_experts), function, is_normed, by_logits, groups, 1.5)
    logits, bias = logits.to(DEVICE), None if bias is None else bias.to(DEVICE)
    assert routers.supports_routing(logits, bias, router)
    numbers, shares = routers.select_experts(logits, bias, router)
    want = wanted(logits.cpu().numpy(), None if bias is None else bias.cpu().numpy(), router)
    assert np.array_equal(numbers.cpu().numpy(), want[0])
    np.testing.assert_allclose(shares.cpu().numpy(), want[1], rtol=2e-5)


def test_first_experts_of_equal_scores_are_chosen_once() -> None:
    same = torch.zeros(2, 24, device=DEVICE)
    same[1] = -INFINITY
    router = RouterSpec(5, "sigmoid", is_normed=False, by_logits=True)
    numbers, shares = routers.select_experts(same, None, router)
    assert numbers.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert shares[0].tolist() == [0.5] * 5
    assert shares[1].abs().max() < 1e-30
    kept = router._replace(groups=ExpertGroups(4, 1, "one"), top_k=6)
    few, _ = routers.select_experts(torch.arange(16.0, device=DEVICE)[None], None, kept)
    assert few.tolist() == [[15, 14, 13, 12, 0, 1]]  # of other groups, once there is no more


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN")
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("is_normed", [False, True])
def test_nan_is_chosen_and_stays_nan(function: Any, *, is_normed: bool) -> None:
    """So that a broken model is noticed; PyTorch has such numbers above all others, too."""
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[0, 5] = float("nan")
    logits[1] = float("nan")
    router = RouterSpec(2, function, is_normed, by_logits=False)
    numbers, shares = routers.select_experts(logits, None, router)
    assert ((numbers >= 0) & (numbers < 8)).all()
    assert function == "softmax" or 5 in numbers[0].tolist()
    assert shares[0].isnan().any()
    assert shares[1].isnan().all()
    assert not shares[2].isnan().any()


def test_shares_far_below_the_largest_are_not_lost() -> None:
    """Chosen for their biases, among logits that are much larger: a softmax of theirs alone."""
    logits = torch.tensor([[200.0, 1.0, 0.0, -300.0]], device=DEVICE)
    bias = torch.tensor([-1000.0, 0.0, 0.0, 0.0], device=DEVICE)
    router = RouterSpec(2, "softmax", is_normed=True, by_logits=True)
    numbers, shares = routers.select_experts(logits, bias, router)
    assert numbers.tolist() == [[1, 2]]
    torch.testing.assert_close(shares[0], torch.tensor([1.0, 0.0], device=DEVICE).softmax(0))


def test_unsupported_routing_is_reported() -> None:
    logits = torch.zeros(4, 16, device=DEVICE)
    router = RouterSpec(2, "softmax", is_normed=True, by_logits=False)
    assert routers.supports_routing(logits, None, router)
    assert not routers.supports_routing(logits[None], None, router)
    assert not routers.supports_routing(logits.t(), None, router)
    assert not routers.supports_routing(logits.double(), None, router)
    assert not routers.supports_routing(logits, logits[0, :8], router)
    assert not routers.supports_routing(logits, None, router._replace(top_k=17))
    of_six = torch.zeros(4, 48, device=DEVICE)
    assert not routers.supports_routing(
        of_six, None, router._replace(groups=ExpertGroups(6, 2, "two"))
    )
    assert not routers.supports_routing(
        logits, None, router._replace(groups=ExpertGroups(16, 2, "two"))
    )
    numbers, shares = routers.select_experts(logits[:0], None, router)
    assert (numbers.shape, shares.shape) == ((0, 2), (0, 2))


def test_unusual_arguments_of_a_router_run_its_own_code() -> None:
    """A bias too many, or one that is missing."""
    own, given = ours(router_of("Kolibri1TopKRouter")), ours(router_of("HYV3TopKRouter"))
    x, bias = torch.ones(2, 64, device=DEVICE), torch.zeros(12, device=DEVICE)
    for module, more in ((own, [bias]), (given, [])):
        module.call.step = InStep()
        with torch.inference_mode(), pytest.raises(TypeError, match="positional argument"):
            module.inner(x, *more)
        assert module.call.step.n == 0


class Plain(torch.nn.Module):
    """A router as families write it, but for what a subclass does."""

    top_k = 2

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        seeded = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(6, 16, generator=seeded))

    def logits(self, x: Any) -> Any:
        return torch.nn.functional.linear(x, self.weight)

    def scores(self, logits: Any) -> Any:
        return logits.softmax(-1)

    def forward(self, x: Any) -> Any:
        logits = self.logits(x)
        shares, numbers = self.scores(logits).topk(self.top_k, dim=-1)
        return logits, shares, numbers


class Capped(Plain):
    def logits(self, x: Any) -> Any:
        return 8 * torch.tanh(super().logits(x) / 8)


class Rooted(Plain):
    def scores(self, logits: Any) -> Any:
        return torch.nn.functional.softplus(logits).sqrt()


class ScaledByExpert(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("each", torch.ones(6))

    def forward(self, x: Any) -> Any:
        logits, shares, numbers = super().forward(x)
        return logits, shares * self.argument_format[numbers], numbers


class OneMore(Plain):
    def forward(self, x: Any) -> Any:
        return (*super().forward(x)[:2], super().forward(x)[2].roll(1, -1))


class Smallest(Plain):
    def forward(self, x: Any) -> Any:
        logits = self.logits(x)
        shares, numbers = self.scores(logits).topk(self.top_k, dim=-1, largest=False)
        return logits, shares, numbers


@pytest.mark.parametrize("kind", [Capped, Rooted, ScaledByExpert, OneMore, Smallest])
def test_modules_that_compute_something_else_are_not_fused(kind: Any) -> None:
    (usual,) = actual(torch.nn.ModuleList([Plain()]))
    assert usual.router == RouterSpec(2, "softmax", is_normed=False, by_logits=False)
    assert actual(torch.nn.ModuleList([kind()])) == []


def test_router_with_a_forward_of_its_own_stays() -> None:
    patched = Plain()
    patched.forward = lambda x: Plain.forward(patched, 2 * x)
    assert actual(torch.nn.ModuleList([patched])) == []


def _write(module: Any) -> None:
    module.weight.data.mul_(-1)


def _replace(module: Any) -> None:
    module.weight = torch.nn.Parameter(module.weight.detach().flip(0).clone())


def _parametrise(module: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(module, "weight", torch.nn.Tanh())


def _hook(module: Any) -> None:
    module.register_forward_hook(
        lambda module, given, result: (result[0], 2 * result[1], result[2])
    )


@pytest.mark.parametrize("change", [_write, _replace, _parametrise, _hook])
def test_later_change_of_a_router_changes_the_result(change: Any) -> None:
    module = ours(Plain().to(DEVICE))
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    before, result, n = both(module, x)
    assert (module.n, n) == (1, 1)
    check_same(before, result)
    change(module.inner)
    plain, result, _ = both(module, x)
    check_same(plain, result)
    assert not torch.equal(plain[1], before[1])


@pytest.mark.parametrize(
    "name",
    ["deepseek_v3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("afmoe", "gpt_oss"))],
)
def test_model_gives_what_it_did(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n_rows: list[int] = []

    def noted(logits: Any, *more: Any) -> Any:
        n_rows.append(len(logits))
        return routers.select_experts(logits, *more)

    monkeypatch.setattr(step, "select_experts", noted)
    engine = TorchEngine.adopt(build(name).to(DEVICE), kv="paged", graphs=False)
    n_rows.clear()
    got = stepped(engine)
    assert n_rows == N_ROUTERS[name] * [6] + N_ROUTERS[name] * (len(IDS) - 6) * [1]
    np.testing.assert_allclose(got, plain_logits(build(name), IDS).numpy(), atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize(("n_experts", "n_groups"), [(8, 0), (256, 8), (1024, 0)])
def test_kernel_fits_a_card(capability: int, n_experts: int, n_groups: int) -> None:
    pad = kernel.block_size_for(n_experts)
    fixed = {
        "N_EXPERTS": n_experts, "PAD": pad, "TOP_K": 8, "K_PAD": 8, "FUNCTION": "sigmoid",
        "IS_NORMED": True, "BY_LOGITS": False, "HAS_BIAS": True, "N_GROUPS": n_groups,
        "N_KEPT": 4 if n_groups else 0, "BY_TWO": True, "SCALE": 2.5,
        "num_warps": 1 if pad <= 256 else 4,
    }  # fmt: skip
    kinds = {"logit_ptr": "fp32", "bias_ptr": "fp32", "chosen_ptr": "i64", "share_ptr": "fp32"}
    result = compiled("paged.routers", "topk_routing_kernel", fixed, capability=capability, **kinds)
    assert (result.stack, result.shared <= 4096) == (0, True)
