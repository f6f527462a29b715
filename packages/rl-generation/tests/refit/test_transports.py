"""Every transport that works here moves every kind of tensor to the bit; the others say what they miss."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
import torch

from rl_generation.failures import RefitError, UnavailableBackendError
from rl_generation.refit.contract import Bucket, TransportName
from rl_generation.refit.publisher import TensorSource
from rl_generation.refit.receive import BucketReader
from rl_generation.refit.settings import TransportSettings
from rl_generation.refit.transports import collective, cuda_ipc
from rl_generation.refit.transports.base import require_transport
from rl_generation.refit.transports.registry import make_receiver, make_sender

from .conftest import Tensors, described, random_tensors, require_same

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def take(reader: BucketReader, bucket: Bucket) -> Tensors:
    """Copies of a bucket's tensors."""
    return {name: tensor.clone() for name, tensor in reader.tensors(bucket)}


def refit(
    tensors: Tensors, transport: TransportName, settings: TransportSettings, readers: int
) -> list[Tensors]:
    """What each reader received of a whole refit."""
    source = TensorSource(lambda: described(tensors), tensors.items, settings)
    sides = [BucketReader(settings) for _ in range(readers)]
    received: list[Tensors] = [{} for _ in sides]
    try:
        source.begin(transport)
        with ThreadPoolExecutor(readers) as threads:
            while (bucket := source.next_bucket()) is not None:
                # Between processes it is pickled.
                given = pickle.loads(pickle.dumps(bucket))
                for mine, part in zip(received, threads.map(take, sides, [given] * readers), strict=True):
                    mine |= part
    finally:
        source.end()
        for side in sides:
            side.close()
    return received


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
@pytest.mark.parametrize("seed", range(3))
def test_a_refit_is_exact_to_the_bit_for_every_reader(
    settings: TransportSettings, transport: TransportName, seed: int
) -> None:
    tensors = random_tensors(seed)
    for received in refit(tensors, transport, replace(settings, receivers=2), readers=2):
        require_same(received, tensors)


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
def test_a_refit_of_empty_tensors_alone_goes_through(
    settings: TransportSettings, transport: TransportName
) -> None:
    tensors = {"a": torch.empty(0), "b": torch.empty(3, 0, dtype=torch.int8)}
    (received,) = refit(tensors, transport, settings, readers=1)
    require_same(received, tensors)


def collective_source(settings: TransportSettings, tensors: Tensors) -> TensorSource:
    source = TensorSource(lambda: described(tensors), tensors.items, settings)
    source.begin("collective")
    return source


TWO: Tensors = {"a": torch.zeros(60), "b": torch.ones(60)}


def test_a_member_that_missed_a_bucket_is_told_so(settings: TransportSettings) -> None:
    source = collective_source(settings, TWO)
    first = source.next_bucket()
    assert first is not None
    reader = BucketReader(settings)
    take(reader, first)
    with pytest.raises(RefitError, match="bucket 0 of a collective came; expected 1"):
        reader.tensors(first)
    reader.close()
    source.end()


def test_one_member_too_many_is_told_so(settings: TransportSettings) -> None:
    source = collective_source(settings, TWO)
    bucket = source.next_bucket()
    assert bucket is not None
    member = BucketReader(settings)
    take(member, bucket)
    with pytest.raises(RefitError, match="member 2 of a collective for 1; set receivers"):
        BucketReader(settings).tensors(bucket)
    member.close()
    source.end()


def test_members_that_never_come_are_a_failure_within_the_deadline(settings: TransportSettings) -> None:
    source = collective_source(replace(settings, timeout_s=0.5), TWO)
    assert source.next_bucket() is not None
    start = time.monotonic()
    with pytest.raises(RefitError, match=r"0 of 1 members joined a collective within 0\.5 s; .* receivers"):
        source.next_bucket()
    assert time.monotonic() - start < 5
    source.end()


def test_a_member_that_leaves_is_a_failure_for_the_policy(settings: TransportSettings) -> None:
    source = collective_source(replace(settings, timeout_s=2), TWO)
    first = source.next_bucket()
    assert first is not None
    reader = BucketReader(settings)
    take(reader, first)
    assert source.next_bucket() is not None
    reader.close()
    with pytest.raises(RefitError, match="a broadcast of 240 bytes with 1 receivers failed"):
        source.next_bucket()
    source.end()


def test_an_ended_collective_is_not_waited_for(settings: TransportSettings) -> None:
    source = collective_source(settings, TWO)
    assert source.next_bucket() is not None
    start = time.monotonic()
    source.end()
    assert time.monotonic() - start < 2


def test_a_policy_that_is_gone_is_a_failure_for_the_member(settings: TransportSettings) -> None:
    source = collective_source(settings, TWO)
    bucket = source.next_bucket()
    assert bucket is not None
    take(reader := BucketReader(settings), bucket)
    reader.close()
    source.end()
    with pytest.raises(RefitError, match=r"store at 127\.0\.0\.1:\d+ does not answer"):
        BucketReader(replace(settings, timeout_s=0.5)).tensors(bucket)


