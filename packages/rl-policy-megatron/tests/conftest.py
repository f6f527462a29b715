"""Tiny random models made on the spot, in Hugging Face format, and batches for them."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig

VOCABULARY = 61
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Small, so that kept, blended and stretched frequencies all occur.
    "original_max_position_embeddings": 64,
}
_EXPERTS = {
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3-tied": lambda: Qwen3Config(**_SMALL, head_dim=16, tie_word_embeddings=True),
    "qwen3-untied": lambda: Qwen3Config(**_SMALL, head_dim=16, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**_SMALL, tie_word_embeddings=False),
    "qwen2-tied": lambda: Qwen2Config(**_SMALL, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**_SMALL),
    "llama3-rope": lambda: LlamaConfig(**_SMALL, rope_scaling=dict(_LLAMA3_ROPE)),
    "llama3-rope-tied": lambda: LlamaConfig(
        **_SMALL, rope_scaling=dict(_LLAMA3_ROPE), tie_word_embeddings=True
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_SMALL, **_EXPERTS),
    "qwen3-moe-tied": lambda: Qwen3MoeConfig(**_SMALL, **_EXPERTS, tie_word_embeddings=True),
    # Layers 0 and 3 are dense, the first because of the step, the last because it is listed.
    "qwen3-moe-mixed": lambda: Qwen3MoeConfig(
        **{**_SMALL, **_EXPERTS, "num_hidden_layers": 4, "norm_topk_prob": False},
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
    "qwen3-moe-one": lambda: Qwen3MoeConfig(**_SMALL, **{**_EXPERTS, "num_experts_per_tok": 1}),
}


@dataclass(frozen=True)
class Rows:
    """A batch with a mask and global denominator, as a loss needs it."""

    input_ids: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor
    denominator: float

    def select(self, rows: Sequence[int]) -> Rows:
        picked = list(rows)
        width = int(self.lengths[picked].max()) if picked else 0
        return replace(
            self,
            input_ids=self.input_ids[picked, :width],
            lengths=self.lengths[picked],
            mask=self.mask[picked, :width],
        )


def make_rows(lengths: Sequence[int], seed: int = 0, width: int | None = None, padding: int = 0) -> Rows:
    """Random tokens; the mask covers every predicted token."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    columns = width or int(sizes.max())
    # Drawn at one width and then cut, so that padding more does not draw other tokens.
    ids = torch.randint(0, VOCABULARY, (len(sizes), 64), generator=generator)[:, :columns].clone()
    places = torch.arange(columns)
    ids[places >= sizes[:, None]] = padding
    mask = (places > 0) & (places < sizes[:, None])
    return Rows(ids, sizes, mask.float(), float(mask.sum()))


@pytest.fixture(scope="session")
def rows_of() -> Callable[..., Rows]:
    """``rows_of(lengths, seed=0, width=None, padding=0)`` → a batch."""
    return make_rows


@dataclass(frozen=True)
class Total:
    """The simplest metric that can be merged."""

    total: float

    def merge(self, other: Total) -> Total:
        return Total(self.total + other.total)

    def value(self) -> float:
        return self.total


def token_mean(logits: Any, batch: Rows) -> tuple[torch.Tensor, dict[str, Total]]:
    """This micro-batch's share of the mean negative log-probability, and how many tokens it saw."""
    loss = -(logits.logprobs() * batch.mask).sum() / batch.denominator
    return loss, {"tokens": Total(float(batch.mask.sum()))}


@pytest.fixture(scope="session")
def token_mean_loss() -> Callable[..., Any]:
    return token_mean


