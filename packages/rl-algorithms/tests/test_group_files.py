"""Finished groups as JSON and on disk: exact, whole or not at all, whatever the disk does."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_algorithms.checkpoint_files import CheckpointCorruptError, CheckpointError
from rl_algorithms.group_files import GroupStore, groups_from_json, groups_to_json
from rl_algorithms.replay import Group, Missing
from rl_gym_bridge.routed_experts import RoutedExperts
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason, Trajectory, Turn

EXPERTS = RoutedExperts("int16", 2, 3, 2, bytes(range(24)))
# The last lone surrogate is what a tokenizer gives for half a character.
TEXT = 'grüße, 東京 👩‍🚀 "quoted" \\ \x00 \u2028 \ud83d'
FORK = Trajectory(
    turns=(Turn((9,), (8, 7), (-1.25, 0.0)),),
    reward=None,
    stop_reason=StopReason.ABORTED,
    group_id="train/3",
    rollout_id="train/3/0",
    weight_versions=(4, 5),
)
SAMPLE = Trajectory(
    turns=(
        # Neighbours of short decimals, a denormal, both zeros: what a text of too few digits would lose.
        Turn(
            (1, 2**40),
            (3, 0, 5, 6),
            (-0.1, math.nextafter(-0.1, 0), -5e-324, -0.0),
            invalid_tool_call=True,
        ),
        Turn((), (), ()),
        Turn((11,), (12,), (-1 / 3,), malformed_thinking=True),
    ),
    reward=0.1 + 0.2,
    stop_reason=StopReason.TOOL_LIMIT,
    group_id="train/3",
    rollout_id="train/3/0",
    agent="calculator",
    weight_versions=(4, 4, 5, 5, 6),
    reward_components={"größe": 1e-300, "format": -0.0},
    metrics={"tool_calls": 3.0, "share": 2 / 3},
    text=TEXT,
    routed_experts=EXPERTS,
    forks=(FORK, replace(FORK, routed_experts=replace(EXPERTS, dtype="uint8", top_k=4))),
)
FAILURE = RolloutFailure("train/3", "train/3/1", "calculator", FailureKind.INFRA, f"went away {{}}: {TEXT}")
MISSING = Missing(2, "its group had waited long enough — für es")
RICH = Group(3, (SAMPLE, FAILURE, MISSING), oldest=4, newest=6, order=17, stragglers=1)


def plain(position: int) -> Group:
    outcome = replace(FORK, text=str(position), reward=float(position))
    failed = replace(FAILURE, kind=FailureKind.DATA, error="no answer")
    return Group(position, (outcome, failed), oldest=1, newest=2, order=position)


def bits(value: float | None) -> bytes | None:
    return None if value is None else struct.pack("<d", value)


def floats(sample: Trajectory) -> list[bytes | None]:
    """Every number of a sample, to the bit: -0.0 == 0.0 says nothing."""
    mine = [
        sample.reward,
        *sample.logprobs,
        *sample.reward_components.values(),
        *sample.metrics.values(),
    ]
    return [bits(value) for value in mine] + [found for fork in sample.forks for found in floats(fork)]


def through_text(groups: list[Group]) -> list[Group]:
    return groups_from_json(json.loads(json.dumps(groups_to_json(groups), allow_nan=False)))


def test_a_group_comes_back_as_it_was_to_the_bit():
    (found,) = through_text([RICH])
    assert found == RICH
    sample = found.outcomes[0]
    assert floats(sample) == floats(SAMPLE)
    assert sample.text.encode("utf-8", "surrogatepass") == TEXT.encode("utf-8", "surrogatepass")
    assert sample.forks[1].routed_experts.data == EXPERTS.data
    assert [type(part) for part in found.outcomes] == [Trajectory, RolloutFailure, Missing]
    assert found.outcomes[1].kind is FailureKind.INFRA
    assert type(sample.turns[0].generation_token_ids[0]) is int, "and not an integer of numpy"
    assert sample.turns[0].invalid_tool_call is True


def test_what_is_not_there_stays_not_there():
    """None is no reward of 0, no experts are not empty ones, unknown versions are not versions 0."""
    bare = Trajectory((Turn((), (1,), (0.0,)),), None, StopReason.STOP, "g", "r")
    (found,) = through_text([Group(0, (bare,), 0, 0, 0)])
    assert found.outcomes == (bare,)
    assert found.outcomes[0].reward is None
    assert found.outcomes[0].routed_experts is None


def test_seeded_samples_of_every_size_come_back():
    chance = random.Random(5)
    for position in range(40):
        outcomes = []
        for index in range(chance.randrange(1, 4)):
            count = chance.choice((0, 1, 2, 300))
            tokens = tuple(chance.randrange(2**31) for _ in range(count))
            logprobs = tuple(-chance.expovariate(1.0) for _ in tokens)
            turns = (Turn(tokens[:7], tokens, logprobs),) * chance.randrange(1, 3)
            versions = tuple(chance.randrange(9) for _ in range(count * len(turns)))
            outcomes.append(
                Trajectory(
                    turns,
                    chance.uniform(-1, 1),
                    chance.choice(list(StopReason)),
                    f"train/{position}",
                    f"train/{position}/{index}",
                    weight_versions=versions,
                )
            )
        group = Group(position, tuple(outcomes), 1, 2, chance.randrange(99))
        (found,) = through_text([group])
        assert found == group
        assert [floats(one) for one in found.outcomes] == [floats(one) for one in outcomes]


def test_what_is_no_outcome_is_refused_when_it_is_written_and_not_when_it_is_needed():
    with pytest.raises(TypeError, match="a str is no outcome of a rollout"):
        groups_to_json([Group(0, ("odd",), 0, 0, 0)])


@pytest.mark.parametrize(
    "content", [{}, {"format": 1}, {"format": 1, "groups": 3}, {"format": 2, "groups": []}]
)
def test_another_form_is_refused_with_the_remedy(content: dict[str, Any]):
    with pytest.raises(CheckpointCorruptError, match="resume with the version that wrote them"):
        groups_from_json(content)


class Store:
    """A store in a fresh folder, and what it told."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.told: list[str] = []
        self.store = GroupStore(directory, on_ignored=self.told.append)

    def folder(self, anchor: int = 5) -> Path:
        return self.directory / f"after_{anchor}"

    def names(self, anchor: int = 5) -> list[str]:
        return sorted(path.name for path in self.folder(anchor).iterdir())

    def positions(self, anchor: int = 5) -> list[int]:
        return [group.position for group in self.store.read(anchor)]


