"""megatron's AdamW over one model: gradient buffers, one exact clipped step, portable state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import cpu_adapter
from .checks import check
from .errors import NonFiniteGradientError
from .mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    clip_grad_by_total_norm_fp32,
    get_megatron_optimizer,
)
from .model import PolicyModel
from .placement import Placement
from .quiet import quiet_megatron
from .refusals import alike
from .settings import OptimizerSettings
from .sharding import TensorTable

# Kinds of state, each a prefix of the saved tensors' names.
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"


def wrap_for_training(model: PolicyModel) -> DistributedDataParallel:
    """The model behind megatron's float32 gradient buffers."""
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    with quiet_megatron(), cpu_adapter.device_scope():
        return DistributedDataParallel(model.config, config, model)


class PolicyOptimizer:
    """AdamW as megatron builds it for the wrapped model.

    bfloat16 parameters are updated through float32 master copies.
    """

    def __init__(
        self,
        wrapped: DistributedDataParallel,
        settings: OptimizerSettings,
        placement: Placement | None = None,
    ) -> None:
        """``settings`` of any other class are a :class:`SettingsError`."""
        check("the optimizer's settings", settings, OptimizerSettings)
        self.settings = settings
        self._placement = placement or Placement()
        self._wrapped = wrapped
        model: Any = wrapped.module
        self._model: PolicyModel = model
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.grad_clip,
            bf16=model.config.bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=False,
        )
        with quiet_megatron(), cpu_adapter.device_scope():
            # One inner optimizer per kind of parameter, chained, whatever the declared type says.
            megatron: Any = get_megatron_optimizer(config, [wrapped], use_gloo_process_groups=False)
        self._megatron = megatron
        # Split experts have an optimizer of their own, because they have replicas elsewhere.
        self._holders: dict[int, torch.optim.Optimizer] = {
            id(weight): part.optimizer
            for part in megatron.chained_optimizers
            for group in part.optimizer.param_groups
            for weight in group["params"]
        }

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._wrapped.zero_grad_buffer()
        self._megatron.zero_grad()

    def prepare(self) -> float:
        """Make the accumulated gradients ready for :meth:`step`; their global L2 norm before clipping.

        Raises:
            NonFiniteGradientError: the norm is NaN or inf, on every rank; nothing was changed.
        """
        with cpu_adapter.device_scope():
            self._megatron.prepare_grads()
            norm = self._gradient_norm()
        if not math.isfinite(norm):
            with alike():
                raise NonFiniteGradientError(
                    f"the gradient's norm is {norm}; the weights were not changed: look for inf or NaN in "
                    "the batch's log-probabilities and advantages"
                )
        return norm

    def step(self, learning_rate: float, norm: float) -> None:
        """One update from the gradients that :meth:`prepare` made ready, whose norm it returned."""
        for group in self._megatron.param_groups:
            group["lr"] = learning_rate * group["lr_mult"]
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]
        with cpu_adapter.device_scope():
            if self.settings.grad_clip > 0:
                for part in self._megatron.chained_optimizers:
                    clip_grad_by_total_norm_fp32(part.get_parameters(), self.settings.grad_clip, norm)
            self._megatron.step_with_ready_grads()

    def gradients(self, table: TensorTable) -> dict[str, torch.Tensor]:
        """Copies of the accumulated float32 gradients, by HF name, on the CPU; of the whole model."""
        weights: Iterable[tuple[str, Any]] = self._trained()
        grads = ((name, weight.main_grad) for name, weight in weights)
        return {name: grad.cpu().clone() for name, grad in table.gather(grads)}

    @property
    def steps(self) -> int:
        """Number of updates made."""
        for _, weight in self._trained():
            main, inner = self._main(weight)
            return int(inner.state.get(main, {}).get("step", 0))
        return 0

    def state(self, table: TensorTable) -> dict[str, torch.Tensor]:
        """The float32 state as ``{kind}.{HF name}`` → tensor; may share memory with the optimizer.

        Of this pipeline stage and expert group, as :meth:`TensorTable.gather_stage` defines.
        """
        kinds: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for parameter, weight in self._trained():
            main, inner = self._main(weight)
            entry = inner.state.get(main, {})
            for kind in MOMENTS:
                if kind in entry:
                    kinds.setdefault(kind, []).append((parameter, entry[kind]))
            if main is not weight:
                kinds.setdefault(MASTER, []).append((parameter, main.detach()))
        return {
            f"{kind}.{name}": tensor
            for kind, named in kinds.items()
            for name, tensor in table.gather_stage(named)
        }

    def set_state(self, table: TensorTable, steps: int, read: Callable[[str], torch.Tensor]) -> None:
        """Continue from ``steps`` updates and the tensors that :meth:`state` returned, read by name."""

        def fill(kind: str, targets: dict[str, torch.Tensor]) -> None:
            table.fill(targets, lambda name: read(f"{kind}.{name}"), "the saved optimizer state")

        for part in self._megatron.chained_optimizers:
            part.optimizer.state.clear()
        mains = {name: self._main(weight) for name, weight in self._trained()}
        masters = {name: mains[name][0] for name, weight in self._trained() if mains[name][0] is not weight}
        with torch.no_grad():
            fill(MASTER, masters)
            if not steps:
                return
            for kind in MOMENTS:
                moments = {name: torch.empty_like(main) for name, (main, _) in mains.items()}
                fill(kind, moments)
                for name, (main, inner) in mains.items():
                    entry = inner.state.setdefault(main, {"step": torch.tensor(float(steps))})
                    entry[kind] = moments[name]

    def _gradient_norm(self) -> float:
        """The L2 norm of the whole model's gradient, each number counted once; the same on every rank."""
        ranks = self._placement
        squares = torch.zeros((), dtype=torch.float64, device=cpu_adapter.device())
        for _, weight in self._trained():
            parameter: Any = weight
            replicas = ranks.data if getattr(parameter, "allreduce", True) else ranks.expert_data
            is_split = getattr(parameter, "tensor_model_parallel", False)
            # megatron marks so the last stage's copy of a tied embedding.
            is_copy = getattr(parameter, "shared", False)
            if replicas.first and (is_split or ranks.tensor.first) and not is_copy:
                norm = torch.linalg.vector_norm(parameter.main_grad)
                squares += norm.double() ** 2
        return float(ranks.world.sum(squares).sqrt())

    def _trained(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """The parameters that have gradients and state; frozen ones have neither."""
        return ((name, weight) for name, weight in self._model.named_parameters() if weight.requires_grad)

    def _main(self, weight: torch.nn.Parameter) -> tuple[torch.Tensor, torch.optim.Optimizer]:
        """The tensor that AdamW updates for a weight, and the AdamW that holds its state."""
        main = getattr(weight, "main_param", weight)
        return main, self._holders[id(main)]
