"""From keys of the configuration to the controller; and what is refused on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_algorithms.controller import (
    ControllerSettings,
    InOrder,
    ReadyFirst,
    RetryPolicy,
    WeightFifo,
    Windowed,
)
from rl_algorithms.loops import LoopError
from rl_app_core.config import ConfigError, SingleControllerConfig, load_config, to_yaml
from rl_app_core.config.asynchronous import Async
from rl_app_single_controller import plan
from rl_app_single_controller.asynchronous import Asynchronous
from rl_app_single_controller.plan import check_settings, controller_settings, trainer

SMALLEST = ["model.tiny={}", "data.train.dataset_name=basic_arithmetic"]

OWN = '''
from dataclasses import dataclass


@dataclass(frozen=True)
class Newest:
    """Those of the newest weights first."""

    share: float = 1.0

    def choose(self, ready, running, count):
        return None


class Lacking:
    pass
'''


def config(*words: str) -> SingleControllerConfig:
    return load_config(None, [*SMALLEST, *words], model=SingleControllerConfig)


def settings(*words: str, rows: int = 1000) -> ControllerSettings:
    return controller_settings(config(*words), rows=rows)


Read = Callable[[ControllerSettings], Any]

# Of every key a value that is not its default, and where it arrives.
REACHES: list[tuple[list[str], Any, Read]] = [
    (["async.max_staleness=3"], 3, lambda s: s.max_staleness),
    (["async.sampler=ready_first"], ReadyFirst(), lambda s: s.sampler),
    (["async.sampler=windowed", "async.window_steps=2"], 20, lambda s: s.sampler.window),
    (["async.max_running_groups=7"], 7, lambda s: s.max_running),
    (["async.straggler_policy=shrink"], "shrink", lambda s: s.straggler),
    (["async.straggler_timeout_s=11"], 11.0, lambda s: s.straggler_timeout_s),
    (["async.min_batch_fraction=0.4"], 0.4, lambda s: s.min_batch_fraction),
    (["async.max_row_replays=9"], 9, lambda s: s.max_replays),
    (["async.infra_retries=8"], 8, lambda s: s.retry.infra),
    (["async.data_retries=6"], 6, lambda s: s.retry.data),
    (["async.retry_delay_s=4"], 4.0, lambda s: s.retry.first_delay_s),
    (["async.retry_delay_max_s=44"], 44.0, lambda s: s.retry.longest_delay_s),
    (["async.rollout_timeout_s=12"], 12.0, lambda s: s.rollout_timeout_s),
    (["async.stall_timeout_s=9999"], 9999.0, lambda s: s.stall_timeout_s),
    (["async.save_groups_every_s=5"], 5.0, lambda s: s.save_groups_every_s),
    (["async.save_groups_every_s=null"], None, lambda s: s.save_groups_every_s),
    (["seed=17"], 17, lambda s: s.seed),
    (["evaluation.every=3"], 3, lambda s: s.evaluate_every),
    (["checkpointing.every=4"], 4, lambda s: s.checkpoint_every),
    (["algorithm.group_size=5"], 5, lambda s: s.group_size),
    (["algorithm.steps=21"], 21, lambda s: s.steps),
]
# Of the shell and of a class of one's own; they have tests of their own.
ELSEWHERE = {"grace_s", "gym_restarts", "sampler_options"}


@pytest.mark.parametrize(("words", "wanted", "read"), REACHES, ids=[row[0][-1] for row in REACHES])
def test_every_key_reaches_the_controller(words: list[str], wanted: Any, read: Read) -> None:
    words = ["algorithm.prompts_per_step=10", *words]
    assert read(settings(*words)) == wanted
    assert read(settings(words[0], *words[1:-1])) != wanted, "and it was this key that did it"


def test_no_key_was_forgotten() -> None:
    named = {word.partition("=")[0] for words, _, _ in REACHES for word in words}
    of_async = {name.removeprefix("async.") for name in named if name.startswith("async.")}
    assert of_async | ELSEWHERE == set(Async.model_fields)


def test_the_defaults_of_the_configuration_are_those_that_the_controller_gets() -> None:
    own, training = Async(), config().algorithm
    assert settings() == ControllerSettings(
        steps=training.steps,
        prompts_per_step=training.prompts_per_step,
        group_size=training.group_size,
        max_staleness=1,
        sampler=InOrder(),
        max_running=None,
        retry=RetryPolicy(5, 2, 1.0, 30.0),
        straggler="wait",
        straggler_timeout_s=own.straggler_timeout_s,
        min_batch_fraction=own.min_batch_fraction,
        max_replays=5,
        rollout_timeout_s=own.rollout_timeout_s,
        stall_timeout_s=own.stall_timeout_s,
        evaluate_every=config().evaluation.every,
        checkpoint_every=config().checkpointing.every,
        save_groups_every_s=own.save_groups_every_s,
        seed=config().seed,
    )


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("in_order", InOrder()),
        ("windowed", Windowed(15)),
        ("ready_first", ReadyFirst()),
        ("weight_fifo", WeightFifo()),
    ],
)
def test_samplers_go_by_their_names(name: str, wanted: Any) -> None:
    assert settings(f"async.sampler={name}", "algorithm.prompts_per_step=10").sampler == wanted
    assert name in plan._SAMPLERS, "or nobody would be told of it"


@pytest.mark.parametrize(
    ("steps", "rows", "wanted"),
    # 1.1 * 50 is a little more than 55 in floating point, and a window of 56 is not 1.1 steps.
    [(1, 10, 10), (1.5, 3, 5), (2, 32, 64), (1.1, 50, 55), (1.1, 100, 110), (1.01, 10, 11)],
)
def test_a_window_is_counted_in_whole_rows_and_never_one_too_many(
    steps: float, rows: int, wanted: int
) -> None:
    words = ["async.sampler=windowed", f"async.window_steps={steps}", f"algorithm.prompts_per_step={rows}"]
    assert settings(*words).sampler == Windowed(wanted)


def test_epochs_bound_the_steps_that_are_counted_before_the_first() -> None:
    words = ["algorithm.steps=100", "algorithm.prompts_per_step=4"]
    assert settings(*words, rows=10).steps == 100
    assert settings(*words, "algorithm.max_epochs=3", rows=10).steps == 7, "30 rows are 7 whole steps"
    assert settings(*words, "algorithm.max_epochs=3", rows=1000).steps == 100


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    name = "own_sampler_of_a_test"
    Path(f"{name}.py").write_text(OWN)
    return name


def test_a_sampler_of_ones_own_is_made_with_its_options(own_module: str) -> None:
    word = f"async.sampler={own_module}:Newest"
    found: Any = settings(word, "async.sampler_options={share: 0.5}").sampler
    assert type(found).__name__ == "Newest"
    assert found.share == 0.5
    assert settings(word).sampler.share == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["async.sampler={own}:Lacking"], "Lacking lacks choose"),
        (["async.sampler={own}:Newst"], "did you mean Newest?"),
        (["async.sampler={own}:Newest", "async.sampler_options={{shar: 1}}"], "unexpected keyword"),
        (["async.sampler=no_such_module:Newest"], "there is no module 'no_such_module'"),
        (["async.sampler=in_oder"], "did you mean in_order?"),
        (["async.sampler=windwed"], "did you mean windowed?"),
        (
            ["async.sampler=fastest"],
            "choose one of in_order, windowed, ready_first, weight_fifo, or module:C",
        ),
        (["async.sampler=':'"], "does not exist"),
    ],
)
def test_a_sampler_that_cannot_be_used_is_refused_by_its_key(
    words: list[str], told: str, own_module: str
) -> None:
    found = config(*(word.format(own=own_module) for word in words))
    with pytest.raises(ConfigError) as refused:
        check_settings(found)
    assert told in str(refused.value)
    assert str(refused.value).startswith("async.sampler")


@pytest.mark.parametrize("check", [check_settings, trainer])
def test_what_method_and_loop_refuse_is_refused_before_anything_starts(check: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"algorithm: updates_per_step 2 .* or one update"):
        check(config("algorithm.updates_per_step=2", "algorithm.objective=on_policy"))


def test_what_only_the_loop_refuses_is_told_as_a_fault_of_the_method(monkeypatch) -> None:
    def refuses(*args: Any) -> None:
        raise LoopError("this cannot be meant")

    monkeypatch.setattr(plan, "check_asynchronous", refuses)
    with pytest.raises(ConfigError, match="algorithm: this cannot be meant"):
        check_settings(config())


def test_settings_that_only_the_controller_can_refuse_are_told_as_its_own(monkeypatch) -> None:
    """None does today; a bare ValueError would be a failure of the program and not of its words."""

    def refuses(*args: Any, **options: Any) -> Any:
        raise ValueError("max_running must be odd")

    monkeypatch.setattr(plan, "ControllerSettings", refuses)
    with pytest.raises(ConfigError, match="async: max_running must be odd"):
        check_settings(config())


def test_the_job_is_that_of_grpo_but_for_its_loop() -> None:
    found = config()
    made = trainer(found)
    assert made.phase == "async"
    assert made.loop == Asynchronous(found, controller_settings)


def test_a_configuration_comes_back_from_its_yaml_as_it_was(tmp_path: Path) -> None:
    words = [word for group, _, _ in REACHES for word in group if "null" not in word]
    found = config(*words)
    (tmp_path / "mine.yaml").write_text(to_yaml(found))
    assert load_config(tmp_path / "mine.yaml", model=SingleControllerConfig) == found
