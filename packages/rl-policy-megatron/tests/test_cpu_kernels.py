"""One-function formulas of a layer against the plain ones, and that layers on a CPU use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_policy_megatron.cpu_kernels import rms_norm, rotate, swiglu
from rl_policy_megatron.cpu_layers import mlp_forward, rotary

EPS = 1e-3


def _plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def _plain_swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def _plain_rotation(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    width = cosines.size(-1)
    first, second = x[..., :width].chunk(2, dim=-1)
    turned = x[..., :width] * cosines + torch.cat((-second, first), dim=-1) * sines
    return torch.cat((turned, x[..., width:]), dim=-1)


def _tables(length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # Random, not those of angles: each entry must be used where it belongs.
    return torch.rand(length, 1, 1, width, dtype=dtype), torch.rand(length, 1, 1, width, dtype=dtype)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS)


def _case(name: str, dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    """The function, the plain formula, and inputs that both are differentiated by."""
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4, 6, dtype=dtype, requires_grad=True)
    if name == "norm":
        return _norm, _plain_norm, [x, torch.randn(6, dtype=dtype, requires_grad=True)]
    if name == "swiglu":
        return swiglu, _plain_swiglu, [x]
    tables = _tables(3, {"rotation": 6, "rotation of a part": 4}[name], dtype)
    return lambda x: rotate(x, *tables), lambda x: _plain_rotation(x, *tables), [x]


CASES = pytest.mark.parametrize("name", ["norm", "swiglu", "rotation", "rotation of a part"])
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x * 1,
    "a slice": lambda x: torch.cat((x, x), dim=2)[:, :, 1:-3],
    "permuted": lambda x: (x * 1).permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3),
    "one for all": lambda x: x[:1].expand(x.shape),
}


@CASES
def test_gradients_are_those_of_the_values(name: str) -> None:
    function, _, inputs = _case(name, torch.float64)
    assert torch.autograd.gradcheck(function, inputs)


@CASES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_equal_the_plain_formula(name: str, layout: str) -> None:
    function, plain, inputs = _case(name, torch.float32)
    upstream = torch.randn_like(plain(*inputs))
    found, expected = [], []
    for compute, results in ((function, found), (plain, expected)):
        value = compute(LAYOUTS[layout](inputs[0]), *inputs[1:])
        # What comes back may lie in memory in any way, too.
        gradient = upstream.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
        results += [value, *torch.autograd.grad(value, inputs, gradient)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@CASES
def test_without_gradients_the_values_are_the_same_and_the_input_stays(name: str) -> None:
    function, _, inputs = _case(name, torch.float32)
    value = function(*inputs)
    with torch.no_grad():
        kept = inputs[0].clone()
        assert torch.equal(function(*(tensor.detach() for tensor in inputs)), value)
        assert torch.equal(inputs[0], kept)


@CASES
def test_second_derivatives_are_refused(name: str) -> None:
    function, _, inputs = _case(name, torch.float32)
    (slope,) = torch.autograd.grad(function(*inputs).square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_the_norm_of_a_frozen_part() -> None:
    _, _, (x, weight) = _case("norm", torch.float32)
    expected = torch.autograd.grad(_norm(x, weight).sum(), (x, weight))
    assert torch.equal(torch.autograd.grad(_norm(x, weight.detach()).sum(), x)[0], expected[0])
    assert torch.equal(torch.autograd.grad(_norm(x.detach(), weight).sum(), weight)[0], expected[1])


def test_rotated_heads_lie_end_to_end() -> None:
    function, _, (x,) = _case("rotation", torch.float32)
    assert function(x).permute(1, 2, 0, 3).is_contiguous()


def _refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("megatron's own function was called")


def _rotary_config(**changes: Any) -> Any:
    plain = {
        "apply_rope_fusion": False,
        "rotary_interleaved": False,
        "multi_latent_attention": False,
        "context_parallel_size": 1,
    }
    return SimpleNamespace(**{**plain, **changes})


@pytest.mark.parametrize("lengths", [None, [5], [2, 3, 4], [1, 1, 5, 2]])
@pytest.mark.parametrize("mscale", [1.0, 1.25])
def test_rotary_equals_megatrons(lengths: list[int] | None, mscale: float) -> None:
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    torch.manual_seed(0)
    tokens = 7 if lengths is None else sum(lengths)
    angles = torch.outer(torch.arange(tokens if lengths is None else max(lengths)).float(), torch.rand(3))
    frequencies = torch.cat((angles, angles), dim=-1)[:, None, None]
    shape = (tokens, 2, 4, 8) if lengths is None else (tokens, 4, 8)
    x, upstream = torch.randn(shape, requires_grad=True), torch.randn(shape)
    more: dict[str, Any] = {"mscale": mscale, "cp_group": SimpleNamespace(size=lambda: 1, rank=lambda: 0)}
    if lengths is not None:
        more["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).int()
    results = []
    for apply in (rotary(_refuse), apply_rotary_pos_emb):
        value = apply(x, frequencies, config=_rotary_config(), **more)
        results.append([value, *torch.autograd.grad(value, x, upstream)])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"apply_rope_fusion": True},
        {"rotary_interleaved": True},
        {"multi_latent_attention": True},
        {"context_parallel_size": 2},
    ],
)
def test_other_rotations_are_left_to_megatron(change: dict[str, Any]) -> None:
    given: list[Any] = []

    def original(*positional: Any, **named: Any) -> str:
        given.append((positional, named))
        return "megatron's"

    x, frequencies, config = torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4), _rotary_config(**change)
    assert rotary(original)(x, frequencies, config, mscale=2.0, cp_group="group") == "megatron's"
    assert given == [((x, frequencies, config), {"cu_seqlens": None, "mscale": 2.0, "cp_group": "group"})]


def _mlp(**changes: Any) -> Any:
    torch.manual_seed(0)
    first, second = torch.randn(5, 12), torch.randn(6, 5)
    plain = {
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "use_te_activation_func": False,
        "bias_activation_fusion": False,
        "add_bias_linear": False,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
    }
    return SimpleNamespace(
        config=SimpleNamespace(**{**plain, **changes}),
        linear_fc1=lambda x: (x @ first, None),
        linear_fc2=lambda x: (x @ second, None),
    )


@pytest.mark.parametrize("scale", [None, torch.tensor([0.25, 0.5, 0.75])])
def test_the_mlp_is_the_plain_one(scale: Tensor | None) -> None:
    mlp, x = _mlp(), torch.randn(3, 5)
    mixed = _plain_swiglu(mlp.linear_fc1(x)[0])
    expected, _ = mlp.linear_fc2(mixed if scale is None else mixed * scale[:, None])
    found, bias = mlp_forward(_refuse)(mlp, x, per_token_scale=scale)
    assert bias is None
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"gated_linear_unit": False},
        {"activation_func": F.gelu},
        {"use_te_activation_func": True},
        {"bias_activation_fusion": True},
        {"add_bias_linear": True},
        {"activation_func_clamp_value": 7.0},
        {"glu_linear_offset": 1.0},
    ],
)
def test_other_mlps_are_left_to_megatron(change: dict[str, Any]) -> None:
    given: list[Any] = []
    mlp, x, scale = _mlp(**change), torch.zeros(1, 5), torch.ones(1)
    mlp_forward(lambda *args, **named: given.append((args, named)))(mlp, x, scale, padding_mask=None)
    assert given == [((mlp, x), {"per_token_scale": scale, "padding_mask": None})]


def _functions_behind(value: Tensor) -> Counter[str]:
    """How often each autograd function occurs in what a value was computed by."""
    seen, waiting = set(), [value.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        waiting += [before for before, _ in function.next_functions]
    return Counter(type(function).__name__ for function in seen)


@pytest.mark.skipif(torch.cuda.is_available(), reason="layers use these functions where there is no CUDA")
@pytest.mark.parametrize(("kind", "norms"), [("qwen3-tied", 9), ("llama", 5), ("qwen3-moe", 9)])
def test_a_policy_computes_with_them_as_long_as_it_is_open(
    kind: str, norms: int, policy_of: Callable[..., Any]
) -> None:
    from megatron.core.transformer import attention
    from megatron.core.transformer.mlp import MLP

    before = MLP.forward, attention.apply_rotary_pos_emb
    ids = torch.arange(12).view(2, 6)
    with policy_of(kind) as policy:
        model: Any = policy.model
        hidden = model(ids, torch.arange(6).expand(2, 6), None, labels=ids)
        found = _functions_behind(hidden)
    assert found["_RMSNormBackward"] == norms
    assert found["_RotationBackward"] == 4
    assert found["_SwiGLUBackward"] >= 2
    assert not found["SiluBackward0"]
    assert (MLP.forward, attention.apply_rotary_pos_emb) == before


def _layer_norm(dtype: torch.dtype) -> Any:
    from rl_policy_megatron.layers import RMSNorm

    config: Any = SimpleNamespace(params_dtype=dtype, sequence_parallel=False)
    norm = RMSNorm(config, 6, eps=EPS)
    torch.nn.init.normal_(norm.weight)
    return norm


def test_hooks_of_a_norm_are_called() -> None:
    norm, x, seen = _layer_norm(torch.float32), torch.randn(2, 6), []
    expected = norm(x)
    with norm.register_forward_hook(lambda *_: seen.append("forward")):
        torch.testing.assert_close(norm(x), expected)
    with norm.register_forward_pre_hook(lambda *_: seen.append("before")):
        norm(x)
    with norm.register_full_backward_hook(lambda *_: seen.append("backward")):
        norm(x.requires_grad_()).sum().backward()
    assert seen == ["forward", "before", "backward"]


def test_a_norm_of_another_type_is_torchs() -> None:
    norm, x = _layer_norm(torch.bfloat16), torch.randn(4, 6, dtype=torch.bfloat16)
    assert torch.equal(norm(x), F.rms_norm(x, (6,), norm.weight, EPS))


def test_engines_know_the_norm_by_its_formula() -> None:
    """They use the formula of a module only if its class has torch's ``forward``."""
    assert type(_layer_norm(torch.float32)).forward is torch.nn.RMSNorm.forward