@pytest.fixture
def kept(tmp_path: Path) -> Store:
    return Store(tmp_path / "run" / "groups")


def test_parts_are_read_in_the_order_in_which_they_were_written(kept: Store):
    order = [*range(30, 18, -1)]
    for position in order:
        kept.store.write(5, [plain(position), plain(position + 100)])
    kept.store.write(6, [plain(1)])
    assert kept.positions() == [n for position in order for n in (position, position + 100)]
    assert kept.positions(6) == [1]
    assert kept.told == []
    # Another process goes on where the first one was.
    again = Store(kept.directory)
    again.store.write(5, [plain(99)])
    assert again.positions() == [*kept.positions()[:-1], 99]
    assert len(kept.names()) == len(order) + 1


def test_nothing_is_ever_written_over(kept: Store):
    for position in range(3):
        kept.store.write(5, [plain(position)])
    (kept.folder() / "part_00000001.json").unlink()
    kept.store.write(5, [plain(3)])
    assert kept.positions() == [0, 2, 3]


def test_what_was_never_written_is_empty(kept: Store):
    assert kept.store.read(5) == []
    kept.store.keep_only(5)
    assert not kept.directory.exists(), "reading makes nothing"


def test_only_what_belongs_to_the_checkpoint_is_kept(kept: Store):
    for anchor in (0, 4, 5, 15, 50):
        kept.store.write(anchor, [plain(anchor)])
    others = ["after_05", "after_", "after_-1", "before_5", "notes"]
    for name in others:
        (kept.directory / name).mkdir()
    kept.store.keep_only(5)
    assert sorted(path.name for path in kept.directory.iterdir()) == sorted(["after_5", *others])
    assert kept.positions() == [5]
    kept.store.keep_only(-1)
    assert sorted(path.name for path in kept.directory.iterdir()) == sorted(others), "a new run keeps none"


def sealed(body: str) -> str:
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body})


