"""SIGTERM ends a command as an interrupt, whatever becomes of its exception on the way."""

from __future__ import annotations

import os
import signal

import pytest

from rl_app_core.interrupts import Interrupted, terminable


def told_to_stop_in_c_code() -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except Interrupted as error:
        raise SystemError("returned a result with an exception set") from error


def test_an_interrupt_that_c_code_turned_into_an_error_is_one_all_the_same():
    with pytest.raises(Interrupted) as caught, terminable():
        told_to_stop_in_c_code()
    assert caught.value.signal_number == signal.SIGTERM


def test_an_error_without_a_signal_stays_what_it_is():
    with pytest.raises(SystemError, match="by itself"), terminable():
        raise SystemError("by itself")
