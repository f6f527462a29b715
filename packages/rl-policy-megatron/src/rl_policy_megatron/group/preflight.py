"""What the driver asks before it starts a rank: whether the ranks could do what they are started for."""

from __future__ import annotations

from pathlib import Path

import torch

from ..fit import fitting_shape
from .settings import GroupSettings, RankSettings


def refuse_misfit(ranks: RankSettings, settings: GroupSettings) -> None:
    """Refuse what every rank would refuse, with the same words, but without starting one.

    A directory that is not on this machine is left to the ranks, which may be on others.

    Raises:
        ModelDirectoryError, UnsupportedModelError: as :func:`~rl_policy_megatron.fit.fitting_shape` does.
    """
    directory = Path(ranks.model_directory)
    if directory.is_dir():
        fitting_shape(directory, ranks.policy, cuda=_may_have_cuda(settings))


def _may_have_cuda(settings: GroupSettings) -> bool:
    import ray

    # Whoever asks for no GPU may see those of its machine nevertheless: that is a matter of Ray's settings.
    gpus = settings.num_gpus or ray.cluster_resources().get("GPU", 0)
    return bool(gpus) or torch.cuda.is_available()
