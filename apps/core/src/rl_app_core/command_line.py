"""The command of an application: the same verbs, words and exit codes for all of them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import typer
from rich.console import Console

from .cli import Running, guarded, quiet_process
from .config import JobConfig, load_config, to_yaml
from .recipes import DEFAULT_RECIPE, Recipes
from .run_directory import RunDirectory, Summary

if TYPE_CHECKING:
    from .preflight import Prepared
    from .reporting import RunReporter

# Modules that need torch are imported where they are used: a wrong word must not cost their seconds.

_Config = TypeVar("_Config", bound=JobConfig)


@dataclass(frozen=True, slots=True)
class Application(Generic[_Config]):
    """What tells one command from another.

    Attributes:
        about: one sentence for ``--help``.
        about_run: the same for ``run``.
        config: its configuration; ``config.command`` is the command's name.
        recipes: what it comes with.
        prepare: checks a configuration; starts nothing.
        run: does the job, from ``time.perf_counter()`` at the start of the command on.
    """

    about: str
    about_run: str
    config: type[_Config]
    recipes: Recipes
    prepare: Callable[[_Config], Prepared]
    run: Callable[[_Config, Prepared, RunDirectory, RunReporter, float], Summary]

    @property
    def name(self) -> str:
        """Of the console script."""
        return self.config.command

    def load(self, recipe: str, overrides: list[str] | None) -> _Config:
        """The configuration that the words of a command line ask for.

        Raises:
            ConfigError: recipe or words cannot be used.
        """
        return load_config(self.recipes.find(recipe), overrides or [], model=self.config)


_Recipe = Annotated[
    str,
    typer.Option("-c", "--config", metavar="RECIPE", help="A shipped recipe, or a YAML file."),
]
_Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings to replace, such as algorithm.steps=10."),
]
_RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of an earlier run.")]
_Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="RUN_DIR", help="New run directory; default: below runs/."),
]
_Target = Annotated[Path, typer.Argument(metavar="TARGET", help="New directory for the model.")]


def command_line(application: Application[Any]) -> typer.Typer:
    """The verbs ``run``, ``resume``, ``validate``, ``show-config`` and ``export-hf`` of an application."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help=application.about,
    )

    @app.command(help=application.about_run)
    def run(overrides: _Overrides = None, recipe: _Recipe = DEFAULT_RECIPE, output: _Output = None) -> None:
        began = time.perf_counter()
        running = Running()
        with guarded(Console(stderr=True), running):
            config = application.load(recipe, overrides)
            prepared = application.prepare(config)
            directory = RunDirectory.create(output, config, application.name)
            _run(application, config, prepared, directory, began, running)

    @app.command()
    def resume(run_dir: _RunDir) -> None:
        """Continue an interrupted run from its newest checkpoint, exactly as if it had not stopped."""
        began = time.perf_counter()
        running = Running()
        with guarded(Console(stderr=True), running):
            directory, config = RunDirectory.open(run_dir, application.config)
            if _is_done(directory, config):
                typer.echo(
                    f"{run_dir} is done: {config.algorithm.steps} steps; for more, raise algorithm.steps "
                    f"in {directory.config_file} and resume again"
                )
                return
            _run(application, config, application.prepare(config), directory, began, running)

    @app.command()
    def validate(overrides: _Overrides = None, recipe: _Recipe = DEFAULT_RECIPE) -> None:
        """Check a recipe, its overrides and every file it names, without starting anything."""
        with guarded(Console(stderr=True)):
            from .policy_plan import policy_warnings

            prepared = application.prepare(application.load(recipe, overrides))
            problems = prepared.problems
            for warning in policy_warnings(prepared.config):
                typer.echo(f"warning: {warning}")
            typer.echo(
                f"ok: {application.recipes.find(recipe).name}, {len(problems.train):,} training and "
                f"{len(problems.held_out):,} held-out problems ({problems.repeated:,} repeated ones left out)"
            )

    @app.command("show-config")
    def show_config(overrides: _Overrides = None, recipe: _Recipe = DEFAULT_RECIPE) -> None:
        """Print the whole configuration, defaults included, as YAML."""
        with guarded(Console(stderr=True)):
            typer.echo(to_yaml(application.load(recipe, overrides)), nl=False)

    @app.command("export-hf")
    def export_hf(run_dir: _RunDir, target: _Target) -> None:
        """Write the newest checkpoint as a Hugging Face directory: weights, configuration, tokenizer."""
        with guarded(Console(stderr=True)):
            from .export import export_checkpoint

            quiet_process()
            step = export_checkpoint(run_dir, target, application.config)
            typer.echo(f"step {step} of {run_dir} is in {target}")

    return app


def _is_done(directory: RunDirectory, config: JobConfig) -> bool:
    if not directory.summary_file.is_file():
        return False
    return any(record["step"] >= config.algorithm.steps for record in directory.records())


def _run(
    application: Application[_Config],
    config: _Config,
    prepared: Prepared,
    directory: RunDirectory,
    began: float,
    running: Running,
) -> None:
    from .engine_metrics import engine_line
    from .policy_plan import policy_warnings
    from .reporting import RunReporter

    quiet_process()
    with directory.locked(), RunReporter(Console()) as reporter:
        running.directory = directory
        running.resume_hint = f"; continue with: {application.name} resume {shlex.quote(str(directory.path))}"
        reporter.line(f"run        {directory.path}")
        for warning in policy_warnings(config):
            reporter.line(f"warning    {warning}")
        summary = application.run(config, prepared, directory, reporter, began)
        gained = summary.held_out_after - summary.held_out_before
        reporter.line(
            f"after      held-out accuracy {summary.held_out_before:.3f} -> {summary.held_out_after:.3f} "
            f"({gained:+.3f}) in {summary.steps} steps, {summary.seconds:.0f} s"
        )
        reporter.line(f"engine     {engine_line(summary)}")
        reporter.line(f"summary    {directory.summary_file}")
