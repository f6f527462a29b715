"""The ``grpo`` command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_app_core.command_line import Application, command_line
from rl_app_core.config import GRPOConfig

from .recipes import RECIPES

if TYPE_CHECKING:
    from rl_app_core.preflight import Prepared
    from rl_app_core.reporting import RunReporter
    from rl_app_core.run_directory import RunDirectory, Summary

# Modules that need torch are imported where they are used: a wrong word must not cost their seconds.


def _prepare(config: GRPOConfig) -> Prepared:
    from rl_app_core.grpo import check_settings
    from rl_app_core.preflight import prepare

    check_settings(config)
    return prepare(config)


def _run(
    config: GRPOConfig, prepared: Prepared, directory: RunDirectory, reporter: RunReporter, began: float
) -> Summary:
    from rl_app_core.grpo import grpo_trainer
    from rl_app_core.job import run_job

    return run_job(prepared, grpo_trainer(config), directory, reporter, began=began)


app = command_line(
    Application(
        about="Group relative policy optimisation of language models.",
        about_run="Train. With no arguments: the CPU recipe, a few minutes on a laptop.",
        config=GRPOConfig,
        recipes=RECIPES,
        prepare=_prepare,
        run=_run,
    )
)


def main() -> None:
    """Entry point of the console script ``grpo``."""
    app()
