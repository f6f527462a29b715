from __future__ import annotations

import os
import signal

import pytest
from rich.console import Console

from rl_app_core.cli import Running, guarded
from rl_app_core.config import ConfigError
from rl_app_core.interrupts import Interrupted, StopRequest, handlers_kept


def test_the_first_signal_is_remembered_and_the_handlers_come_back():
    told: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(told.append) as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
    assert told == ["SIGINT"]
    assert stop.signal_number == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before


def ask_twice(becomes: type[Exception] | None):
    with StopRequest(lambda name: None):
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            if becomes is None:
                raise
            raise becomes("taken for something else") from None


@pytest.mark.parametrize("becomes", [None, RuntimeError, SystemError])
def test_the_second_signal_ends_the_block_whatever_it_becomes_on_the_way(becomes):
    with pytest.raises(Interrupted, match="stopped at once") as stopped:
        ask_twice(becomes)
    assert stopped.value.signal_number == signal.SIGTERM


def test_a_failure_after_one_signal_is_a_failure():
    def fail():
        with StopRequest(lambda name: None):
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("a failure")

    with pytest.raises(ValueError, match="a failure"):
        fail()


def test_a_request_to_stop_is_not_a_failure_to_be_handled():
    assert not issubclass(Interrupted, Exception)


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        ("; continue with: grpo resume X", "interrupted; continue with: grpo resume X\n"),
        ("", "nothing was begun"),
    ],
)
def test_sigterm_before_a_run_can_stop_ends_it_with_a_word(hint, said, capsys):
    before, cleaned = signal.getsignal(signal.SIGTERM), []

    def start():
        with guarded(Console(stderr=True), Running(resume_hint=hint)):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except Exception:
                pytest.fail("taken for a failure")
            finally:
                cleaned.append(True)

    with pytest.raises(SystemExit) as stopped:
        start()
    assert (stopped.value.code, cleaned) == (143, [True])
    assert said in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_handlers_of_a_library_do_not_stay():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with handlers_kept():
        for number in before:
            signal.signal(number, signal.SIG_IGN)
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("algorithm.steps=0: too few"), 2, "error: algorithm.steps=0: too few\n"),
        (Interrupted(signal.SIGTERM, "stopped after step 3"), 143, "stopped after step 3; hint\n"),
        (KeyboardInterrupt(), 130, "interrupted; hint\n"),
    ],
)
def test_every_outcome_has_its_code_and_one_line(error, code, said, capsys):
    with pytest.raises(SystemExit) as stopped, guarded(Console(stderr=True), Running(resume_hint="; hint")):
        raise error
    assert stopped.value.code == code
    assert capsys.readouterr().err == said


def test_a_failure_shows_its_notes_in_one_line_and_keeps_the_story(capsys, tmp_path):
    from rl_app_core.run_directory import RunDirectory

    error = ValueError("no\nmean")
    error.add_note("step 7")
    running = Running(RunDirectory(tmp_path), "; hint")
    with pytest.raises(SystemExit) as stopped, guarded(Console(stderr=True), running):
        raise error from ZeroDivisionError("row 3")
    assert stopped.value.code == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "error: no mean; step 7; hint"
    story = (tmp_path / "logs" / "error.log").read_text()
    assert "ZeroDivisionError: row 3" in story
    assert "ValueError: no" in story
