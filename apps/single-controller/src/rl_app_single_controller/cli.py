"""The ``single-controller`` command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_app_core.command_line import Application, command_line
from rl_app_core.config import SingleControllerConfig

from .recipes import RECIPES

if TYPE_CHECKING:
    from rl_app_core.preflight import Prepared
    from rl_app_core.reporting import RunReporter
    from rl_app_core.run_directory import RunDirectory, Summary

# Modules that need torch are imported where they are used: a wrong word must not cost their seconds.


def _prepare(config: SingleControllerConfig) -> Prepared:
    from rl_app_core.preflight import prepare

    from .plan import check_settings

    check_settings(config)
    return prepare(config)


def _run(
    config: SingleControllerConfig,
    prepared: Prepared,
    directory: RunDirectory,
    reporter: RunReporter,
    began: float,
) -> Summary:
    from rl_app_core.job import run_job

    from .plan import trainer

    return run_job(prepared, trainer(config), directory, reporter, began=began)


app = command_line(
    Application(
        about="Reinforcement learning whose rollouts run ahead of training, within a bound.",
        about_run="Train. With no arguments: the CPU recipe, a few minutes on a laptop.",
        config=SingleControllerConfig,
        recipes=RECIPES,
        prepare=_prepare,
        run=_run,
    )
)


def main() -> None:
    """Entry point of the console script ``single-controller``."""
    app()
