"""megatron's AdamW over one model: gradient buffers, one exact clipped step, portable state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import cpu_adapter
from .errors import NonFiniteGradientError
from .lora import AdapterMap
from .mapping import WeightMap
from .mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    clip_grad_by_total_norm_fp32,
    get_megatron_optimizer,
)
from .model import PolicyModel
from .quiet import quiet_megatron
from .settings import OptimizerSettings

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

    def __init__(self, wrapped: DistributedDataParallel, settings: OptimizerSettings) -> None:
        self.settings = settings
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
            self._megatron: Any = get_megatron_optimizer(config, [wrapped], use_gloo_process_groups=False)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._wrapped.zero_grad_buffer()
        self._megatron.zero_grad()

    def step(self, learning_rate: float) -> float:
        """One update from the accumulated gradients; returns their global L2 norm before clipping.

        Raises:
            NonFiniteGradientError: the norm is NaN or inf; nothing was changed.
        """
        for group in self._megatron.param_groups:
            group["lr"] = learning_rate * group["lr_mult"]
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]
        with cpu_adapter.device_scope():
            self._megatron.prepare_grads()
            norm = float(self._megatron.get_grad_norm())
            if not math.isfinite(norm):
                raise NonFiniteGradientError(
                    f"the gradient's norm is {norm}; the weights were not changed: look for inf or NaN in "
                    "the batch's log-probabilities and advantages"
                )
            if self.settings.grad_clip > 0:
                for part in self._megatron.chained_optimizers:
                    clip_grad_by_total_norm_fp32(part.get_parameters(), self.settings.grad_clip, norm)
            self._megatron.step_with_ready_grads()
        return norm

    def gradients(self, weight_map: WeightMap | AdapterMap) -> dict[str, torch.Tensor]:
        """Copies of the accumulated float32 gradients, by HF name, on the CPU."""
        weights: Iterable[tuple[str, Any]] = self._trained()
        grads = ((name, weight.main_grad) for name, weight in weights)
        return {name: grad.cpu().clone() for name, grad in weight_map.to_hf(grads)}

    @property
    def steps(self) -> int:
        """Number of updates made."""
        for _, weight in self._trained():
            main, inner = self._main(weight)
            return int(inner.state.get(main, {}).get("step", 0))
        return 0

    def state(self, weight_map: WeightMap | AdapterMap) -> dict[str, torch.Tensor]:
        """The float32 state as ``{kind}.{HF name}`` → tensor; shares memory with the optimizer."""
        tensors: dict[str, torch.Tensor] = {}
        for parameter, weight in self._trained():
            main, inner = self._main(weight)
            entry = inner.state.get(main, {})
            kinds = {kind: entry[kind] for kind in MOMENTS if kind in entry}
            if main is not weight:
                kinds[MASTER] = main
            for kind, tensor in kinds.items():
                for name, part in weight_map.split(parameter, tensor.detach()):
                    tensors[f"{kind}.{name}"] = part
        return tensors

    def set_state(
        self, weight_map: WeightMap | AdapterMap, steps: int, read: Callable[[str], torch.Tensor]
    ) -> None:
        """Continue from ``steps`` updates and the tensors that :meth:`state` returned, read by name."""

        def reader(kind: str) -> Callable[[str], torch.Tensor]:
            return lambda name: read(f"{kind}.{name}")

        for part in self._megatron.chained_optimizers:
            part.optimizer.state.clear()
        with torch.no_grad():
            for parameter, weight in self._trained():
                main, inner = self._main(weight)
                if main is not weight:
                    main.copy_(weight_map.merge(parameter, reader(MASTER)))
                if steps:
                    moments = {}
                    for kind in MOMENTS:
                        moments[kind] = torch.empty_like(main)
                        moments[kind].copy_(weight_map.merge(parameter, reader(kind)))
                    inner.state[main] = {"step": torch.tensor(float(steps)), **moments}

    def _trained(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """The parameters that have gradients and state; frozen ones have neither."""
        return ((name, weight) for name, weight in self._model.named_parameters() if weight.requires_grad)

    def _main(self, weight: torch.nn.Parameter) -> tuple[torch.Tensor, torch.optim.Optimizer]:
        """The tensor that AdamW updates for a weight, and the AdamW that holds its state."""
        main = getattr(weight, "main_param", weight)
        return main, self._megatron.optimizer