@pytest.fixture
def policy_of(model_of: Callable[[str], tuple[Path, PreTrainedModel]]) -> Iterator[Callable[..., Any]]:
    """``policy_of(kind, optimizer=None, **settings)`` → a policy that is shut down after the test."""
    from rl_policy_megatron import MegatronPolicy, OptimizerSettings, PolicySettings

    made: list[MegatronPolicy] = []

    def make(kind: str, optimizer: OptimizerSettings | None = None, **settings: Any) -> MegatronPolicy:
        policy = MegatronPolicy(model_of(kind)[0], PolicySettings(**settings), optimizer)
        made.append(policy)
        return policy

    yield make
    for policy in made:
        policy.shutdown()


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    """``model_of(kind)`` → model directory and the same model in transformers, float32."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def make(kind: str) -> tuple[Path, PreTrainedModel]:
        if kind not in made:
            # Whichever test asks first: its own random numbers are none of the model's.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                transformers.utils.logging.disable_progress_bar()
                model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
                with torch.no_grad():
                    for name, weight in model.named_parameters():
                        # Norms and biases are ones and zeros when new, which would hide a mix-up.
                        if "norm" in name:
                            weight.add_(0.1 * torch.randn_like(weight))
                        elif name.endswith("bias"):
                            weight.copy_(0.1 * torch.randn_like(weight))
            directory = tmp_path_factory.mktemp(kind)
            model.save_pretrained(directory)
            made[kind] = directory, model
        return made[kind]

    return make


@pytest.fixture(scope="session")
def transformers_loss() -> Callable[..., torch.Tensor]:
    """``transformers_loss(model, batch)``: the token mean loss over a transformers model."""

    def compute(model: Any, batch: Rows) -> torch.Tensor:
        log_p = model(batch.input_ids).logits.log_softmax(-1)[:, :-1]
        chosen = log_p.gather(2, batch.input_ids[:, 1:, None])[..., 0]
        return -(chosen * batch.mask[:, 1:]).sum() / batch.denominator

    return compute


@pytest.fixture(scope="session")
def weights_hash() -> Callable[[Any], str]:
    """``weights_hash(policy)``: equal exactly when every bit of the weights is."""

    def compute(policy: Any) -> str:
        digest = hashlib.sha256()
        for _, tensor in policy.stream_weights():
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    return compute


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[Callable[[int], Any]]:
    """``ranks_of(world)`` → gloo ranks (see ranks.py), started once per module and size."""
    place = Path(__file__).with_name("ranks.py")
    spec = importlib.util.spec_from_file_location("rl_policy_megatron_test_ranks", place)
    assert spec is not None
    assert spec.loader is not None
    launcher = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launcher)
    made: dict[int, Any] = {}

    def make(world: int) -> Any:
        if world not in made:
            made[world] = launcher.Ranks(world)
        return made[world]

    yield make
    for ranks in made.values():
        ranks.close()


_OF_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    # By default actors run at niceness 15 and starve beside whatever else a machine does.
    "RAY_worker_niceness": "0",
    # Keeps the cluster of this machine on its loopback address; read when Ray is imported.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RL_ACTOR_ENVS_SYSTEM": "1",
}


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A Ray of this machine with 8 CPUs, in turns where there are fewer, and no GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _OF_RAY.items():
            patch.setenv(name, value)
        import ray

        # The paths of its sockets must stay short.
        scratch = tempfile.mkdtemp(prefix="rl-")
        for attempt in range(3):
            try:
                ray.init(
                    address="local",
                    num_cpus=8,
                    include_dashboard=False,
                    object_store_memory=80 * 2**20,
                    log_to_driver=False,
                    _temp_dir=scratch,
                )
                break
            except Exception:
                # Ray gives a node 30 s to start, however busy the machine is.
                ray.shutdown()
                if attempt == 2:
                    raise
        yield
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)


def running(group: Any) -> list[int]:
    """Numbers of a group's processes that still run."""
    return [pid for pid in group.pids if runs(pid)]


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie; it may end at any moment, between two questions too."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def groups(ray_cluster: None) -> Iterator[list[Any]]:
    """Groups that are shut down when the tests of a file are over; none of their processes may run then."""
    made: list[Any] = []
    yield made
    for group in made:
        group.shutdown()
        assert running(group) == []
