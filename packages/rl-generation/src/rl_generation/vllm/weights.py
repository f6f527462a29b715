"""What an engine knows of its weights: what fits, what has come, which version, and where bytes are."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from ..failures import RefitError
from ..protocol import RefitSpec
from ..refit.checkpoint import spec_of_checkpoint
from ..refit.contract import Bucket, RefitAck, manifest_digest
from ..refit.manifest import TIED_HEAD, RefitProgress, require_fit
from ..refit.wire import spec_to_json
from .settings import VllmSettings


class WeightAccount:
    """One engine's account, kept where requests are admitted; its workers keep one each.

    Args:
        settings: of the engine.
    """

    def __init__(self, settings: VllmSettings) -> None:
        self._name = settings.name
        self._model_dir = settings.model_dir
        self._checkpoint_version = settings.weight_version
        self._progress = RefitProgress(settings.name, settings.weight_version)
        self._expected: RefitSpec | None = None
        self._digest = ""

    @property
    def version(self) -> int:
        """Of the last weights that were whole."""
        version = self._progress.version
        return self._checkpoint_version if version is None else version

    @property
    def arriving(self) -> bool:
        """Whether a refit is between begin and its end."""
        return self._progress.target is not None

    def forget(self) -> None:
        """What is loaded counts for nothing: any version may come next."""
        self._progress = RefitProgress(self._name)

    def require_fit(self, spec: RefitSpec, *, tied: bool) -> None:
        """Compare an announcement with the checkpoint that the engine was started from.

        Raises:
            RefitError: a tensor is missing, unknown, or has another shape or a dtype that is no float.
        """
        if self._expected is None:
            self._expected = spec_of_checkpoint(self._model_dir)
        require_fit(
            spec,
            self._expected.tensors,
            component=self._name,
            optional=TIED_HEAD if tied else (),
            cast=True,
        )

    def begin(self, spec: RefitSpec, version: int) -> str:
        """Open the account; the announcement as workers want it.

        Raises:
            RefitError: another refit runs, or the version does not grow.
        """
        self._progress.begin(spec, version)
        self._digest = manifest_digest(spec)
        return spec_to_json(spec)

    @contextmanager
    def taking(self, bucket: Bucket) -> Generator[None]:
        """The scope in which workers load a bucket.

        Raises:
            RefitError: outside a refit, or a tensor is not as announced.
        """
        with self._progress.taking(bucket):
            yield

    def require_arriving(self, what: str) -> int:
        """The version that is arriving.

        Raises:
            RefitError: none is.
        """
        target = self._progress.target
        if target is None:
            raise RefitError(f"{self._name}: {what} was called outside a refit; expected begin_refit first")
        return target

    def complete(self, digests: Sequence[str]) -> RefitAck:
        """Close the account.

        Args:
            digests: what each worker says that it was given.

        Raises:
            RefitError: something is missing, or a worker was given something else.
        """
        odd = [rank for rank, digest in enumerate(digests) if digest != self._digest]
        if odd or not digests:
            raise RefitError(
                f"{self._name}: workers {odd} of {len(digests)} hold other weights than were announced"
            )
        return self._progress.complete()

    def abort(self) -> bool:
        """End a refit that will not complete; idempotent. Returns whether the weights are a mixture."""
        return self._progress.abort()