def test_a_member_of_an_earlier_refit_joins_nothing_where_another_has_its_port(
    settings: TransportSettings,
) -> None:
    settings = replace(settings, timeout_s=3)
    source = collective_source(settings, TWO)
    bucket = source.next_bucket()
    assert bucket is not None
    earlier = replace(bucket, location={**bucket.location, "group": "an earlier one"})
    refused: list[Exception] = []

    def come_late() -> None:
        try:
            BucketReader(replace(settings, timeout_s=0.5)).tensors(earlier)
        except RefitError as error:
            refused.append(error)

    late = threading.Thread(target=come_late)
    late.start()
    late.join(10)
    assert len(refused) == 1
    reader = BucketReader(settings)
    require_same(take(reader, bucket), {"a": TWO["a"]})
    reader.close()
    source.end()


def test_the_store_listens_on_loopback_alone(settings: TransportSettings) -> None:
    source = collective_source(settings, TWO)
    bucket = source.next_bucket()
    assert bucket is not None
    port = f"{bucket.location['port']:04X}"
    listening = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}", encoding="ascii") as file:
            rows = [line.split() for line in file][1:]
        listening += [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port}")]
    assert listening == [f"0100007F:{port}"]
    source.end()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "policy.example"])
def test_beyond_loopback_a_collective_needs_a_network_that_is_said_to_be_trusted(host: str) -> None:
    with pytest.raises(
        ValueError, match=r"anyone there could read the policy's weights.*trusted_network=True"
    ):
        TransportSettings(host=host)
    assert TransportSettings(host=host, trusted_network=True).host == host
    for loopback in ("127.0.0.1", "::1", "localhost"):
        assert not TransportSettings(host=loopback).trusted_network


def test_no_setting_of_a_transport_looks_like_a_secret() -> None:
    # There is nobody whom it would keep out, and settings are logged with an engine's configuration.
    names = {item.name for item in fields(TransportSettings)}
    assert not {name for name in names if "token" in name or "secret" in name or "password" in name}


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"bucket_bytes": 0}, "bucket_bytes"), ({"receivers": 0}, "receivers"), ({"timeout_s": 0}, "timeout_s")],
)
def test_settings_out_of_range_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransportSettings(**fields)


@pytest.mark.parametrize("location", [None, {}, {"host": "h", "port": "x", "backend": "gloo", "size": 2}])
def test_no_place_in_a_collective_is_refused(settings: TransportSettings, location: object) -> None:
    with pytest.raises(RefitError, match="is no place in a collective"):
        BucketReader(settings).tensors(Bucket("collective", location, 0, ()))


@NO_GPU
def test_nccl_without_a_gpu_says_what_is_missing(settings: TransportSettings) -> None:
    location = {"host": "127.0.0.1", "port": 1, "group": "g", "backend": "nccl", "size": 2, "number": 0}
    with pytest.raises(UnavailableBackendError, match=r"'nccl', which does not work here .* GPU: False"):
        BucketReader(settings).tensors(Bucket("collective", location, 0, ()))
    assert collective.best_backend() == "gloo"


@NO_GPU
def test_cuda_ipc_without_a_gpu_says_what_is_missing(settings: TransportSettings) -> None:
    source = TensorSource(lambda: described(TWO), TWO.items, settings)
    with pytest.raises(UnavailableBackendError, match=r"CUDA IPC needs a GPU .* choose shared_memory"):
        source.begin("cuda_ipc")
    source.end()
    with pytest.raises(UnavailableBackendError, match="CUDA IPC needs a GPU"):
        BucketReader(settings).tensors(Bucket("cuda_ipc", {}, 0, ()))


SHARED = (0, b"\x01handle", 512, 64, b"\x02counter", 8, b"\x03event", True)


def test_a_handle_of_device_memory_survives_as_plain_values() -> None:
    location = pickle.loads(pickle.dumps(cuda_ipc.describe("GPU-b", SHARED)))
    assert all(isinstance(value, (str, int)) for value in location.values())
    assert cuda_ipc.locate(location, ["GPU-a", "GPU-b"]) == (1, list(SHARED[1:]))


def test_device_memory_of_another_gpu_is_refused() -> None:
    location = cuda_ipc.describe("GPU-b", SHARED)
    with pytest.raises(RefitError, match=r"on GPU GPU-b, and this process sees GPU-a; .* collective"):
        cuda_ipc.locate(location, ["GPU-a"])
    with pytest.raises(RefitError, match="is no place in a GPU's memory"):
        cuda_ipc.locate({"gpu": "GPU-a"}, ["GPU-a"])


def test_the_object_store_without_a_cluster_says_what_is_missing(
    settings: TransportSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TensorSource(lambda: described(TWO), TWO.items, settings)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnavailableBackendError, match=r"Ray, which is not installed; .*\[ray\]"):
        source.begin("object_store")
    source.end()


def test_a_bucket_is_opened_the_way_it_came() -> None:
    with pytest.raises(RefitError, match="sent by object_store was opened as shared_memory"):
        require_transport(Bucket("object_store", None, 0, ()), "shared_memory")


def test_an_unknown_transport_is_refused(settings: TransportSettings) -> None:
    name: TransportName = "pigeon"  # type: ignore[assignment]
    for make in (make_sender, make_receiver):
        with pytest.raises(RefitError, match="no transport 'pigeon'"):
            make(name, settings)
