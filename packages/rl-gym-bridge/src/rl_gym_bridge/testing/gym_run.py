"""A real Gym with the scripted model behind it: rollouts by the way that a trainer takes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import NemoGymConfig
from ..dataset import GymRow
from ..failures import GymConfigError
from ..interpreter import GymInterpreter, find_gym_interpreter
from ..request_body import GenerationOverrides
from ..requests import RolloutRequest, RolloutResult
from ..retry import RetryPolicy
from ..rows import NemoGymDataset, collate_rollout_requests
from ..session import GymSession
from .acceptance import case_findings
from .cases import AcceptanceCase
from .findings import CaseReport, Finding
from .model_server import CASE_KEY, ScriptedModelServer

GENERATION = GenerationOverrides(temperature=0.75, top_p=0.875, max_new_tokens=3000)
"""Settings that no row has, so that each is seen to arrive."""

_WHERE_GYM_IS = """
import importlib.util, json, os
print(json.dumps(os.path.dirname(os.path.dirname(importlib.util.find_spec("nemo_gym").origin))))
"""


class GymRun:
    """Starts Gym and the scripted model, runs rollouts, and ends both; a context manager.

    Attributes:
        server: the scripted model.
        interpreter: what runs Gym; ``None`` with a Gym of somebody else.
        start_s: seconds that the start took.
    """

    def __init__(
        self,
        gym_config: Mapping[str, Any],
        *,
        server: ScriptedModelServer | None = None,
        python: str | None = None,
        head_url: str | None = None,
        start_timeout_s: float = 300.0,
        rollout_timeout_s: float = 120.0,
        max_concurrency: int = 256,
        work_dir: str | None = None,
    ) -> None:
        """
        Args:
            gym_config: Gym's settings: ``config_paths``, and what is put above them.
            server: the model; by default one with its usual settings.
            python: interpreter that has Gym; by default it is found.
            head_url: head server of a Gym that runs already, whose model is at the server's address.
            start_timeout_s: how long Gym may take to become ready.
            rollout_timeout_s: how long a rollout may take. No rollout is tried twice.
            max_concurrency: rollouts at the same time.
            work_dir: folder of Gym's logs; by default one that is removed if nothing fails.

        Raises:
            GymConfigError: there is no interpreter with Gym, or the settings cannot be used.
        """
        self.server = server or ScriptedModelServer()
        self.interpreter: GymInterpreter | None = None if head_url else find_gym_interpreter(python)
        self.start_s = 0.0
        self._gym_config = gym_config
        self._python = python
        self._head_url = head_url
        self._start_timeout_s = start_timeout_s
        self._rollout_timeout_s = rollout_timeout_s
        self._max_concurrency = max_concurrency
        self._work_dir = work_dir
        self._session: GymSession | None = None

    def __enter__(self) -> GymRun:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the model, then Gym.

        Raises:
            GymError: Gym did not start; nothing of it is left.
        """
        began = time.monotonic()
        self.server.start()
        try:
            self._session = GymSession(self.config(), head_url=self._head_url).start()
        except BaseException:
            self.server.stop()
            raise
        self.start_s = time.monotonic() - began

    def close(self) -> None:
        """End Gym and the model; may be called again."""
        session, self._session = self._session, None
        try:
            if session is not None:
                session.shutdown()
        finally:
            self.server.stop()

    def config(self, **changes: Any) -> NemoGymConfig:
        """The bridge's settings for this Gym, with some changed."""
        values: dict[str, Any] = {
            "model_name": self.server.model,
            "base_urls": (self.server.base_url,),
            "gym_config": self._gym_config,
            "python": self._python,
            "retry": RetryPolicy(infra_attempts=1),
            "max_concurrency": self._max_concurrency,
            "transport": "httpx",
            "start_timeout_s": self._start_timeout_s,
            "rollout_timeout_s": self._rollout_timeout_s,
            "work_dir": self._work_dir,
        }
        return NemoGymConfig(**{**values, **changes})

    @property
    def session(self) -> GymSession:
        """The session that runs Gym.

        Raises:
            RuntimeError: it is not started.
        """
        if self._session is None:
            raise RuntimeError("this Gym is not started")
        return self._session

    @property
    def version(self) -> str:
        """Gym's version, empty where somebody else runs it."""
        return self.interpreter.version if self.interpreter else ""

    def requests_for(
        self,
        row: Mapping[str, Any],
        *,
        script: str,
        agent: str | None = None,
        generation: GenerationOverrides = GENERATION,
        group_size: int = 1,
    ) -> list[RolloutRequest]:
        """The requests for rollouts of a row whose model calls name a script.

        Args:
            row: the JSON object; not changed.
            script: name of the script.
            agent: agent of a row that names none.
            generation: how the run samples.
            group_size: number of rollouts.

        Raises:
            DatasetError: the row cannot be used.
        """
        params = dict(row.get("responses_create_params") or {})
        params["metadata"] = {**(params.get("metadata") or {}), CASE_KEY: script}
        data = NemoGymDataset(
            [GymRow.from_mapping({**row, "responses_create_params": params}, default_agent=agent)]
        )
        (group,) = collate_rollout_requests(
            data, generation=generation, group_size=group_size, step=0, seed=0, group_prefix=script
        )
        return group

    def run(
        self, requests: Sequence[RolloutRequest], *, session: GymSession | None = None
    ) -> list[RolloutResult]:
        """Run rollouts, at the same time, and wait for all of them; in the order in which they ended."""

        async def collect() -> list[RolloutResult]:
            return [result async for result in (session or self.session).run_rollouts(requests)]

        return asyncio.run(collect())

    def run_case(self, case: AcceptanceCase, row: Mapping[str, Any]) -> CaseReport:
        """Run a case alone and compare everything that comes of it.

        Args:
            case: the case.
            row: its row, as it stands in Gym.
        """
        self.server.script(case.name, case.turns)
        self.server.clear()
        began = time.monotonic()
        with self.server.running(case.name):
            (result,) = self.run(self.requests_for(row, script=case.name, agent=case.agent))
        return CaseReport(case.name, self.findings(case, row, result), time.monotonic() - began)

    def findings(
        self, case: AcceptanceCase, row: Mapping[str, Any], result: RolloutResult
    ) -> tuple[Finding, ...]:
        """Compare a rollout, whose calls are all that the model got, with its case."""
        return case_findings(
            case,
            row,
            result,
            self.server.calls_for(case.name),
            generation=generation_settings(GENERATION),
            models=(self.server.model, self.server.judge_model),
        )


def generation_settings(generation: GenerationOverrides) -> dict[str, Any]:
    """What the overrides put into a request, by its names."""
    values = {
        "temperature": generation.temperature,
        "top_p": generation.top_p,
        "max_output_tokens": generation.max_new_tokens,
    }
    return {key: value for key, value in values.items() if value is not None}


def gym_root(interpreter: GymInterpreter, *, timeout_s: float = 60.0) -> Path:
    """The folder that Gym's own configuration paths and rows are relative to.

    Raises:
        GymConfigError: the interpreter does not say within ``timeout_s``.
    """
    try:
        done = subprocess.run(
            [str(interpreter.python), "-I", "-c", _WHERE_GYM_IS],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=True,
        )
        return Path(json.loads(done.stdout))
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        raise GymConfigError(
            f"it does not tell where nemo_gym is: {error}",
            component="python",
            address=str(interpreter.python),
            remedy="install Gym there again",
        ) from error
