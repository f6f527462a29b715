"""The ``grpo`` command."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rl_app_core.cli import Running, guarded, quiet_process
from rl_app_core.config import GRPOConfig, load_config, to_yaml
from rl_app_core.run_directory import RunDirectory

from .recipes import DEFAULT_RECIPE, find_recipe

if TYPE_CHECKING:
    from rl_app_core.preflight import Prepared

# Modules that need torch are imported where they are used: a wrong word must not cost their seconds.

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Group relative policy optimisation of language models.",
)

Recipe = Annotated[
    str,
    typer.Option("-c", "--config", metavar="RECIPE", help="A shipped recipe, or a YAML file."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings to replace, such as algorithm.steps=10."),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of an earlier run.")]


@app.command()
def run(
    overrides: Overrides = None,
    recipe: Recipe = DEFAULT_RECIPE,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="RUN_DIR", help="New run directory; default: below runs/."),
    ] = None,
) -> None:
    """Train. With no arguments: the CPU recipe, a few minutes on a laptop."""
    began = time.perf_counter()
    running = Running()
    with guarded(Console(stderr=True), running):
        config = load_config(find_recipe(recipe), overrides or [], model=GRPOConfig)
        prepared = _prepare(config)
        directory = RunDirectory.create(output, config, "grpo")
        _run(config, prepared, directory, began, running)


@app.command()
def resume(run_dir: RunDir) -> None:
    """Continue an interrupted run from its newest checkpoint, exactly as if it had not stopped."""
    began = time.perf_counter()
    running = Running()
    with guarded(Console(stderr=True), running):
        directory, config = RunDirectory.open(run_dir, GRPOConfig)
        if _is_done(directory, config):
            typer.echo(
                f"{run_dir} is done: {config.algorithm.steps} steps; for more, raise algorithm.steps "
                f"in {directory.config_file} and resume again"
            )
            return
        _run(config, _prepare(config), directory, began, running)


@app.command()
def validate(overrides: Overrides = None, recipe: Recipe = DEFAULT_RECIPE) -> None:
    """Check a recipe, its overrides and every file it names, without starting anything."""
    with guarded(Console(stderr=True)):
        from rl_app_core.policy_plan import policy_warnings

        path = find_recipe(recipe)
        prepared = _prepare(load_config(path, overrides or [], model=GRPOConfig))
        problems = prepared.problems
        for warning in policy_warnings(prepared.config):
            typer.echo(f"warning: {warning}")
        typer.echo(
            f"ok: {path.name}, {len(problems.train):,} training and {len(problems.held_out):,} held-out "
            f"problems ({problems.repeated:,} repeated ones left out)"
        )


@app.command("show-config")
def show_config(overrides: Overrides = None, recipe: Recipe = DEFAULT_RECIPE) -> None:
    """Print the whole configuration, defaults included, as YAML."""
    with guarded(Console(stderr=True)):
        typer.echo(to_yaml(load_config(find_recipe(recipe), overrides or [], model=GRPOConfig)), nl=False)


@app.command("export-hf")
def export_hf(
    run_dir: RunDir,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="New directory for the model.")],
) -> None:
    """Write the newest checkpoint as a Hugging Face directory: weights, configuration, tokenizer."""
    with guarded(Console(stderr=True)):
        from rl_app_core.export import export_checkpoint

        quiet_process()
        step = export_checkpoint(run_dir, target, GRPOConfig)
        typer.echo(f"step {step} of {run_dir} is in {target}")


def _prepare(config: GRPOConfig) -> Prepared:
    from rl_app_core.grpo import check_settings
    from rl_app_core.preflight import prepare

    check_settings(config)
    return prepare(config)


def _is_done(directory: RunDirectory, config: GRPOConfig) -> bool:
    if not directory.summary_file.is_file():
        return False
    return any(record["step"] >= config.algorithm.steps for record in directory.records())


def _run(
    config: GRPOConfig, prepared: Prepared, directory: RunDirectory, began: float, running: Running
) -> None:
    from rl_app_core.engine_metrics import engine_line
    from rl_app_core.grpo import grpo_trainer
    from rl_app_core.job import run_job
    from rl_app_core.policy_plan import policy_warnings
    from rl_app_core.reporting import RunReporter

    quiet_process()
    with directory.locked(), RunReporter(Console()) as reporter:
        running.directory = directory
        running.resume_hint = f"; continue with: grpo resume {shlex.quote(str(directory.path))}"
        reporter.line(f"run        {directory.path}")
        for warning in policy_warnings(config):
            reporter.line(f"warning    {warning}")
        summary = run_job(prepared, grpo_trainer(config), directory, reporter, began=began)
        gained = summary.held_out_after - summary.held_out_before
        reporter.line(
            f"after      held-out accuracy {summary.held_out_before:.3f} -> {summary.held_out_after:.3f} "
            f"({gained:+.3f}) in {summary.steps} steps, {summary.seconds:.0f} s"
        )
        reporter.line(f"engine     {engine_line(summary)}")
        reporter.line(f"summary    {directory.summary_file}")


def main() -> None:
    """Entry point of the console script ``grpo``."""
    app()
