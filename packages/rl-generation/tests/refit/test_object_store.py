"""Buckets through the store of a real Ray cluster."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_generation.failures import RefitError, UnavailableBackendError
from rl_generation.refit.contract import Bucket
from rl_generation.refit.publisher import TensorSource
from rl_generation.refit.receive import BucketReader
from rl_generation.refit.settings import TransportSettings

from .conftest import Tensors, described, random_tensors, require_same

pytestmark = pytest.mark.slow

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
    # Keeps the cluster of this machine on its loopback address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray of this machine, for the tests of this file."""
    ray = pytest.importorskip("ray")
    # The paths of its sockets must stay short.
    scratch = tempfile.mkdtemp(prefix="rl-")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        for attempts_left in (2, 1, 0):
            # Ray gives a node 30 s to start, however busy the machine is.
            try:
                ray.init(
                    address="local",
                    num_cpus=1,
                    include_dashboard=False,
                    object_store_memory=80 * 2**20,
                    log_to_driver=False,
                    _temp_dir=scratch,
                )
                break
            except Exception:
                ray.shutdown()
                if not attempts_left:
                    raise
        yield ray
        ray.shutdown()
    shutil.rmtree(scratch, ignore_errors=True)


def test_without_a_cluster_the_store_says_what_is_missing(settings: TransportSettings) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UnavailableBackendError, match="a Ray cluster, which this process has not joined"):
        BucketReader(settings).tensors(Bucket("object_store", None, 0, ()))


def test_tensors_of_any_kind_come_back_to_the_bit(ray: Any, settings: TransportSettings) -> None:
    reader = BucketReader(settings)
    for tensors in (random_tensors(0), random_tensors(1), {"only": torch.empty(0, 2)}):
        source = TensorSource(lambda sent=tensors: described(sent), tensors.items, settings)
        source.begin("object_store")
        received: Tensors = {}
        while (bucket := source.next_bucket()) is not None:
            received |= {name: tensor.clone() for name, tensor in reader.tensors(bucket)}
        source.end()
        require_same(received, tensors)


def test_a_policy_in_another_process_sends_without_a_copy_on_this_side(
    ray: Any, settings: TransportSettings
) -> None:
    class Policy:
        def __init__(self, settings: TransportSettings) -> None:
            tensors = {"w": torch.arange(1 << 20, dtype=torch.float32)}
            self._source = TensorSource(lambda: described(tensors), tensors.items, settings)

        def begin(self) -> None:
            self._source.begin("object_store")

        def next_bucket(self) -> Bucket | None:
            return self._source.next_bucket()

    policy = ray.remote(Policy).options(num_cpus=1).remote(settings)
    ray.get(policy.begin.remote(), timeout=60)
    bucket = ray.get(policy.next_bucket.remote(), timeout=60)
    reader = BucketReader(settings)
    ((name, tensor),) = reader.tensors(bucket)
    ((_, again),) = reader.tensors(bucket)
    assert name == "w"
    assert torch.equal(tensor, torch.arange(1 << 20, dtype=torch.float32))
    assert tensor.data_ptr() == again.data_ptr()
    del tensor, again
    ray.kill(policy)


def test_a_bucket_that_never_comes_is_a_failure_within_the_deadline(
    ray: Any, settings: TransportSettings
) -> None:
    never = ray.remote(lambda: None).options(num_cpus=1000).remote()
    with pytest.raises(
        RefitError, match=r"8 bytes did not come out of Ray's store within 0\.2 s: GetTimeout"
    ):
        BucketReader(replace(settings, timeout_s=0.2)).tensors(Bucket("object_store", never, 8, ()))
    ray.cancel(never)


def test_something_else_than_a_buckets_bytes_is_refused(ray: Any, settings: TransportSettings) -> None:
    reader = BucketReader(settings)
    with pytest.raises(RefitError, match="did not come out of Ray's store"):
        reader.tensors(Bucket("object_store", "a path", 8, ()))
    for strange in (b"12345678", torch.zeros(2).numpy()):
        with pytest.raises(RefitError, match=r"gave a .* for a bucket; expected its bytes"):
            reader.tensors(Bucket("object_store", ray.put(strange), 8, ()))
