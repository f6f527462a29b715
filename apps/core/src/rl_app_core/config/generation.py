"""The rollout engine: which one, how it samples, and how each kind is built."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from .section import Count, Positive, Section

Port = Annotated[int, Field(ge=1, le=65535)]
ContextLength = Annotated[int, Field(ge=2)]


class EngineServer(Section):
    """An OpenAI-compatible server beside each replica of ``vllm`` or ``trtllm``, for others to use."""

    enabled: bool = False
    """Serve. The addresses are printed when the run has started. With ``environment.gym`` it always does."""
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs a token."""
    advertised_host: str | None = None
    """Name that the printed addresses carry; needed where ``host`` stands for all addresses."""
    ports: tuple[Port, Port] | None = None
    """First and last port to try; none takes any free one."""
    token_variable: str | None = None
    """Environment variable of the driver that holds the token which requests have to carry."""
    model_name: str = "policy"
    """Name under which the model is served."""
    tool_parser: str | None = None
    """vLLM's name of a parser of tool calls, such as ``hermes``; none leaves calls in the text."""
    reasoning_parser: str | None = None
    """vLLM's name of a parser of thinking, such as ``qwen3``; none leaves thinking in the text."""

    @model_validator(mode="after")
    def _ports_rise(self) -> EngineServer:
        if self.ports is not None and self.ports[0] > self.ports[1]:
            raise ValueError(f"ports must rise, got {self.ports[0]} to {self.ports[1]}")
        return self


class Vllm(Section):
    """vLLM, read when ``generation.engine`` is ``vllm``: replicas in Ray actors of their own."""

    replicas: PositiveInt = 1
    """Copies of the model that share the requests."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` takes GPUs where the driver's machine has one."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs, or on a CPU processes, that each copy is spread over."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of weights and activations; none is ``policy.precision``."""
    max_model_len: ContextLength | None = None
    """Longest prompt and answer together, in tokens; none is the model's context."""
    kv_cache_bytes: PositiveInt | None = None
    """Size of each copy's key-value cache; none is a share of the GPU's memory, or 256 MiB on a CPU."""
    max_num_seqs: PositiveInt = 256
    """Requests that a replica decodes at once; more wait inside it."""
    prefix_cache: bool = True
    """Let prompts share what they have in common; a refit empties the cache."""
    cpu_threads: PositiveInt = 1
    """Of each process, on a CPU."""
    engine_arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed on to vLLM's ``EngineArgs``. What decides about tokens and their scores is refused."""


class Trtllm(Section):
    """TensorRT-LLM, read when ``generation.engine`` is ``trtllm``: needs NVIDIA GPUs."""

    replicas: PositiveInt = 1
    """Copies of the model that share the requests."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that each copy is spread over."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of weights and activations; none is ``policy.precision``."""
    max_model_len: ContextLength | None = None
    """Longest prompt and answer together, in tokens; none is the model's context."""
    max_batch: PositiveInt = 256
    """Requests that a replica decodes at once; more wait inside it."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Part of the GPU's free memory that the key-value cache takes."""
    prefix_cache: bool = True
    """Let prompts share what they have in common; a refit empties the cache."""
    engine_arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed on to TensorRT-LLM's ``AsyncLLM`` as they are."""


class Generation(Section):
    """The rollout engine and how it samples during training."""

    engine: Literal["megatron", "vllm", "trtllm"] = "megatron"
    """``megatron``: the policy's own model with a key-value cache, in the policy's process. ``vllm`` and
    ``trtllm``: an engine of its own, which is given the new weights after every step."""
    max_new_tokens: PositiveInt = 32
    """Per turn."""
    temperature: Positive = 1.0
    """Of sampling and of scoring."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Must be 1: the policy cannot score a truncated distribution."""
    top_k: Count = 0
    """Must be 0, for the same reason."""
    server: EngineServer = EngineServer()
    vllm: Vllm = Vllm()
    trtllm: Trtllm = Trtllm()

    @model_validator(mode="after")
    def _scorable(self) -> Generation:
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}: the policy cannot score a truncated distribution; "
                "train with top_p=1 and top_k=0 and use temperature instead"
            )
        return self

    @model_validator(mode="after")
    def _server_has_an_engine(self) -> Generation:
        if self.server.enabled and self.engine == "megatron":
            raise ValueError(
                "server.enabled: the engine megatron works in the policy's process and serves no HTTP; "
                "use engine=vllm or leave the server off"
            )
        return self

    @model_validator(mode="after")
    def _parsers_are_vllms(self) -> Generation:
        server = self.server
        if self.engine == "trtllm" and (server.tool_parser or server.reasoning_parser):
            raise ValueError(
                "server.tool_parser and server.reasoning_parser are vLLM's; leave them out with engine=trtllm"
            )
        return self

    @model_validator(mode="after")
    def _threads_are_for_a_cpu(self) -> Generation:
        own = self.vllm
        if self.engine == "vllm" and own.device == "cuda" and own.cpu_threads != 1:
            raise ValueError(
                f"vllm.cpu_threads={own.cpu_threads} has no effect with vllm.device=cuda; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _room_for_a_prompt(self) -> Generation:
        longest = None if self.engine == "megatron" else getattr(self, self.engine).max_model_len
        if longest is not None and self.max_new_tokens >= longest:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens} leaves no room for a prompt in "
                f"{self.engine}.max_model_len={longest}; lower the first or raise the second"
            )
        return self
