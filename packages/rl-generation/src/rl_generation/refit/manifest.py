"""What a refit announces, what an engine expects, and the tally of what has come."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from typing import Protocol

import torch

from ..failures import RefitError
from ..protocol import RefitSpec, RefitTensor
from .buckets import announced, dtype_name
from .contract import Bucket, RefitAck, manifest_digest

TIED_HEAD = frozenset({"lm_head.weight"})
"""What a model whose head is its embedding may leave out."""

_NAMED = 3


class Described(Protocol):
    """Whatever has a tensor's name, shape and dtype; a policy's own type will do."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


def spec_of(entries: Iterable[Described]) -> RefitSpec:
    """An announcement from a policy's own description of its tensors.

    Raises:
        RefitError: a name comes twice.
    """
    tensors = tuple(RefitTensor(entry.name, tuple(entry.shape), entry.dtype) for entry in entries)
    _by_name("refit", tensors)
    return RefitSpec(tensors)


def spec_of_tensors(stream: Iterable[tuple[str, torch.Tensor]]) -> RefitSpec:
    """An announcement from the tensors themselves.

    Raises:
        RefitError: a name comes twice.
    """
    return spec_of(RefitTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in stream)


def require_fit(
    spec: RefitSpec,
    expected: Iterable[Described],
    *,
    component: str,
    optional: Collection[str] = (),
    cast: bool = False,
) -> None:
    """Compare an announcement with what an engine expects.

    Args:
        spec: the announcement.
        expected: every tensor of the engine's model, in HF layout.
        component: name that errors begin with.
        optional: names that may be announced or not, whether or not ``expected`` has them; :data:`TIED_HEAD`
            where the model's configuration ties its embeddings, and only there.
        cast: whether another floating dtype will do, because the engine converts what it loads.

    Raises:
        RefitError: names are missing or unknown, or a shape or dtype differs; says what was expected.
    """
    wanted = {entry.name: entry for entry in expected}
    given = _by_name(component, spec.tensors)
    missing = [name for name in wanted if name not in given and name not in optional]
    if missing:
        raise RefitError(
            f"{component}: the announcement lacks {_few(missing)}; expected all {len(wanted)} tensors of the "
            "model, in HF layout"
        )
    unknown = [name for name in given if name not in wanted and name not in optional]
    if unknown:
        raise RefitError(
            f"{component}: the announcement has {_few(unknown)}, which the model has not; expected the "
            f"{len(wanted)} tensors of the model, in HF layout"
        )
    for name, tensor in given.items():
        if name in wanted:
            _require_same(component, tensor, wanted[name], cast=cast)


class Tally:
    """Announced tensors, crossed off as they come.

    Args:
        component: name that errors begin with.
        spec: the announcement.

    Raises:
        RefitError: the announcement is empty, or a name comes twice.
    """

    def __init__(self, component: str, spec: RefitSpec) -> None:
        if not spec.tensors:
            raise RefitError(f"{component}: a refit was announced without a tensor; expected a whole model")
        self._component = component
        self._announced = _by_name(component, spec.tensors)
        self._came: dict[str, RefitTensor] = {}

    def check(self, tensors: Iterable[RefitTensor]) -> None:
        """Refuse what was not announced, differs from its announcement, or has come already.

        Raises:
            RefitError: names the tensor and what was expected.
        """
        seen: set[str] = set()
        for tensor in tensors:
            expected = self._announced.get(tensor.name)
            if expected is None:
                raise RefitError(
                    f"{self._component}: {tensor.name}: not announced; expected one of "
                    f"{_few(self.missing) or 'nothing more'}"
                )
            if tensor.name in self._came or tensor.name in seen:
                raise RefitError(f"{self._component}: {tensor.name}: came twice; expected each tensor once")
            _require_same(self._component, tensor, expected)
            seen.add(tensor.name)

    def cross_off(self, tensors: Iterable[RefitTensor]) -> None:
        """Count tensors as here. They were checked."""
        self._came.update((tensor.name, tensor) for tensor in tensors)

    @property
    def missing(self) -> list[str]:
        """Announced names that have not come, in the announcement's order."""
        return [name for name in self._announced if name not in self._came]

    def require_all(self) -> None:
        """Refuse an end before everything has come.

        Raises:
            RefitError: names what is missing.
        """
        if missing := self.missing:
            raise RefitError(
                f"{self._component}: {_few(missing)} never came; expected all {len(self._announced)} "
                "announced tensors"
            )

    def digest(self) -> str:
        """:func:`~rl_generation.refit.contract.manifest_digest` of what has come."""
        return manifest_digest(RefitSpec(tuple(self._came.values())))


