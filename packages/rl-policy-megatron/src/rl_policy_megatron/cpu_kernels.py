"""A layer's formulas between its matrix products, each one autograd function, for a CPU.

Written out in torch's operations these formulas move every number through memory many times, forward and
backward, and beside the matrix products of a small model that is a good part of a layer's time. Here both
directions are as few passes as torch's operations allow, over buffers that are written in place. The results
are those of the plain formula up to rounding. There are no second derivatives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension (Zhang and Sennrich, 2019, equation 4).

    Args:
        x: ``[..., D]``, of the weight's floating type.
        weight: ``[D]``.
        eps: ≥ 0.
    """
    return _RMSNorm.apply(x, weight, eps)


def swiglu(both: Tensor) -> Tensor:
    """``silu(gate) · up``, with ``silu(g) = g / (1 + exp(−g))`` (Shazeer, 2020, equation 6).

    Args:
        both: ``[..., 2 F]``, the gates and after them the ups.

    Returns:
        ``[..., F]``.
    """
    return _SwiGLU.apply(both)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021, equation 34, with the halves of a head as the pairs).

    With ``R`` the tables' width, ``x₁`` the first ``R / 2`` entries of a head and ``x₂`` the next ones, the
    result has ``x₁ · cos − x₂ · sin`` and ``x₂ · cos + x₁ · sin`` there; what follows passes through.

    Args:
        x: ``[S, B, heads, D]``.
        cosines: ``[S, 1, 1, R]``, R ≤ D even, of the type of ``x``.
        sines: the same shape.

    Returns:
        ``[S, B, heads, D]``, in memory as ``[B, heads, S, D]``: attention reads a head from end to end.
    """
    return _Rotation.apply(x, cosines, sines)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # pyrefly: ignore[bad-override]
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyrefly: ignore[bad-override]
        x, weight, inverse = ctx.saved_tensors
        # With r = 1 / sqrt(mean(x²) + eps): d weight = Σ g x r, and d x = g w r − x r³ mean(g w x).
        products = grad * x
        rows, scales = products.reshape(-1, x.size(-1)), inverse.reshape(-1)
        grad_weight = torch.mv(rows.t(), scales) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        shrink = torch.mv(rows, weight).mul_(scales.pow(3)).div_(-x.size(-1))
        grad_x = torch.mul(grad, weight, out=products).mul_(inverse)
        return grad_x.addcmul_(x, shrink.view(inverse.shape)), grad_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        gate, up = both.chunk(2, dim=-1)
        opened = F.silu(gate)
        if not ctx.needs_input_grad[0]:
            return opened.mul_(up)
        ctx.save_for_backward(both, opened)
        return opened * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        both, opened = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        grad_both = torch.empty_like(both)
        grad_gate, grad_up = grad_both.chunk(2, dim=-1)
        torch.mul(grad, opened, out=grad_up)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_both


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        ctx.save_for_backward(cosines, sines)
        length, rows, heads, width = x.shape
        out = x.new_empty(rows, heads, length, width).permute(2, 0, 1, 3)
        first, second = sines.chunk(2, dim=-1)
        return _turn(x, cosines, (first, -1), (second, 1), out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]
        cosines, sines = ctx.saved_tensors
        # The transposed matrix: what went from one half to the other comes back.
        first, second = sines.chunk(2, dim=-1)
        return _turn(grad, cosines, (second, 1), (first, -1), grad.new_empty(grad.shape)), None, None


def _turn(
    x: Tensor, cosines: Tensor, to_first: tuple[Tensor, int], to_second: tuple[Tensor, int], out: Tensor
) -> Tensor:
    """Into ``out``: ``x · cosines``, and to each half the other one, times a table and a sign."""
    width = cosines.size(-1)
    half = width // 2
    first, second = x[..., :half], x[..., half:width]
    torch.mul(x[..., :width], cosines, out=out[..., :width])
    out[..., :half].addcmul_(second, to_first[0], value=to_first[1])
    out[..., half:width].addcmul_(first, to_second[0], value=to_second[1])
    if width < x.size(-1):
        out[..., width:] = x[..., width:]
    return out
