from __future__ import annotations

import pickle

import pytest

from rl_actor_envs.errors import ActorEnvironmentError, UndeclaredExtraError, UnknownActorError
from rl_actor_envs.registry import ActorRegistry, shared_registry
from rl_actor_envs.table import ACTOR_ENVIRONMENTS


def test_the_shared_registry_holds_the_table() -> None:
    for actor, extras in ACTOR_ENVIRONMENTS.items():
        assert shared_registry().extras_of(actor) == (None if extras is None else tuple(extras))
    assert shared_registry() is shared_registry()


def test_undeclared_extras_are_rejected_when_the_registry_is_built_naming_actor_and_extra() -> None:
    with pytest.raises(UndeclaredExtraError, match=r"a\.C .*'cuda'.*declared: mcore, gym") as caught:
        ActorRegistry({"a.B": ["mcore"], "a.C": ["mcore", "cuda"]}, declared=("mcore", "gym"))
    assert caught.value.actor == "a.C"


def test_undeclared_extras_are_rejected_on_registration_and_leave_no_trace() -> None:
    registry = ActorRegistry({})
    with pytest.raises(UndeclaredExtraError, match=r"a\.B .*'cuda'"):
        registry.register("a.B", ["cuda"])
    with pytest.raises(UnknownActorError):
        registry.extras_of("a.B")


def test_out_of_repository_actors_register_and_keep_their_order_of_extras() -> None:
    registry = ActorRegistry()
    registry.register("mine.workers.Judge", ["vllm", "mcore"])
    registry.register("mine.workers.Plain", None)
    registry.register("mine.workers.Judge", ["vllm", "mcore"])
    assert registry.extras_of("mine.workers.Judge") == ("vllm", "mcore")
    assert registry.extras_of("mine.workers.Plain") is None


@pytest.mark.parametrize("other", [None, ["mcore", "vllm"], ["vllm"], []])
def test_one_actor_has_one_environment(other: list[str] | None) -> None:
    registry = ActorRegistry({"a.B": ["vllm", "mcore"], "a.None": None})
    with pytest.raises(ActorEnvironmentError, match=r"a\.B is already registered"):
        registry.register("a.B", other)
    with pytest.raises(ActorEnvironmentError, match=r"a\.None is already registered"):
        registry.register("a.None", [])


def test_later_changes_of_the_callers_list_change_nothing() -> None:
    extras = ["vllm"]
    registry = ActorRegistry({"a.B": extras})
    extras.append("mcore")
    assert registry.extras_of("a.B") == ("vllm",)


@pytest.mark.parametrize("name", ["", "Worker", "a..B", "a.b.<locals>.C", "a/b.C", "a.B "])
def test_names_that_are_no_full_class_names_are_refused(name: str) -> None:
    with pytest.raises(ActorEnvironmentError, match="full name"):
        ActorRegistry({}).register(name, None)


def test_extras_given_as_one_string_are_refused() -> None:
    with pytest.raises(ActorEnvironmentError, match=r"write \['vllm'\]"):
        ActorRegistry({}).register("a.B", "vllm")


def test_an_unknown_actor_is_an_error_with_a_suggestion() -> None:
    registry = ActorRegistry({"rl_app_core.workers.ColocatedWorker": ["mcore"]})
    with pytest.raises(
        UnknownActorError, match=r"did you mean 'rl_app_core\.workers\.ColocatedWorker'"
    ) as caught:
        registry.extras_of("rl_app_core.worker.ColocatedWorker")
    assert caught.value.actor == "rl_app_core.worker.ColocatedWorker"
    with pytest.raises(UnknownActorError) as far_off:
        registry.extras_of("x.Y")
    assert "did you mean" not in str(far_off.value)
    assert "register_actor_environment" in str(far_off.value)


def test_errors_keep_class_message_and_actor_across_processes() -> None:
    error = pickle.loads(pickle.dumps(UnknownActorError("text", actor="a.B")))
    assert (type(error), str(error), error.actor) == (UnknownActorError, "text", "a.B")