def removable(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of the written form; the names inside these two are an environment's own."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield content, key
            if key not in ("metrics", "reward_components"):
                yield from removable(value)
    elif isinstance(content, list):
        for value in content:
            yield from removable(value)


def a_flipped_bit(text: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(text)
    damaged[chance.randrange(len(text))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


def another_byte(text: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(text)
    damaged[chance.randrange(len(text))] = chance.randrange(256)
    return bytes(damaged)


def cut_off(text: bytes, chance: random.Random) -> bytes:
    return text[: chance.randrange(len(text))]


def a_hole(text: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(text))
    return text[:start] + b"\0" * min(64, len(text) - start) + text[start + 64 :]


def a_field_less_outside(text: bytes, chance: random.Random) -> bytes:
    content = json.loads(text)
    del content[chance.choice(["sha256", "body"])]
    return json.dumps(content).encode()


def a_field_less_inside(text: bytes, chance: random.Random) -> bytes:
    """With a hash that is right: what a version wrote that knew the field not yet."""
    content = json.loads(json.loads(text)["body"])
    container, key = chance.choice(list(removable(content)))
    del container[key]
    return sealed(json.dumps(content)).encode()


def another_format(text: bytes, chance: random.Random) -> bytes:
    content = json.loads(json.loads(text)["body"])
    content["format"] = chance.choice([0, 2, "1", None])
    return sealed(json.dumps(content)).encode()


def another_outcome(text: bytes, chance: random.Random) -> bytes:
    content = json.loads(json.loads(text)["body"])
    chance.choice(content["groups"])["outcomes"][0] = chance.choice(
        [{}, {"guess": {}}, None, [], 3, "sample"]
    )
    return sealed(json.dumps(content)).encode()


def something_else(text: bytes, chance: random.Random) -> bytes:
    return chance.choice([b"", b"[]", b"null", b"3", b'"body"', b'{"sha256": 1, "body": 2}', b"\xff\xfe\x00"])


def is_the_same(damaged: bytes, whole: bytes) -> bool:
    """A line end in place of the blank after a colon is no damage."""
    try:
        return json.loads(damaged) == json.loads(whole)
    except ValueError:
        return False


DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    a_flipped_bit,
    another_byte,
    cut_off,
    a_hole,
    a_field_less_outside,
    a_field_less_inside,
    another_format,
    another_outcome,
    something_else,
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_part_is_passed_over_and_told_of_and_costs_no_other(damage, kept: Store):
    """34 seeded damages of each kind, 306 in all, to a part of two groups between two that are whole."""
    kept.store.write(5, [plain(1)])
    kept.store.write(5, [plain(2), RICH])
    kept.store.write(5, [plain(4)])
    part = kept.folder() / "part_00000001.json"
    whole = part.read_bytes()
    for seed in range(34):
        chance = random.Random(f"{damage.__name__} {seed}")
        damaged = whole
        while is_the_same(damaged, whole):
            damaged = damage(whole, chance)
        part.write_bytes(damaged)
        kept.told.clear()
        assert kept.positions() == [1, 4], f"seed {seed}: never half of it"
        (line,) = kept.told
        assert line.startswith(f"ignoring the damaged {part}: "), seed
        assert line.endswith("; its rows are played again")
        assert "\n" not in line
    part.write_bytes(whole)
    assert kept.positions() == [1, 2, 3, 4], "and it was the damage"


def test_every_field_is_needed(kept: Store):
    """Not a seeded choice: all of them, one at a time."""
    kept.store.write(5, [RICH])
    part = kept.folder() / "part_00000000.json"
    body = json.loads(part.read_text())["body"]
    count = len(list(removable(json.loads(body))))
    assert count > 50
    for number in range(count):
        content = json.loads(body)
        container, key = list(removable(content))[number]
        del container[key]
        part.write_text(sealed(json.dumps(content)))
        assert kept.store.read(5) == [], f"{key} of {sorted(container)}"
    assert len(kept.told) == count


def test_a_part_that_cannot_be_opened_is_passed_over_as_well(kept: Store):
    kept.store.write(5, [plain(1)])
    (kept.folder() / "part_00000001.json").mkdir()
    (kept.folder() / "part_00000002.json").symlink_to("nowhere")
    kept.store.write(5, [plain(4)])
    assert kept.positions() == [1, 4]
    assert len(kept.told) == 2


def test_what_is_no_part_is_not_looked_at(kept: Store):
    kept.store.write(5, [plain(1)])
    for name in (".part_00000001.json.0a1b2c3d", "part_1.json", "part_00000001.json.old", "notes.txt"):
        (kept.folder() / name).write_text("half written")
    assert kept.positions() == [1]
    assert kept.told == []


def failing(number: int, *, when: Callable[..., bool] = lambda *_: True, then: Any = None) -> Any:
    """In place of a function: an OSError where ``when`` says so, else ``then``."""

    def call(*args: Any, **options: Any) -> Any:
        if when(*args):
            raise OSError(number, os.strerror(number))
        return then(*args, **options)

    return call


def break_the_writing(monkeypatch: pytest.MonkeyPatch, where: str, number: int) -> None:
    match where:
        case "open":
            temporary = lambda path, *_: path.name.startswith(".part_")  # noqa: E731
            monkeypatch.setattr(Path, "open", failing(number, when=temporary, then=Path.open))
        case "write":
            real = Path.open

            def opened(path: Path, *args: Any, **options: Any) -> Any:
                handle = real(path, *args, **options)
                if path.name.startswith(".part_"):
                    handle.write("{")
                    handle.flush()
                    handle.write = failing(number)
                return handle

            monkeypatch.setattr(Path, "open", opened)
        case "flush":
            monkeypatch.setattr(os, "fsync", failing(number))
        case "rename":
            monkeypatch.setattr(os, "rename", failing(number))
        case "folder":
            monkeypatch.setattr(Path, "mkdir", failing(number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("where", ["open", "write", "flush", "rename", "folder"])
def test_a_disk_that_fails_is_a_checkpoint_error_and_takes_nothing_with_it(
    where: str, number: int, kept: Store, monkeypatch: pytest.MonkeyPatch
):
    kept.store.write(5, [plain(1)])
    with monkeypatch.context() as broken:
        break_the_writing(broken, where, number)
        with pytest.raises(CheckpointError, match=r"after step 5 .* cannot be written") as refused:
            kept.store.write(5, [plain(2)])
    assert isinstance(refused.value.__cause__, OSError), "the first cause is kept"
    assert refused.value.__cause__.errno == number
    assert os.strerror(number) in str(refused.value)
    assert kept.names() == ["part_00000000.json"], "neither half a part nor a temporary file"
    assert kept.positions() == [1]
    kept.store.write(5, [plain(3)])
    assert kept.positions() == [1, 3], "and it goes on when the disk does"
    assert kept.told == []


def test_a_folder_whose_entries_cannot_be_made_durable_is_an_error_too(kept: Store, monkeypatch):
    """The part may be there; nobody may rely on it."""
    kept.store.write(5, [plain(1)])
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", failing(errno.EIO, when=lambda fd: os.path.isdir(f"/proc/self/fd/{fd}"), then=real)
    )
    with pytest.raises(CheckpointError, match="cannot be written"):
        kept.store.write(5, [plain(2)])
    assert kept.positions() == [1, 2]


def test_a_part_is_on_disk_before_it_has_its_name_and_its_name_before_anyone_is_told(kept, monkeypatch):
    happened: list[str] = []
    sync, rename = os.fsync, os.rename

    def seen_sync(descriptor: int) -> None:
        happened.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split(".json")[0])
        sync(descriptor)

    def seen_rename(source: Path, target: Path) -> None:
        happened.append(f"rename {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", seen_sync)
    monkeypatch.setattr(os, "rename", seen_rename)
    kept.store.write(5, [plain(1)])
    assert happened == [
        "sync .part_00000000",
        "rename part_00000000.json",
        "sync after_5",
        "sync groups",
    ]


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_number_that_json_cannot_hold_is_refused_by_the_same_error(odd: float, kept: Store):
    """An environment of one's own may report it; what was there stays, and no part is half there."""
    kept.store.write(5, [plain(1)])
    strange = replace(FORK, metrics={"speed": odd})
    with pytest.raises(CheckpointError, match="after step 5"):
        kept.store.write(5, [Group(2, (strange,), 0, 0, 0)])
    assert kept.names() == ["part_00000000.json"]