class RefitProgress:
    """An engine's account of its weights: which version it holds, and how much of the next one is here.

    Args:
        replica: stands in every error and in the acknowledgement.
        version: of the weights that are loaded; ``None`` accepts any version first.
    """

    def __init__(self, replica: str, version: int | None = None) -> None:
        self._replica = replica
        self._version = version
        self._target: int | None = None
        self._tally: Tally | None = None
        self._moved = False
        self._stale = False

    @property
    def version(self) -> int | None:
        """Of the last weights that were whole."""
        return self._version

    @property
    def target(self) -> int | None:
        """The version that is arriving, ``None`` between refits."""
        return self._target

    @property
    def stale(self) -> bool:
        """Whether the weights are a mixture, or an announced version never came whole."""
        return self._stale

    def begin(self, spec: RefitSpec, version: int) -> None:
        """Open the account for a new version; whether the spec fits the model was asked before.

        Raises:
            RefitError: a refit is running, the version does not grow, or the announcement is no good. The
                same version again is taken by a stale engine only.
        """
        if self._tally is not None:
            raise RefitError(
                f"{self._replica}: version {version} was announced while version {self._target} arrives; "
                "expected finish_refit or abort_refit first"
            )
        held = self._version
        if held is not None and (version < held or (version == held and not self._stale)):
            raise RefitError(
                f"{self._replica}: version {version} was announced to an engine that holds {held}; expected "
                "a larger one"
            )
        self._tally = Tally(self._replica, spec)
        self._target = version
        self._moved = False

    @contextmanager
    def taking(self, bucket: Bucket) -> Generator[None]:
        """The scope in which one bucket is loaded: checked before, counted after unless it raised.

        Raises:
            RefitError: outside a refit, or a tensor is unknown, doubled or differs; no weight has moved.
        """
        tally = self._running("a bucket came")
        tensors = [announced(place) for place in bucket.tensors]
        tally.check(tensors)
        self._moved = True
        yield
        tally.cross_off(tensors)

    def took(self, bucket: Bucket) -> None:
        """:meth:`taking` for an engine that has loaded the bucket in one step already."""
        with self.taking(bucket):
            pass

    def complete(self) -> RefitAck:
        """Close the account: the engine holds the new version, and this says so.

        Raises:
            RefitError: outside a refit, or a tensor is missing; then the engine is stale.
        """
        tally, target = self._running("finish_refit was called"), self._target
        self._tally, self._target = None, None
        self._stale = True
        tally.require_all()
        assert target is not None
        self._version, self._stale = target, False
        return RefitAck(self._replica, target, tally.digest())

    def abort(self) -> bool:
        """End a refit that will not complete; idempotent.

        Returns:
            Whether the engine is stale now: a weight moved, or it was stale before.
        """
        if self._tally is not None:
            self._stale = self._stale or self._moved
        self._tally, self._target = None, None
        return self._stale

    def _running(self, what: str) -> Tally:
        if self._tally is None:
            raise RefitError(f"{self._replica}: {what} outside a refit; expected begin_refit first")
        return self._tally


def _by_name(component: str, tensors: Iterable[RefitTensor]) -> dict[str, RefitTensor]:
    named: dict[str, RefitTensor] = {}
    for tensor in tensors:
        if tensor.name in named:
            raise RefitError(f"{component}: {tensor.name} is announced twice; expected each tensor once")
        named[tensor.name] = tensor
    return named


def _require_same(component: str, tensor: RefitTensor, expected: Described, *, cast: bool = False) -> None:
    if tuple(tensor.shape) != tuple(expected.shape):
        raise RefitError(
            f"{component}: {tensor.name}: shape {tuple(tensor.shape)}; expected {tuple(expected.shape)}"
        )
    if tensor.dtype == expected.dtype:
        return
    if not (cast and tensor.dtype.is_floating_point and expected.dtype.is_floating_point):
        raise RefitError(
            f"{component}: {tensor.name}: dtype {dtype_name(tensor.dtype)}; expected "
            f"{dtype_name(expected.dtype)}"
        )


def _few(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_NAMED])
    return shown + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
