"""The loop of an asynchronous run, bound to the living parts of the job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from rl_algorithms.controller import Begin, Controller, ControllerSettings, Snapshot
from rl_algorithms.group_files import GroupStore
from rl_algorithms.loops import LoopResult
from rl_algorithms.loops.asynchronous import AsyncTrainer, resume_controller
from rl_algorithms.loops.persist import check_store
from rl_algorithms.loops.progress import is_reached
from rl_algorithms.loops.state import LoopState
from rl_algorithms.staleness import PublishedVersions
from rl_app_core.chat_model import EngineChatModel
from rl_app_core.config import SingleControllerConfig
from rl_app_core.job import Loop
from rl_gym_bridge.local_runner import LocalRunner
from rl_gym_bridge.requests import RolloutRunner

from .gym import lasting_gym
from .ledger import ledger
from .requests import RowRequests, row_requests
from .rollout_pump import RolloutPump
from .sharing import shared_engine
from .shell import GraceOver, Shell
from .train_pump import TrainPump

# Groups that are played at the same time at most take a thread each while they wait for the engine.
_MOST_THREADS = 256
# Of the grace, for the end of all processes.
_TO_END = 0.4


class Settings(Protocol):
    """Of the controller, for so many rows."""

    def __call__(self, config: SingleControllerConfig, *, rows: int) -> ControllerSettings: ...


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """Rollouts that run ahead of training."""

    config: SingleControllerConfig
    controller_settings: Settings

    def __call__(self, loop: Loop) -> LoopResult:
        """Train until the target steps are done.

        Raises:
            StalledError: nothing happened for too long.
            Exception: as :func:`~rl_algorithms.loops.sync.run_sync`.
        """
        config, runtime = self.config, loop.runtime
        if loop.prepared.gym is not None:
            with lasting_gym(loop, config, loop.prepared.gym) as (gym, evaluate):
                return self.run(replace(loop, evaluate=evaluate), gym)
        with shared_engine(runtime.engine, timeout_s=config.cluster.call_timeout_s) as engine:
            runner = LocalRunner(
                loop.prepared.environments,
                EngineChatModel(engine, runtime.conversation, config.generation, runtime.max_context),
                max_new_tokens=config.generation.max_new_tokens,
                temperature=config.generation.temperature,
                top_p=config.generation.top_p,
            )
            return self.run(loop, runner, engine.check)

    def run(self, loop: Loop, runner: RolloutRunner, check: Callable[[], None] = lambda: None) -> LoopResult:
        """The same, with rollouts by ``runner``; ``check`` raises if they can never succeed any more."""
        config, problems = self.config, loop.prepared.problems
        settings = self.controller_settings(config, rows=len(problems.train))
        identity: dict[str, int | str] = {
            "rows": len(problems.train),
            "rows_digest": problems.digest,
            "prompts_per_step": settings.prompts_per_step,
            "group_size": settings.group_size,
            "seed": config.seed,
        }
        check_store(loop.checkpoints, loop.resume_from)
        groups = GroupStore(loop.directory.groups, on_ignored=loop.say)
        state, snapshot = LoopState(), Snapshot()
        if loop.resume_from is not None:
            state, snapshot = resume_controller(loop.runtime.policy, loop.resume_from, identity)
            groups.keep_only(snapshot.version)
            if is_reached(state, loop.settings):
                return state.result(stopped=False, reached=True)
        else:
            groups.keep_only(-1)
        requests = row_requests(loop.prepared)
        controller = Controller(settings, snapshot, groups.read(snapshot.version))
        if loop.resume_from is not None:
            loop.say(
                f"kept       {controller.ready} finished groups, {controller.counters.discarded_groups} of "
                "them of no use"
            )
        trainer = AsyncTrainer(
            settings=loop.settings,
            method=loop.method,
            policy=loop.runtime.policy,
            pad_token_id=loop.runtime.conversation.pad_token_id,
            identity=identity,
            evaluate=loop.evaluate,
            metrics_logger=loop.metrics,
            checkpoints=loop.checkpoints,
            state=state,
            on_step=loop.on_step,
            on_trained=ledger(loop.directory, requests.row),
        )
        due = settings.evaluates(snapshot.version)
        begin = Begin(
            measured=not due or any(entry.step == snapshot.version for entry in state.held_out),
            saved=loop.resume_from is not None,
        )
        stopped = asyncio.run(
            _run(loop, controller, trainer, runner, requests, groups, begin, self.config, check)
        )
        trainer.flush()
        return state.result(stopped=stopped, reached=is_reached(state, loop.settings))


async def _run(
    loop: Loop,
    controller: Controller,
    trainer: AsyncTrainer,
    runner: RolloutRunner,
    requests: RowRequests,
    groups: GroupStore,
    begin: Begin,
    config: SingleControllerConfig,
    check: Callable[[], None] = lambda: None,
) -> bool:
    policy, engine = loop.runtime.policy, loop.runtime.engine

    def refresh() -> None:
        check()
        engine.refresh()

    threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="rollouts")
    asyncio.get_running_loop().set_default_executor(threads)
    shell = Shell(
        controller,
        should_stop=lambda: loop.stop.requested,
        grace_s=config.async_.grace_s * (1 - _TO_END),
    )
    versions = PublishedVersions(policy.weight_version(), controller.version)
    post: Callable[..., None] = shell.post
    pump = TrainPump(
        trainer=trainer,
        policy=policy,
        refresh=refresh,
        versions=versions,
        groups=groups,
        post=post,
    )
    try:
        return await shell.run(begin, RolloutPump(runner, requests, versions, post), pump)
    except GraceOver as error:
        loop.say(f"stopped    {error}")
        raise loop.stop.interrupted(
            "stopped without a safe point; the last checkpoint is what there is"
        ) from error
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        # The end of the event loop waits for its executor: not for threads that an engine keeps waiting.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
