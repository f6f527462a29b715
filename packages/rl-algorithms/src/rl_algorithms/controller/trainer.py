"""What the policy is busy with: one thing at a time, in one order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..replay import Group
from .commands import Evaluate, Publish, Save, Train
from .errors import ControllerError
from .events import Begin, Evaluated
from .settings import ControllerSettings

_Task = Train | Publish | Evaluate | Save


class TrainerWork:
    """Train, publish, evaluate, save; then train again.

    New weights are published first of all: rollouts go on with them while they are measured and saved.

    Args:
        settings: of the run.
        version: trained steps so far.

    Attributes:
        version: trained steps.
        served: version that the engine samples from; -1 before it was given any.
        last_saved: version of the newest checkpoint; ``None`` if there is none.
        saved_serial: groups with smaller serials were in the controller when that was written.
    """

    def __init__(self, settings: ControllerSettings, version: int) -> None:
        self._settings = settings
        self.version = version
        self.served = -1
        self.last_saved: int | None = None
        self.saved_serial = 0
        self._doing: _Task | None = None
        self._todo: deque[_Task] = deque()
        self._asked_serial = 0
        self._begun = self._reached = self._stopping = False

    @property
    def idle(self) -> bool:
        """Whether a step may be trained now."""
        return self._begun and self._doing is None and not self._todo

    @property
    def done(self) -> bool:
        """Whether no step is left to train."""
        return self._reached or self.version >= self._settings.steps

    @property
    def is_saving(self) -> bool:
        return isinstance(self._doing, Save)

    def begin(self, event: Begin) -> None:
        """Everything has started."""
        if self._begun:
            raise ControllerError("the controller was told twice to begin")
        self._begun = True
        self._todo.append(Publish(self.version))
        if not event.measured:
            self._todo.append(Evaluate(self.version))
        if event.saved:
            self.last_saved = self.version
        else:
            self._todo.append(Save(self.version))

    def stop(self) -> None:
        """Do nothing further but save what is not saved."""
        self._stopping = True
        self._todo.clear()
        self._save_what_is_not()

    def train(self, groups: Sequence[Group]) -> Train:
        """The next step's command."""
        task = Train(self.version + 1, tuple(groups))
        self._doing = task
        return task

    def next_task(self, serial: int) -> Publish | Evaluate | Save | None:
        """What else is to be done now; ``serial`` of the next group that is finished."""
        if self._doing is not None or not self._todo:
            return None
        task = self._todo.popleft()
        assert not isinstance(task, Train)
        if isinstance(task, Save):
            self._asked_serial = serial
        self._doing = task
        return task

    def trained(self, version: int) -> None:
        self._done(Train, version)
        self.version = version
        if self._stopping:
            self._save_what_is_not()
            return
        last = version >= self._settings.steps
        self._todo.append(Publish(version))
        if last or self._settings.evaluates(version):
            self._todo.append(Evaluate(version))
        if last or _due(version, self._settings.checkpoint_every):
            self._todo.append(Save(version))

    def published(self, version: int) -> None:
        self._done(Publish, version)
        self.served = version

    def evaluated(self, event: Evaluated) -> None:
        self._done(Evaluate, event.version)
        if event.reached:
            self._reached = True
            self._save_what_is_not()

    def saved(self, version: int) -> None:
        self._done(Save, version)
        self.last_saved, self.saved_serial = version, self._asked_serial

    def describe(self) -> str:
        if self._doing is None:
            return "waits for groups" if self._begun else "has not begun"
        return f"does {type(self._doing).__name__.lower()} {self._doing.version}"

    def _save_what_is_not(self) -> None:
        pending = any(isinstance(task, Save) for task in (*self._todo, self._doing))
        busy = isinstance(self._doing, Train)
        if self._begun and not pending and not busy and self.last_saved != self.version:
            self._todo.append(Save(self.version))

    def _done(self, kind: type[_Task], version: int) -> None:
        if not isinstance(self._doing, kind) or self._doing.version != version:
            raise ControllerError(
                f"the trainer hears that {kind.__name__.lower()} {version} is done, but it {self.describe()}"
            )
        self._doing = None


def _due(version: int, every: int) -> bool:
    return every > 0 and version % every == 0
