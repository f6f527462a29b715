"""Whether a model can be trained as its settings say: what ranks ask themselves, and a driver before them."""

from __future__ import annotations

from pathlib import Path

from .errors import UnsupportedModelError
from .hf_config import ModelShape, read_model_shape
from .settings import PolicySettings


def fitting_shape(model_directory: Path, settings: PolicySettings, *, cuda: bool) -> ModelShape:
    """The shape of a model that can be laid out and trained as ``settings`` say.

    It reads config.json alone and imports neither megatron nor anything of CUDA.

    Args:
        model_directory: in Hugging Face format.
        settings: of the policy.
        cuda: whether its ranks have a GPU each.

    Raises:
        ModelDirectoryError: config.json is missing, broken or lacks a key.
        UnsupportedModelError: the model is of a type, or uses an option, that is not supported, or cannot be
            split, or get adapters, as the settings say.
    """
    shape = read_model_shape(model_directory)
    settings.check_fit(shape)
    layout = settings.layout
    if shape.experts is None or layout.tensor == 1:
        return shape
    if not cuda:
        # Each rank has another number of tokens for an expert, and gloo gathers equal sizes only.
        raise UnsupportedModelError(
            f"a mixture of experts with layout.tensor = {layout.tensor} needs CUDA: gloo cannot gather what "
            "the ranks of an expert exchange; without CUDA split it by layout.expert, layout.pipeline or rows"
        )
    if not layout.sequence_parallel:
        raise UnsupportedModelError(
            f"megatron trains a mixture of experts with layout.tensor = {layout.tensor} only if the ranks "
            "split the tokens as well; set layout.sequence_parallel"
        )
    return shape
