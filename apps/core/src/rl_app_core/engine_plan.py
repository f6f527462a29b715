"""From the configuration to the engines that a run starts: settings, resources, environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rl_actor_envs.errors import ActorEnvironmentError
from rl_actor_envs.runtime import make_actor_runtime_env
from rl_actor_envs.system import SYSTEM_FLAG, system_interpreter_forced
from rl_generation.failures import UnavailableBackendError
from rl_generation.server.reservation import ListenSettings
from rl_generation.server.settings import SamplingProfile, ServerSettings
from rl_generation.trtllm.availability import require_available
from rl_generation.trtllm.settings import TrtllmSettings
from rl_generation.vllm.environment import is_cpu_build
from rl_generation.vllm.settings import VllmSettings

from .config import ConfigError, JobConfig
from .engine_checks import check_cache, check_generation, check_names

if TYPE_CHECKING:
    from rl_generation.vllm.server import VllmServerSettings

Device = Literal["cpu", "cuda"]

_VLLM: Mapping[Device, str] = {
    "cpu": "rl_generation.vllm.worker.VllmCpuWorker",
    "cuda": "rl_generation.vllm.worker.VllmWorker",
}
_TRTLLM = "rl_generation.trtllm.worker.TrtllmWorker"


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The replicas of one run; they differ in name and number only.

    Attributes:
        actor: full name of the actor class, which is also its row in the table of environments.
        settings: of each replica's engine.
        num_gpus: that each actor asks Ray for.
        policy_gpus: that the policy's actor asks for beside them.
        listen: where each replica's server listens; ``None`` serves no HTTP.
        server: what it serves.
    """

    actor: str
    settings: tuple[VllmSettings | TrtllmSettings, ...]
    num_gpus: float
    policy_gpus: float
    listen: ListenSettings | None = None
    server: VllmServerSettings | ServerSettings | None = None


def check_engine(config: JobConfig) -> None:
    """Refuse an engine that could not start here, before anything else does.

    Raises:
        ConfigError: it is not installed, its environment is not built, or its settings contradict each
            other; names the remedy.
    """
    plan = plan_engines(config, config.model.path or Path("model"))
    if plan is None:
        return
    check_names(config)
    settings = plan.settings[0]
    if isinstance(settings, VllmSettings):
        check_cache(config, settings, cpu=plan.actor == _VLLM["cpu"])
    try:
        make_actor_runtime_env(plan.actor)
    except ActorEnvironmentError as error:
        raise ConfigError(f"generation.engine={config.generation.engine}: {error}") from error


def plan_engines(config: JobConfig, model_dir: Path) -> EnginePlan | None:
    """What the configuration asks for; ``None`` is the engine in the policy's own process.

    Args:
        config: of the run.
        model_dir: of the initial model.

    Raises:
        ConfigError: as :func:`check_engine`, environments aside.
    """
    engine = config.generation.engine
    if engine == "megatron":
        return None
    check_generation(config)
    try:
        plan = _vllm_plan if engine == "vllm" else _trtllm_plan
        return plan(config, str(model_dir.resolve()))
    except UnavailableBackendError as error:
        raise ConfigError(f"generation.engine={engine}: {error}") from error
    except ConfigError:
        raise
    except ValueError as error:
        # It begins with the name of a field.
        said = str(error).replace("llm_arguments", "engine_arguments")
        raise ConfigError(f"generation.{engine}.{said}") from error


