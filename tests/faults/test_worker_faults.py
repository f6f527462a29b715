"""What the driver says when its worker fails, hangs or dies."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl_algorithms.batching import build_sft_batch
from rl_algorithms.losses import SFTLoss
from rl_app_core.cluster import ray_cluster
from rl_app_core.config.sections import Cluster, TinyModel
from rl_app_core.demonstrations import tokenizer_texts
from rl_app_core.remote import RemoteWorker, group_settings
from rl_app_core.tiny_model import write_tiny_model
from rl_generation.protocol import GenerationRequest, SamplingParams
from rl_policy_megatron.errors import RankError
from rl_policy_megatron.group import RankSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CLUSTER = Cluster(threads=1)
BATCH = build_sft_batch([([5, 6, 7, 8], [0, 1, 1, 1])], pad_token_id=0)
REQUEST = GenerationRequest((5, 6, 7), SamplingParams(max_new_tokens=4, seed=1))


@dataclass(frozen=True)
class FailingLoss:
    """Fails in the worker, with a cause worth reading."""

    def __call__(self, logits, batch):
        raise ZeroDivisionError("the denominator of row 3 is 0")


@dataclass(frozen=True)
class SlowLoss:
    """Takes longer than anybody wants to wait."""

    def __call__(self, logits, batch):
        time.sleep(60)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, TinyModel(layers=1), tokenizer_texts(), seed=0)
    return directory


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    os.environ["RL_ACTOR_ENVS_SYSTEM"] = "1"
    with ray_cluster(CLUSTER, tmp_path_factory.mktemp("logs")):
        yield


@pytest.fixture(scope="module")
def start(model_dir):
    workers = []

    def start(cluster: Cluster = CLUSTER) -> RemoteWorker:
        workers.append(RemoteWorker(RankSettings(str(model_dir), threads=1), group_settings(cluster)))
        return workers[-1]

    yield start
    for worker in workers:
        worker.shutdown()


@pytest.fixture(scope="module")
def worker(start):
    """One that no test harms."""
    return start()


@pytest.fixture(scope="module")
def other(start):
    """Another one, which the last test that uses it kills."""
    return start()


def test_a_failure_in_the_worker_keeps_its_cause_and_the_worker_works_on(worker):
    with pytest.raises(ZeroDivisionError, match="the denominator of row 3 is 0") as caught:
        worker.train(BATCH, FailingLoss(), learning_rate=0.1)
    assert caught.value.__notes__ == ["ZeroDivisionError of train, raised on rank 0 of 1"]
    before = worker.generate([REQUEST])[0].weight_version
    assert worker.train(BATCH, SFTLoss(), learning_rate=0.1)["loss"] > 0
    assert worker.generate([REQUEST])[0].weight_version == before + 1


def test_a_worker_that_does_not_answer_is_an_error_with_the_remedy(start):
    worker = start(Cluster(threads=1, call_timeout_s=2.0, shutdown_timeout_s=1.0))
    began = time.monotonic()
    with pytest.raises(RankError, match=r"train did not answer within 2 s; raise call_timeout_s"):
        worker.train(BATCH, SlowLoss(), learning_rate=0.1)
    assert time.monotonic() - began < 10
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(RankError, match="generate was called after a failure of train"):
        worker.generate([REQUEST])


def test_a_model_that_cannot_be_loaded_is_told_by_its_own_error(tmp_path):
    with pytest.raises(RankError, match=r"start failed: ModelDirectoryError: .*config\.json does not exist"):
        RemoteWorker(RankSettings(str(tmp_path / "nowhere"), threads=1), group_settings(CLUSTER))


def test_saved_and_loaded_weights_sample_the_same_tokens(worker, other, tmp_path):
    """Policy, optimizer and weight version come back, whoever else has used the worker since."""
    worker.train(BATCH, SFTLoss(), learning_rate=0.05)
    folder = tmp_path / "saved"
    folder.mkdir()
    worker.save(folder)
    saved = worker.generate([REQUEST])
    continued = worker.train(BATCH, SFTLoss(), learning_rate=0.05)
    other.load(folder)
    assert other.generate([REQUEST]) == saved
    assert other.train(BATCH, SFTLoss(), learning_rate=0.05) == continued
    assert {file.suffix for file in Path(folder).iterdir()} <= {".json", ".safetensors"}


def test_a_killed_worker_is_noticed_and_named(other):
    os.kill(int(other.description["pid"]), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankError, match="it died during generate"):
        other.generate([REQUEST])
    assert time.monotonic() - began < 30
