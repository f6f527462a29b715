"""What of ``generation`` an engine would refuse, found before it starts and named by the run's own keys."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rl_actor_envs.system import system_interpreter_forced
from rl_generation.server.security import check_bearer, is_loopback, is_wildcard
from rl_generation.trtllm.settings import OWN_ARGUMENTS as TRTLLM_ARGUMENTS
from rl_generation.vllm.arguments import LEAST_TEMPERATURE
from rl_generation.vllm.kv_cache import CacheShape, cache_fault, cache_shape
from rl_generation.vllm.offered import (
    engine_argument_names,
    reasoning_parser_names,
    tool_parser_names,
    unknown_name,
)
from rl_generation.vllm.settings import OWN_ARGUMENTS as VLLM_ARGUMENTS
from rl_generation.vllm.settings import VllmSettings

from .config import ConfigError, JobConfig
from .config.generation import Trtllm, Vllm

_ARGUMENTS = {"vllm": VLLM_ARGUMENTS, "trtllm": TRTLLM_ARGUMENTS}
_SECTIONS = {"vllm": Vllm, "trtllm": Trtllm}
# Fields of an engine's settings that are no key of its section, or one of another name.
_KEYS = {
    "max_context": "generation.trtllm.max_model_len",
    "model": "model.path",
    "model_dir": "model.path",
    "prefix_cache and gpu_memory_fraction": (
        "generation.trtllm.prefix_cache and generation.trtllm.gpu_memory_fraction"
    ),
    "seed": "seed",
    "tensor_parallel": "generation.trtllm.tensor_parallel_size",
}


def check_generation(config: JobConfig) -> None:
    """Refuse what an engine apart from the policy would refuse, or would not do as it is written.

    Raises:
        ConfigError: names the key, and the one to set instead.
    """
    for fault in (*_arguments(config), *_temperature(config), *_server(config)):
        raise ConfigError(fault)


def check_names(config: JobConfig) -> None:
    """Refuse names that the vLLM of this environment does not know; none are checked where it is elsewhere.

    Raises:
        ConfigError: names the key, and what was perhaps meant.
    """
    if config.generation.engine != "vllm" or not system_interpreter_forced():
        return
    arguments = config.generation.vllm.engine_arguments
    for name in arguments:
        hint = unknown_name(name, engine_argument_names(), whole_list=False)
        if hint is not None:
            raise ConfigError(
                f"generation.vllm.engine_arguments: {name!r} is no argument of this vLLM's engine; {hint}"
            )
    server = config.generation.server
    if not config.serves:
        return
    parsers = [("tool_parser", server.tool_parser, tool_parser_names)]
    if "reasoning_parser_plugin" not in arguments:
        parsers.append(("reasoning_parser", server.reasoning_parser, reasoning_parser_names))
    for key, parser, known in parsers:
        hint = None if parser is None else unknown_name(parser, known(), whole_list=True)
        if hint is not None:
            raise ConfigError(f"generation.server.{key}={parser}: this vLLM has no such parser; {hint}")


def check_cache(config: JobConfig, settings: VllmSettings, *, cpu: bool) -> None:
    """Refuse a key-value cache that cannot keep one request.

    Args:
        config: of the run.
        settings: of one of its replicas.
        cpu: whether it computes on a CPU.

    Raises:
        ConfigError: names the key and the least value.
    """
    tiny = config.model.tiny
    if tiny is not None:
        shape: CacheShape | None = CacheShape(tiny.layers, tiny.kv_heads, tiny.head_dim, tiny.context)
    else:
        shape = cache_shape(settings.model_dir)
    fault = cache_fault(settings, shape, cpu=cpu)
    if fault is not None:
        fault = fault.replace("max_model_len", "generation.vllm.max_model_len")
        raise ConfigError(f"generation.vllm.kv_cache_bytes: {fault}")


def _arguments(config: JobConfig) -> Iterator[str]:
    engine = config.generation.engine
    if engine == "megatron":
        return
    own, fields = _ARGUMENTS[engine], _SECTIONS[engine].model_fields
    for name in getattr(config.generation, engine).engine_arguments:
        if name in own:
            key = _KEYS.get(own[name])
            if key is None and own[name] in fields:
                key = f"generation.{engine}.{own[name]}"
            remedy = f"set {key} instead" if key else "a run decides it itself; leave it out"
            yield f"generation.{engine}.engine_arguments has {name!r}; {remedy}"


def _temperature(config: JobConfig) -> Iterator[str]:
    generation = config.generation
    if generation.engine == "vllm" and generation.temperature < LEAST_TEMPERATURE:
        yield (
            f"generation.temperature={generation.temperature} would be raised to {LEAST_TEMPERATURE} by "
            f"vLLM, and the policy would score another distribution; take at least {LEAST_TEMPERATURE}"
        )


def _server(config: JobConfig) -> Iterator[str]:
    server = config.generation.server
    if not config.serves:
        return
    if server.token_variable is not None:
        token = os.environ.get(server.token_variable)
        key = f"generation.server.token_variable={server.token_variable}"
        if not token:
            yield f"{key}: it is not set in the environment of this process"
            return
        try:
            check_bearer(token)
        except ValueError as error:
            yield f"{key}: {error}"
    elif not is_loopback(server.host):
        yield (
            f"generation.server.host={server.host} is an address that others reach; set "
            "generation.server.token_variable, or leave the host out to listen on 127.0.0.1"
        )
    if is_wildcard(server.host) and not server.advertised_host:
        yield (
            f"generation.server.host={server.host} stands for all addresses; set "
            "generation.server.advertised_host, the name that the printed addresses carry"
        )
