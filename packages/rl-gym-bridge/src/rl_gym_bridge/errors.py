"""The error of everything that reads rows."""

from __future__ import annotations

from pathlib import Path


class DatasetError(ValueError):
    """A file or row that cannot be used.

    Attributes:
        problem: what is wrong.
        path: the file, ``None`` where the row did not come from one.
        line: line in it, counted from 1.
        field: the faulty field, dotted.
        remedy: what to do.
    """

    def __init__(
        self,
        problem: str,
        *,
        path: Path | None = None,
        line: int | None = None,
        field: str | None = None,
        remedy: str,
    ) -> None:
        self.problem = problem
        self.path = path
        self.line = line
        self.field = field
        self.remedy = remedy
        place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        subject = "" if field is None else f"{field}: "
        super().__init__(f"{place}{subject}{problem}; {remedy}")

    def located(self, path: Path, line: int) -> DatasetError:
        """The same error with its place in a file."""
        return DatasetError(self.problem, path=path, line=line, field=self.field, remedy=self.remedy)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.problem, self.path, self.line, self.field, self.remedy)


def _rebuild(
    problem: str, path: Path | None, line: int | None, field: str | None, remedy: str
) -> DatasetError:
    return DatasetError(problem, path=path, line=line, field=field, remedy=remedy)
