"""vLLM's own OpenAI app over a running engine, with the contract of our servers around it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..failures import GenerationError, UnavailableBackendError
from ..protocol import Completion
from ..server.asgi import App
from ..server.rendering import turn_end_tokens
from ..server.settings import ServerSettings
from .arguments import LEAST_TEMPERATURE
from .contract import VllmContract
from .exchange import CURRENT, Complete
from .observed import ObservedClient
from .results import completion_of

_COMPONENT = "vllm server"

# Newest place first; they moved between releases.
_PLACES = {
    "build_app": ("vllm.entrypoints.launchers.app", "vllm.entrypoints.openai.api_server"),
    "init_app_state": (
        "vllm.entrypoints.launchers.api_server.app_state",
        "vllm.entrypoints.openai.api_server",
    ),
    "make_arg_parser": (
        "vllm.entrypoints.common.cli_args",
        "vllm.entrypoints.launchers.cli_args",
        "vllm.entrypoints.openai.cli_args",
    ),
}


@dataclass(frozen=True, slots=True)
class VllmServerSettings:
    """What the server of one engine is told.

    Attributes:
        contract: the same for every backend.
        tool_parser: vLLM's name of one, such as ``hermes``; ``None`` leaves calls in the text.
        reasoning_parser: vLLM's name of one, such as ``qwen3``; ``None`` leaves thinking in the text.
        chat_template: a Jinja file instead of the tokenizer's own template.

    Raises:
        ValueError: a profile whose temperature vLLM would change.
    """

    contract: ServerSettings
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: Path | None = None

    def __post_init__(self) -> None:
        for profile in self.contract.profiles:
            if 0 < profile.temperature < LEAST_TEMPERATURE:
                raise ValueError(
                    f"profile {profile.name!r} has temperature {profile.temperature:g}, which vLLM would "
                    f"raise to {LEAST_TEMPERATURE:g}; take 0 for greedy decoding"
                )


async def build_server_app(
    client: Any, settings: VllmServerSettings, weight_version: Callable[[], int]
) -> App:
    """The ASGI app, to be served on the event loop that the engine's client belongs to.

    Args:
        client: vLLM's ``AsyncLLM``, started with ``generation_config="vllm"`` and
            ``logprobs_mode="processed_logprobs"``.
        settings: of the server.
        weight_version: of the weights now, for a vLLM that does not note it with each token.

    Raises:
        GenerationError: the engine was started so that tokens are not exact, or a parser is unknown.
        UnavailableBackendError: this vLLM has no such app.
    """
    _check_engine(client)
    template = None
    if settings.chat_template is not None:
        template = settings.chat_template.read_text(encoding="utf-8")
    contract = settings.contract
    if not contract.stop_token_ids:
        stops = turn_end_tokens(client.renderer.get_tokenizer(), template)
        contract = dataclasses.replace(contract, stop_token_ids=stops)
    observed = ObservedClient(client, _reader(weight_version))
    app = await _vllm_app(observed, settings, contract)
    return VllmContract(app, observed, contract, calls_tools=settings.tool_parser is not None)


async def _vllm_app(client: ObservedClient, settings: VllmServerSettings, contract: ServerSettings) -> Any:
    # Here and not at the top, because it imports vLLM.
    from .renderer import TokenExactRenderer

    arguments = _arguments(client, settings)
    tasks = await client.get_supported_tasks()
    app = _entry_point("build_app")(arguments, tasks, client.model_config)
    try:
        await _entry_point("init_app_state")(client, app.state, arguments, tasks)
    except (KeyError, TypeError, ValueError) as error:
        raise GenerationError(
            f"{_COMPONENT}: vLLM's app cannot be set up with tool_parser={settings.tool_parser!r} and "
            f"reasoning_parser={settings.reasoning_parser!r}: {error}"
        ) from error
    TokenExactRenderer.adopt(app.state.online_renderer, contract)
    app.add_exception_handler(GenerationError, _refuse)
    return app


async def _refuse(request: Any, error: Exception) -> Any:
    from fastapi import Response

    exchange = CURRENT.get()
    if exchange is not None and isinstance(error, GenerationError):
        # The contract's wrapper raises it again; the answer itself is not looked at.
        exchange.failure = error
    return Response(status_code=500)


def _reader(weight_version: Callable[[], int]) -> Complete:
    def read(output: Any) -> Completion:
        return completion_of(output, weight_version(), _COMPONENT)

    return read


def _check_engine(client: Any) -> None:
    config = client.model_config
    wanted = {"generation_config": "vllm", "logprobs_mode": "processed_logprobs"}
    for name, value in wanted.items():
        got = getattr(config, name)
        if got != value:
            raise GenerationError(
                f"{_COMPONENT}: the engine was started with {name}={got!r}, so defaults of the model or "
                f"raw log-probabilities would creep in; start it with {name}={value!r}"
            )


def _arguments(client: Any, settings: VllmServerSettings) -> Any:
    """vLLM's parsed command line; only what its HTTP app reads matters, the engine runs already."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    line = ["--model", client.model_config.model, "--served-model-name", settings.contract.model]
    line += ["--generation-config", "vllm", "--disable-fastapi-docs", "--disable-log-stats"]
    if settings.tool_parser is not None:
        line += ["--enable-auto-tool-choice", "--tool-call-parser", settings.tool_parser]
    if settings.chat_template is not None:
        line += ["--chat-template", str(settings.chat_template)]
    arguments = _entry_point("make_arg_parser")(FlexibleArgumentParser()).parse_args(line)
    # vLLM's launcher does this while it builds the engine.
    arguments.structured_outputs_config.reasoning_parser = settings.reasoning_parser or ""
    return arguments


def _entry_point(name: str) -> Any:
    for place in _PLACES[name]:
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError):
            continue
    raise UnavailableBackendError(
        f"{_COMPONENT}: this vLLM has {name} in none of {', '.join(_PLACES[name])}; use 0.25 to 0.33"
    )
