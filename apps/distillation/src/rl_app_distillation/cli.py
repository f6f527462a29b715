"""The ``distill`` command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_app_core.command_line import Application, command_line
from rl_app_core.config import DistillationConfig

from .recipes import RECIPES

if TYPE_CHECKING:
    from rl_app_core.preflight import Prepared
    from rl_app_core.reporting import RunReporter
    from rl_app_core.run_directory import RunDirectory, Summary

# Modules that need torch are imported where they are used: a wrong word must not cost their seconds.


def _prepare(config: DistillationConfig) -> Prepared:
    from rl_app_core.distillation import check_settings
    from rl_app_core.preflight import prepare

    from .teachers import check_sources, check_tasks

    check_settings(config)
    check_sources(config)
    prepared = prepare(config)
    check_tasks(config, prepared.problems)
    return prepared


def _run(
    config: DistillationConfig,
    prepared: Prepared,
    directory: RunDirectory,
    reporter: RunReporter,
    began: float,
) -> Summary:
    from rl_app_core.distillation import distillation_trainer
    from rl_app_core.job import run_job

    from .teachers import teacher_models

    models = teacher_models(config, directory, reporter)
    return run_job(prepared, distillation_trainer(config, models), directory, reporter, began=began)


app = command_line(
    Application(
        about="On-policy distillation of language models.",
        about_run="Distil a teacher. With no arguments: the CPU recipe, which trains its teacher first.",
        config=DistillationConfig,
        recipes=RECIPES,
        prepare=_prepare,
        run=_run,
    )
)


def main() -> None:
    """Entry point of the console script ``distill``."""
    app()
