"""The asynchronous controller: a state machine that overlaps rollouts and training. Events in, commands out.

It has no threads, no clock of its own and no idea what a rollout is; an application carries its commands out.
"""

from .commands import Abort, Cancel, Command, Evaluate, Finish, Publish, Save, SaveGroups, Start, Train, Try
from .errors import ControllerError, StalledError
from .events import (
    Begin,
    Evaluated,
    Event,
    GroupsSaved,
    Published,
    RolloutEnded,
    Saved,
    StopRequested,
    Tick,
    Trained,
)
from .machine import Controller
from .samplers import InOrder, ReadyFirst, Sampler, WeightFifo, Windowed
from .settings import ControllerSettings, RetryPolicy, StragglerPolicy
from .snapshot import Counters, Snapshot, SnapshotError

__all__ = [
    "Abort",
    "Begin",
    "Cancel",
    "Command",
    "Controller",
    "ControllerError",
    "ControllerSettings",
    "Counters",
    "Evaluate",
    "Evaluated",
    "Event",
    "Finish",
    "GroupsSaved",
    "InOrder",
    "Publish",
    "Published",
    "ReadyFirst",
    "RetryPolicy",
    "RolloutEnded",
    "Sampler",
    "Save",
    "SaveGroups",
    "Saved",
    "Snapshot",
    "SnapshotError",
    "StalledError",
    "Start",
    "StopRequested",
    "StragglerPolicy",
    "Tick",
    "Train",
    "Trained",
    "Try",
    "WeightFifo",
    "Windowed",
]