def _vllm_plan(config: JobConfig, model_dir: str) -> EnginePlan:
    wanted, cluster = config.generation.vllm, config.cluster
    device = _device(wanted.device)
    settings = tuple(
        VllmSettings(
            model_dir=model_dir,
            name=f"vllm-{replica}",
            dtype=wanted.dtype or config.policy.precision,
            max_model_len=wanted.max_model_len,
            tensor_parallel_size=wanted.tensor_parallel_size,
            kv_cache_bytes=wanted.kv_cache_bytes,
            max_num_seqs=wanted.max_num_seqs,
            seed=config.seed,
            replica=replica,
            prefix_cache=wanted.prefix_cache,
            cpu_threads=wanted.cpu_threads,
            engine_arguments=wanted.engine_arguments,
            start_timeout_s=cluster.start_timeout_s,
            request_timeout_s=cluster.call_timeout_s,
        )
        for replica in range(wanted.replicas)
    )
    gpus = wanted.tensor_parallel_size if device == "cuda" else 0
    plan = EnginePlan(_VLLM[device], settings, gpus, 1.0 if gpus else 0.0)
    if not config.serves:
        return plan
    return replace(plan, listen=_listen(config), server=_vllm_server(config))


def _trtllm_plan(config: JobConfig, model_dir: str) -> EnginePlan:
    if system_interpreter_forced():
        require_available()
    wanted, cluster = config.generation.trtllm, config.cluster
    settings = tuple(
        TrtllmSettings(
            model=model_dir,
            name=f"trtllm-{replica}",
            max_context=wanted.max_model_len or _context(config),
            max_batch=wanted.max_batch,
            tensor_parallel=wanted.tensor_parallel_size,
            dtype=wanted.dtype or config.policy.precision,
            seed=config.seed,
            replica=replica,
            gpu_memory_fraction=wanted.gpu_memory_fraction,
            prefix_cache=wanted.prefix_cache,
            llm_arguments=wanted.engine_arguments,
            start_timeout_s=cluster.start_timeout_s,
            request_timeout_s=cluster.call_timeout_s,
        )
        for replica in range(wanted.replicas)
    )
    # Its own workers ask Ray for the GPUs.
    plan = EnginePlan(_TRTLLM, settings, 0.0, 1.0)
    if not config.serves:
        return plan
    return replace(plan, listen=_listen(config), server=_contract(config))


def _device(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    """What the installed build is for, or where the actors have environments of their own, what is here."""
    if not system_interpreter_forced():
        import torch

        return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if find_spec("vllm") is None:
        raise UnavailableBackendError(
            "vLLM is not installed in this environment; in a checkout start the job with "
            "`./hatch run vllm:grpo run …`, or build environments for the actors (`rl-actor-envs prefetch`) "
            f"and set {SYSTEM_FLAG}=0"
        )
    built_for: Device = "cpu" if is_cpu_build() else "cuda"
    if wanted not in ("auto", built_for):
        raise ConfigError(
            f"generation.vllm.device={wanted}, and the vLLM of this environment is built for {built_for}"
        )
    return built_for


def _listen(config: JobConfig) -> ListenSettings:
    server = config.generation.server
    token = os.environ.get(server.token_variable) if server.token_variable is not None else None
    return ListenSettings(
        host=server.host, port_range=server.ports, token=token, advertised_host=server.advertised_host
    )


def _contract(config: JobConfig) -> ServerSettings:
    generation = config.generation
    return ServerSettings(
        model=generation.server.model_name,
        # The engine knows better when it has started.
        max_context=_context(config),
        vocab_size=1,
        profiles=(
            SamplingProfile("training", temperature=generation.temperature),
            SamplingProfile("validation", temperature=0.0),
        ),
        max_new_tokens=generation.max_new_tokens,
    )


def _vllm_server(config: JobConfig) -> VllmServerSettings:
    from rl_generation.vllm.server import VllmServerSettings

    server = config.generation.server
    return VllmServerSettings(
        contract=_contract(config),
        tool_parser=server.tool_parser,
        reasoning_parser=server.reasoning_parser,
        chat_template=config.model.chat_template,
    )


def _context(config: JobConfig) -> int:
    from rl_policy_megatron.hf_config import read_model_shape

    if config.model.path is not None:
        return read_model_shape(config.model.path).max_positions
    assert config.model.tiny is not None
    return config.model.tiny.context
