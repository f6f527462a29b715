from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from rl_algorithms.checkpoint_files import read_json, write_json
from rl_algorithms.checkpointing import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointStore,
)


def save(store: CheckpointStore, step: int, score: float | None = None) -> None:
    with store.write(step, score=score) as folder:
        write_json(folder / "state.json", {"step": step})
        (folder / "policy").mkdir()
        (folder / "policy" / "model.safetensors").write_bytes(bytes([step]) * 1000)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def entries(store: CheckpointStore) -> list[str]:
    return sorted(entry.name for entry in store.directory.iterdir())


def test_what_is_written_comes_back(store):
    assert store.latest() is None
    save(store, 0)
    save(store, 3)
    found = store.latest()
    assert (found.step, found.path) == (3, store.path_of(3))
    assert read_json(found.path / "state.json") == {"step": 3}
    assert store.load(0).step == 0
    assert entries(store) == ["step_0", "step_3"]
    manifest = read_json(found.path / "manifest.json")
    assert manifest["format"] == 1
    assert manifest["files"]["policy/model.safetensors"]["bytes"] == 1000


def test_h6_side_folders_are_ignored_and_left_alone(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    for name in ("step_10-hf", "step_11-hf", "step_x", "step_010", "step_", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_12").write_text("a file")
    save(store, 9)
    save(store, 10)
    assert store.latest().step == 10
    assert store.steps() == [10]
    side = ["other", "step_", "step_010", "step_10-hf", "step_11-hf", "step_12", "step_x"]
    assert entries(store) == sorted([*side, "step_10"])


def damage_missing_manifest(path):
    (path / "manifest.json").unlink()


def damage_half_a_manifest(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text[: len(text) // 2])


def damage_truncated_file(path):
    (path / "policy" / "model.safetensors").write_bytes(b"short")


def damage_flipped_byte(path):
    (path / "policy" / "model.safetensors").write_bytes(bytes([6]) * 999 + b"!")


def damage_missing_file(path):
    (path / "state.json").unlink()


def damage_wrong_step(path):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "step": 4}))


def damage_escaping_name(path):
    manifest = json.loads((path / "manifest.json").read_text())
    other = json.loads((path.parent / "step_4" / "manifest.json").read_text())
    manifest["files"]["../step_4/state.json"] = other["files"]["state.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES)
def test_h8_latest_is_the_newest_complete_one(store, damage):
    save(store, 4)
    save(store, 6)
    damage(store.path_of(6))
    assert store.latest().step == 4
    with pytest.raises(CheckpointCorruptError, match="step_6"):
        store.load(6)
    assert store.path_of(6).is_dir(), "a damaged checkpoint is left for people to look at"


def test_h7_a_damaged_folder_does_not_block_the_next_save(store):
    save(store, 2)
    save(store, 4)
    damage_missing_manifest(store.path_of(4))
    save(store, 4)
    assert store.latest().step == 4
    kept = [name for name in entries(store) if name.startswith(".incomplete-step_4-")]
    assert len(kept) == 1
    assert (store.directory / kept[0] / "state.json").exists()


def test_h8_a_step_with_flipped_bytes_can_be_written_again(store):
    """A run that fell back to the older checkpoint gets here again, and must be able to save."""
    save(store, 2)
    save(store, 4)
    damage_flipped_byte(store.path_of(4))
    again = CheckpointStore(store.directory)
    assert again.latest().step == 2
    save(again, 4)
    assert again.latest().step == 4
    kept = [name for name in entries(store) if name.startswith(".incomplete-step_4-")]
    assert len(kept) == 1, "the damaged one stays for people to look at"


def test_h8_the_caller_is_told_once_of_each_damaged_checkpoint_in_one_line(store, caplog):
    for step in (1, 2, 3):
        save(store, step)
    damage_flipped_byte(store.path_of(3))
    damage_half_a_manifest(store.path_of(2))
    told = []
    other = CheckpointStore(store.directory, on_ignored=told.append)
    assert other.latest().step == 1
    assert other.latest().step == 1
    assert [line.split(":")[0] for line in told] == [
        "ignoring the damaged checkpoint step_3",
        "ignoring the damaged checkpoint step_2",
    ]
    assert "model.safetensors does not have the content that was written" in told[0]
    assert not any("\n" in line for line in told)
    assert [record.getMessage() for record in caplog.records] == told


def test_h9_another_format_is_an_error_not_an_older_checkpoint(store):
    save(store, 1)
    save(store, 2)
    manifest = json.loads((store.path_of(2) / "manifest.json").read_text())
    (store.path_of(2) / "manifest.json").write_text(json.dumps({**manifest, "format": 7}))
    with pytest.raises(CheckpointFormatError, match="format 7, this version reads 1"):
        store.latest()


def killed_child(action, moment: int) -> bool:
    """Run ``action`` in a forked process that dies at its ``moment``-th flush, rename or deletion."""
    pid = os.fork()
    if pid == 0:
        calls = 0

        def dying(real):
            def call(*args, **kwargs):
                nonlocal calls
                if calls == moment:
                    os._exit(9)
                calls += 1
                return real(*args, **kwargs)

            return call

        for name in ("fsync", "rename", "unlink", "rmdir", "mkdir"):
            setattr(os, name, dying(getattr(os, name)))
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9)
    return code == 9


def test_h10_whenever_it_is_killed_a_checkpoint_is_loadable(tmp_path):
    """keep=1: the only older checkpoint may go only after the new one is there."""
    moment, seen = 0, set()
    while True:
        store = CheckpointStore(tmp_path / str(moment), keep=1)
        save(store, 1)
        died = killed_child(lambda store=store: save(store, 2), moment)
        survivor = store.latest()
        assert survivor is not None, f"nothing loadable after a kill at moment {moment}"
        seen.add(survivor.step)
        save(store, 3)
        assert store.latest().step == 3
        assert entries(store) == ["step_3"], "what a dead writer left is swept by the next save"
        if not died:
            break
        moment += 1
    assert seen == {1, 2}
    assert moment > 8


def test_left_overs_of_a_dead_writer_go_and_of_a_live_one_stay(store):
    save(store, 1)
    host, live = socket.gethostname(), os.getpid()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    for name in (f"{host}-{pid}", f"{host}-{live}", f"elsewhere-{pid}"):
        (store.directory / f".writing-step_2-{name}-0123abcd").mkdir()
    save(store, 2)
    assert entries(store) == [
        *sorted([f".writing-step_2-elsewhere-{pid}-0123abcd", f".writing-step_2-{host}-{live}-0123abcd"]),
        "step_1",
        "step_2",
    ]


def test_retention_keeps_the_newest_and_never_counts_damaged_ones(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        save(store, step)
    damage_truncated_file(store.path_of(3))
    save(store, 4)
    assert store.steps() == [2, 3, 4]
    save(store, 5)
    assert store.steps() == [3, 4, 5]


@pytest.mark.parametrize("same_process", [True, False])
def test_retention_never_counts_a_checkpoint_with_flipped_bytes(tmp_path, same_process):
    """keep=2 with a damaged one in between: deleting step 1 would leave nothing to fall back to."""
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    save(store, 2)
    damaged = store.path_of(2) / "policy" / "model.safetensors"
    damage_flipped_byte(store.path_of(2))
    os.utime(damaged, ns=(0, 0))
    store = store if same_process else CheckpointStore(tmp_path, keep=2)
    save(store, 3)
    assert store.steps() == [1, 2, 3]
    damage_truncated_file(store.path_of(3))
    assert store.latest().step == 1


def test_retention_does_not_count_a_damaged_later_one(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 3)
    save(store, 6)
    damage_flipped_byte(store.path_of(6))
    again = CheckpointStore(tmp_path, keep=2)
    save(again, 4)
    assert again.steps() == [3, 4, 6]
    assert again.latest().step == 4


def test_retention_reads_no_checkpoint_that_this_process_wrote(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr("rl_algorithms.checkpointing.verify", lambda path, **options: read.append(path.name))
    store = CheckpointStore(tmp_path, keep=3)
    monkeypatch.setattr(store, "_is_complete", lambda step, **options: read.append(step))
    for step in (1, 2, 3):
        save(store, step)
    assert read == [1, 2, 3], "only the question whether the step is there already"


def test_a_failing_writer_publishes_nothing(store):
    save(store, 1)

    def fail() -> None:
        with store.write(2) as folder:
            (folder / "state.json").write_text("{}")
            raise RuntimeError("the policy could not be saved")

    with pytest.raises(RuntimeError, match="could not be saved"):
        fail()
    assert entries(store) == ["step_1"]


def test_a_complete_step_is_not_overwritten(store):
    save(store, 1)
    with pytest.raises(CheckpointError, match="step_1 is complete already"):
        save(store, 1)


@pytest.mark.parametrize(
    ("name", "message"), [("model.pt", "only .json, .safetensors"), ("manifest.json", "belongs to the store")]
)
def test_only_safe_formats_are_stored(store, name, message):
    def write() -> None:
        with store.write(1) as folder:
            (folder / name).write_bytes(b"x")

    with pytest.raises(CheckpointError, match=message):
        write()
    assert entries(store) == []


def test_links_and_empty_checkpoints_are_refused(store, tmp_path):
    (tmp_path / "outside.json").write_text("{}")

    def write(link: Path | None) -> None:
        with store.write(1) as folder:
            if link is not None:
                (folder / "linked.json").symlink_to(link)

    with pytest.raises(CheckpointError, match=r"linked\.json, which is not a regular file"):
        write(tmp_path / "outside.json")
    with pytest.raises(CheckpointError, match=r"linked\.json, which is not a regular file"):
        write(tmp_path)
    with pytest.raises(CheckpointError, match="is empty"):
        write(None)


def test_an_unwritable_place_is_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as caught:
        save(CheckpointStore(tmp_path / "file"), 1)
    assert isinstance(caught.value.__cause__, OSError)


def test_json_refuses_what_it_cannot_hold(tmp_path):
    for content in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises(CheckpointError, match=r"state\.json cannot be written as JSON"):
            write_json(tmp_path / "state.json", content)
    with pytest.raises(CheckpointError, match="keep must be at least 1"):
        CheckpointStore(tmp_path, keep=0)


@pytest.mark.parametrize(("lower", "scores"), [(False, (0.8, 0.9, 0.9)), (True, (0.9, 0.8, 0.8))])
def test_h4_of_equally_good_checkpoints_the_later_is_the_best(tmp_path, lower, scores):
    store = CheckpointStore(tmp_path, lower_is_better=lower)
    assert store.best() is None
    for step, score in zip((10, 20, 30), scores, strict=True):
        save(store, step, score)
    assert store.best().step == 30
    (store.path_of(30) / "state.json").write_text("{}")
    assert store.best().step == 20, "a damaged one is no best"


def test_h5_the_best_stay_beside_the_newest_where_scores_are_missing(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, keep_best=3)
    for step in range(1, 7):
        save(store, step, {2: 0.5, 4: 0.1}.get(step))
    assert store.steps() == [2, 4, 6]


def test_only_so_many_of_the_best_stay(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, keep_best=1)
    for step, score in enumerate((0.2, 0.9, 0.9, 0.3, 0.1), start=1):
        save(store, step, score)
    assert store.steps() == [3, 5]
    again = CheckpointStore(tmp_path, keep=1, keep_best=1)
    save(again, 6, 0.95)
    assert again.steps() == [6], "scores are on disk, and one checkpoint may be newest and best"
    with pytest.raises(CheckpointError, match="keep_best"):
        CheckpointStore(tmp_path, keep_best=-1)
    with pytest.raises(CheckpointError, match="JSON"):
        save(again, 7, float("nan"))
