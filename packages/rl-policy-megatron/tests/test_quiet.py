"""What is known to be harmless is not shown while a call runs, and everything else is."""

from __future__ import annotations

import logging
import warnings

import pytest

from rl_policy_megatron.quiet import quiet_megatron

_LOGGER = logging.getLogger("megatron.core.models.gpt.gpt_model")
_KNOWN = "GPTModel IS DEPRECATED. Use another."


def test_only_known_records_are_dropped_and_only_within(caplog: pytest.LogCaptureFixture) -> None:
    with quiet_megatron(), quiet_megatron():
        _LOGGER.warning(_KNOWN)
        _LOGGER.warning("GPTModel has %d problems", 3)
        logging.getLogger("megatron.core.other").warning(_KNOWN)
    assert caplog.messages == ["GPTModel has 3 problems", _KNOWN]
    with pytest.raises(KeyError), quiet_megatron():
        raise KeyError
    _LOGGER.warning(_KNOWN)
    assert caplog.messages[2:] == [_KNOWN]


def test_only_known_warnings_are_dropped_and_only_within() -> None:
    known, unknown = "absl.logging is not installed. Using logging.", "the disk is full"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet_megatron():
            warnings.warn(known, stacklevel=1)
            warnings.warn(unknown, stacklevel=1)
        warnings.warn(known, stacklevel=1)
    assert [str(warning.message) for warning in caught] == [unknown, known]
