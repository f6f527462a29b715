"""A checkpoint of a run as an ordinary Hugging Face directory."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from rl_algorithms.checkpointing import CheckpointStore
from rl_algorithms.loops.persist import POLICY_FOLDER

from .compose import model_directory
from .config import ConfigError, JobConfig
from .policy_plan import policy_settings
from .run_directory import RunDirectory


def export_checkpoint(run_dir: Path, target: Path, model: type[JobConfig]) -> int:
    """Write the newest checkpoint of ``run_dir`` to ``target`` and return its step.

    Raises:
        ConfigError: no run, no checkpoint, or a target that exists.
    """
    directory, config = RunDirectory.open(run_dir, model)
    ignored: list[str] = []
    checkpoint = CheckpointStore(directory.checkpoints, on_ignored=ignored.append).latest()
    if checkpoint is None:
        raise ConfigError("; ".join([f"{run_dir} has no complete checkpoint to export", *ignored]))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty directory; name a new one")
    from rl_policy_megatron import MegatronPolicy, ParallelLayout

    # One process reads what any number of them has written.
    settings = replace(policy_settings(config), layout=ParallelLayout())
    policy = MegatronPolicy(model_directory(config, directory), settings)
    try:
        policy.load(checkpoint.path / POLICY_FOLDER)
        policy.export_hf(target)
        if config.model.chat_template is not None:
            # The template that the policy was trained with, not the one that its tokenizer came with.
            shutil.copyfile(config.model.chat_template, target / "chat_template.jinja")
    finally:
        policy.shutdown()
    return checkpoint.step
