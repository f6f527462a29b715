"""From what the configuration says of teachers to their directories in Hugging Face format."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

from rl_app_core.compose import model_directory
from rl_app_core.config import ConfigError, DistillationConfig, GRPOConfig, load_config
from rl_app_core.config.distillation import TeacherSource
from rl_app_core.export import export_checkpoint
from rl_app_core.grpo import check_settings, grpo_trainer
from rl_app_core.job import run_job
from rl_app_core.preflight import prepare
from rl_app_core.problems import Problems
from rl_app_core.reporting import RunReporter
from rl_app_core.run_directory import RunDirectory
from rl_app_core.teachers import check_teacher

from .recipes import TEACHERS


def check_sources(config: DistillationConfig) -> None:
    """Refuse teachers that cannot be had, before anything starts.

    Raises:
        ConfigError: naming key and remedy.
    """
    student = config.model.path
    for key, _, source in _sources(config):
        if source.model is not None:
            check_teacher(f"{key}.model", source.model, student)
        elif source.run is not None:
            RunDirectory.open(source.run, GRPOConfig)
        else:
            teacher = _teacher_config(config, key, source)
            check_settings(teacher)
            prepare(teacher)


def check_tasks(config: DistillationConfig, problems: Problems) -> None:
    """That each teacher of an environment has rows of it to judge.

    Raises:
        ConfigError: no row names that environment.
    """
    agents = {row.agent for row in problems.train}
    for name in config.teachers:
        if name not in agents:
            close = get_close_matches(name, agents, n=1)
            hint = f"did you mean {close[0]}?" if close else f"rows name {', '.join(sorted(agents))}"
            raise ConfigError(f"teachers.{name}: no row is of the environment {name!r}; {hint}")


def teacher_models(
    config: DistillationConfig, directory: RunDirectory, reporter: RunReporter
) -> Mapping[str, Path]:
    """Every teacher as a directory in Hugging Face format, by environment; ``""`` is that of all others.

    What is trained or exported for the run lies in its directory, so that a resume finds it there.

    Raises:
        ConfigError: a teacher that cannot judge the student's tokens.
        Interrupted: a signal asked to stop while a teacher was trained.
    """
    student = model_directory(config, directory)
    models: dict[str, Path] = {}
    for key, agent, source in _sources(config):
        model = source.model
        if model is None:
            # Names of environments may hold anything; keys of the configuration are their order's.
            folder = directory.path / ("teacher" if not agent else f"teacher-{len(models)}")
            run = source.run or _trained(config, key, source, folder, reporter)
            model = _exported(run, folder)
            reporter.line(f"teacher    {run}")
        check_teacher(key, model, student)
        models[agent] = model
    return models


def _sources(config: DistillationConfig) -> Iterator[tuple[str, str, TeacherSource]]:
    yield "teacher", "", config.teacher
    for agent in sorted(config.teachers):
        yield f"teachers.{agent}", agent, config.teachers[agent]


def _teacher_config(config: DistillationConfig, key: str, source: TeacherSource) -> GRPOConfig:
    """The recipe's, with the seed and the machine of the run."""
    try:
        found = load_config(TEACHERS.find(str(source.recipe)), model=GRPOConfig)
    except ConfigError as error:
        raise ConfigError(f"{key}.recipe: {error}") from error
    return found.model_copy(update={"seed": config.seed, "cluster": config.cluster})


def _trained(
    config: DistillationConfig, key: str, source: TeacherSource, folder: Path, reporter: RunReporter
) -> Path:
    """The directory of a finished GRPO job; one that was begun is continued."""
    if (folder / "config.yaml").is_file():
        run, teacher = RunDirectory.open(folder, GRPOConfig)
    else:
        # What a kill left of the making of it.
        shutil.rmtree(folder, ignore_errors=True)
        teacher = _teacher_config(config, key, source)
        run = RunDirectory.create(folder, teacher, "grpo")
    if not run.summary_file.is_file():
        reporter.line(f"teacher    is trained by {source.recipe} in {folder}")
        with run.locked():
            summary = run_job(
                prepare(teacher), grpo_trainer(teacher), run, reporter, began=time.perf_counter()
            )
        reporter.line(
            f"teacher    held-out accuracy {summary.held_out_before:.3f} -> {summary.held_out_after:.3f} "
            f"in {summary.steps} steps, {summary.seconds:.0f} s"
        )
    return folder


def _exported(run: Path, folder: Path) -> Path:
    """Its newest checkpoint in Hugging Face format; whole, or not there."""
    target = folder / "exported"
    if not target.exists():
        partial = folder / ".exported.partial"
        shutil.rmtree(partial, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        export_checkpoint(run, partial, GRPOConfig)
        partial.rename(target)
    return target
