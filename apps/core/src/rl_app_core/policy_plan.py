"""From the configuration to the policy that a run trains: settings of its ranks, layout, optimizers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rl_policy_megatron import OptimizerSettings, ParallelLayout, PolicySettings
from rl_policy_megatron.errors import PolicyError
from rl_policy_megatron.group import RankSettings
from rl_policy_megatron.hf_config import ModelShape, read_model_shape
from rl_policy_megatron.lora import LoraSettings
from rl_policy_megatron.rope import RopeShape

from .config import ConfigError, JobConfig
from .config.sections import TinyModel
from .workers import tensor_source

_REFIT_S = 120.0
# The ranks name who is missing before the driver's own patience ends.
_RENDEZVOUS_SHARE = 0.75


def rank_settings(config: JobConfig, model_dir: Path) -> RankSettings:
    """What the policy's ranks are built from."""
    cluster = config.cluster
    return RankSettings(
        model_directory=str(model_dir.resolve()),
        policy=policy_settings(config),
        optimizer=warm_start_optimizer(config) if config.warm_start.steps else algorithm_optimizer(config),
        world=config.policy.parallel.world,
        threads=cluster.threads,
        weight_source=partial(tensor_source, timeout_s=_REFIT_S),
        rendezvous_timeout_s=_RENDEZVOUS_SHARE * cluster.start_timeout_s,
        collective_timeout_s=cluster.call_timeout_s,
        refit_timeout_s=_REFIT_S,
        # The store of checkpoints has compared every file with its digest when it found the newest.
        verify_loads=False,
    )


def policy_settings(config: JobConfig) -> PolicySettings:
    """How the policy computes."""
    wanted = config.policy
    tokens = wanted.micro_batch_tokens
    passes: dict[str, int] = (
        {"micro_batch_size": wanted.micro_batch_size} if tokens is None else {"micro_batch_tokens": tokens}
    )
    return PolicySettings(
        **passes,
        dtype=wanted.precision,
        packing=wanted.packing,
        recompute=wanted.recompute,
        temperature=config.generation.temperature,
        seed=config.seed,
        layout=_layout(config),
        lora=_lora(config),
    )


def warm_start_optimizer(config: JobConfig) -> OptimizerSettings:
    """AdamW of the supervised phase."""
    warm = config.warm_start
    return OptimizerSettings(
        betas=warm.adam_betas, weight_decay=warm.weight_decay, grad_clip=warm.gradient_clip
    )


def algorithm_optimizer(config: JobConfig) -> OptimizerSettings:
    """AdamW of reinforcement learning."""
    algorithm = config.algorithm
    return OptimizerSettings(
        betas=algorithm.adam_betas, weight_decay=algorithm.weight_decay, grad_clip=algorithm.gradient_clip
    )


def check_layout(config: JobConfig) -> None:
    """Refuse a layout that cannot split the model, before a process is started.

    Raises:
        ConfigError: naming the size of the model and the key that does not divide it.
    """
    try:
        _layout(config).check_fit(_shape(config))
    except PolicyError as error:
        raise ConfigError(f"policy.parallel: {str(error).replace('layout.', 'policy.parallel.')}") from error


def check_adapters(config: JobConfig) -> None:
    """Refuse adapters for what the model does not have, before a process is started.

    Raises:
        ConfigError: naming the projections, and those that can be adapted.
    """
    lora = _lora(config)
    if lora is None:
        return
    try:
        lora.check_fit(_shape(config))
    except PolicyError as error:
        raise ConfigError(
            f"policy.peft: {str(error).replace('lora.targets', 'policy.peft.targets')}"
        ) from error


def policy_warnings(config: JobConfig) -> tuple[str, ...]:
    """What can be trained but will hardly learn, each with its remedy."""
    if config.policy.peft is None or config.model.tiny is None:
        return ()
    return (
        "policy.peft trains adapters beside weights that stay as they are, and those of model.tiny are "
        "random, its embeddings too, so it will hardly learn; train a model without policy.peft first, "
        "write it with `grpo export-hf RUN_DIR DIR`, and adapt that one: model.tiny=null model.path=DIR "
        "warm_start.steps=0 policy.peft={}",
    )


def _shape(config: JobConfig) -> ModelShape:
    model = config.model
    if model.path is not None:
        return read_model_shape(model.path)
    assert model.tiny is not None
    return _tiny_shape(model.tiny)


def _lora(config: JobConfig) -> LoraSettings | None:
    wanted = config.policy.peft
    return None if wanted is None else LoraSettings(wanted.rank, wanted.alpha, wanted.targets)


def _layout(config: JobConfig) -> ParallelLayout:
    parallel = config.policy.parallel
    return ParallelLayout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        expert=parallel.expert,
        sequence_parallel=parallel.sequence_parallel,
    )


def _tiny_shape(tiny: TinyModel) -> ModelShape:
    return ModelShape(
        model_type="qwen3",
        layers=tiny.layers,
        hidden=tiny.hidden_size,
        intermediate=tiny.intermediate_size,
        heads=tiny.heads,
        kv_heads=tiny.kv_heads,
        head_dim=tiny.head_dim,
        vocabulary=tiny.vocab_size,
        max_positions=tiny.context,
        norm_eps=1e-6,
        tied=True,
        qkv_bias=False,
        qk_norm=True,
        rope=RopeShape(tiny.rope_theta),
    )
