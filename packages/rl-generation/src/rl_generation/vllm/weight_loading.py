"""How new weights get into a loaded vLLM model, for every kind of model exactly.

vLLM turns what it loads into what its kernels read, and that is where writing to a running model goes wrong:

* linear layers on a CPU are packed and their parameters emptied, so there is nothing left to write to.
  Packing is turned off before the model loads (:func:`keep_weights_live`), and from then on parameters are
  what is used;
* experts on a CPU are packed whatever is set. They are laid out plainly for the time of a refit and packed
  again (:class:`PackedExperts`); vLLM's own reload would copy them unpacked into packed memory;
* on a GPU experts and latent attention have derived weights too, which vLLM's layer-wise reload renews
  (:class:`LayerwiseReload`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ..failures import RefitError

_EXPERT_WEIGHTS = ("w13_weight", "w2_weight")


class Loading(Protocol):
    """One refit's work on one model: begin, load for each part, then finish or abort."""

    def begin(self) -> None:
        """Make the model writable."""
        ...

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write some tensors, given by their names in HF layout."""
        ...

    def finish(self) -> None:
        """Make the model usable again."""
        ...

    def abort(self) -> None:
        """As :meth:`finish` when not everything came: usable for another refit, not for sampling."""
        ...


def keep_weights_live() -> None:
    """Let linear layers on a CPU read their parameters instead of packed copies; before a model is loaded."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    ops._supports_onednn = False
    original = utils.dispatch_cpu_unquantized_gemm
    if getattr(original, "rl_generation_live", False):
        return

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = F.linear
        else:
            original(layer, remove_weight=remove_weight)

    dispatch.rl_generation_live = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch


def loading_for(model: nn.Module, model_config: Any, *, cpu: bool) -> Loading:
    """The way that is exact for this model.

    Raises:
        RefitError: there is none; names the module.
    """
    experts = [module for module in model.modules() if _has_experts(module)]
    derived = [module for module in model.modules() if "MLAAttention" in type(module).__name__]
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method != "NoneType" and not method.startswith("Unquantized"):
            raise RefitError(f"refit: {name} is quantised ({method}); load the model without quantisation")
    if not cpu:
        return LayerwiseReload(model, model_config) if experts or derived else InPlace(model)
    for name, module in model.named_modules():
        if hasattr(module, "cpu_linear") and module.cpu_linear is not F.linear:
            raise RefitError(
                f"refit: this version of vLLM packs {name} in a way that is not known here, so nothing could "
                "be written to it; use another version"
            )
        if _has_experts(module) and hasattr(module, "w13_bias"):
            raise RefitError(f"refit: {name}: experts with a bias cannot be renewed on a CPU")
    if derived:
        raise RefitError("refit: latent attention keeps derived weights, which cannot be renewed on a CPU")
    return PackedExperts(model, experts) if experts else InPlace(model)


class InPlace:
    """For models whose parameters are what their kernels read."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def begin(self) -> None:
        """Nothing has to be prepared."""

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Through the model's own mapping of names and shards."""
        self._model.load_weights(weights)  # type: ignore[operator]

    def finish(self) -> None:
        """Nothing is left to do."""

    def abort(self) -> None:
        """Nothing is left to do."""


class PackedExperts(InPlace):
    """For experts on a CPU: plain while they are written to, packed while they are used.

    Memory of the experts' size is taken between begin and finish.

    Args:
        model: the whole model.
        experts: its modules that hold experts.
    """

    def __init__(self, model: nn.Module, experts: list[nn.Module]) -> None:
        super().__init__(model)
        self._experts = experts
        self._packed: list[tuple[nn.Parameter, torch.Tensor]] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Lay all experts out as a checkpoint has them; their contents come with the refit."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self.abort()
        for module in self._experts:
            plain, _ = get_layerwise_info(module).restore_metadata
            for name in _EXPERT_WEIGHTS:
                parameter = module.get_parameter(name)
                self._packed.append((parameter, parameter.data))
                parameter.data = torch.zeros(
                    plain[name].shape, dtype=parameter.dtype, device=parameter.device
                )

    @torch.no_grad()
    def finish(self) -> None:
        """Pack all experts, as vLLM does when it loads a model."""
        for module in self._experts:
            parameters = {name: module.get_parameter(name) for name in _EXPERT_WEIGHTS}
            kernel: Any = module.quant_method.moe_kernel  # type: ignore[union-attr]
            kernel.fused_experts.process_weights_after_loading(module)
            for name, parameter in parameters.items():
                # The new parameter has lost what the next refit's loader asks for.
                parameter.data = module.get_parameter(name).data
                module.register_parameter(name, parameter)
        self._packed.clear()

    def abort(self) -> None:
        """Put the old experts back."""
        while self._packed:
            parameter, data = self._packed.pop()
            parameter.data = data


class LayerwiseReload(InPlace):
    """vLLM's own reload: layers are set aside, loaded, processed and copied to where kernels expect them.

    Args:
        model: the whole model.
        model_config: vLLM's.
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        super().__init__(model)
        self._model_config = model_config

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give copies: vLLM keeps them until the whole layer has come, and buckets do not last so long."""
        super().load((name, tensor.clone()) for name, tensor in weights)

    def begin(self) -> None:
        """Set the layers aside."""
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        initialize_layerwise_reload(self._model)

    def finish(self) -> None:
        """Process what has not been processed on the way."""
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, self._model_config)

    def abort(self) -> None:
        """Put layers that did not come back as they were."""
        self.finish()


def _has_experts(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Parameter) for name in _EXPERT_WEIGHTS)
