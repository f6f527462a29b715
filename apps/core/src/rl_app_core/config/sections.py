"""Every setting of a run, its default and its bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

Share = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Frozen, and closed to keys that nobody reads."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )


class TinyModel(Section):
    """A Qwen3 with random weights, made on the spot from the run's seed."""

    vocab_size: Annotated[int, Field(ge=300, le=65536)] = 512
    """Entries of the byte-level BPE tokenizer, special tokens included."""
    hidden_size: PositiveInt = 64
    intermediate_size: PositiveInt = 192
    layers: PositiveInt = 2
    heads: PositiveInt = 2
    kv_heads: PositiveInt = 1
    head_dim: PositiveInt = 32
    initializer_range: Positive = 0.08
    context: PositiveInt = 1024
    """Longest sequence, in tokens."""
    rope_theta: Positive = 10000.0


class Model(Section):
    """Where the policy comes from: exactly one of ``path`` and ``tiny``."""

    path: Path | None = None
    """A directory in Hugging Face format: config.json, *.safetensors and the tokenizer's files."""
    tiny: TinyModel | None = None
    chat_template: Path | None = None
    """A Jinja file that replaces the tokenizer's own chat template."""

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.tiny is None):
            raise ValueError(
                "give exactly one of model.path (a Hugging Face directory, as in model.path=DIR) "
                "and model.tiny"
            )
        return self


class TrainData(Section):
    """The problems: a reasoning-gym generator by name, or a JSONL file in Gym format."""

    dataset_name: str | None = None
    """A generator of the reasoning-gym library, such as ``basic_arithmetic``."""
    options: dict[str, Any] = {}
    """Options of that generator, as its library documents them."""
    size: PositiveInt = 20000
    """Draws; repeated problems count once."""
    seed: Count = 0
    """Of the generator; not the run's, so that runs with other seeds share their problems."""
    prompt: str = "{question}"
    """The user message; ``{question}`` and every scalar of the problem's metadata can be used."""
    path: Path | None = None
    """A JSONL file in Gym format instead of a generator."""

    @model_validator(mode="after")
    def _one_source(self) -> TrainData:
        if (self.path is None) == (self.dataset_name is None):
            raise ValueError(
                "give exactly one of data.train.dataset_name (a reasoning-gym generator) and data.train.path"
            )
        return self


class HeldOutData(Section):
    """Problems that are never trained on, chosen by a hash of their content."""

    size: PositiveInt = 256
    share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of all distinct problems that is set aside; at most ``size`` of them are used."""
    path: Path | None = None
    """A JSONL file of its own instead; problems that also appear in training are refused."""


class Data(Section):
    train: TrainData
    held_out: HeldOutData = HeldOutData()


class Environment(Section):
    """The in-process environment that generated rows are played in."""

    name: str = "exact_answer"


class DemonstrationPhase(Section):
    """Until this warm-start step, this share of the demonstrations shows the long way."""

    until_step: PositiveInt
    share: Share


class WarmStart(Section):
    """Supervised steps before reinforcement learning; 0 steps turn it off."""

    steps: Count = 0
    batch_size: PositiveInt = 64
    demonstrations: str = "addition"
    """Which demonstrations: ``addition`` (thinks digit by digit, or answers at once) or
    ``calculator`` (calls the tool, or answers at once)."""
    phases: tuple[DemonstrationPhase, ...] = ()
    learning_rate: NonNegative = 6e-3
    warmup_steps: Count = 20
    final_share: Share = 0.1
    """The cosine schedule ends at this share of the learning rate."""
    adam_betas: tuple[Share, Share] = (0.9, 0.98)
    weight_decay: NonNegative = 0.0
    gradient_clip: Positive = 1.0

    @model_validator(mode="after")
    def _phases_cover_the_steps(self) -> WarmStart:
        ends = [phase.until_step for phase in self.phases]
        if ends != sorted(set(ends)):
            raise ValueError(f"phases must end at rising steps, got {ends}")
        if self.steps and (not ends or ends[-1] < self.steps):
            raise ValueError(
                f"the last phase must reach step {self.steps}, it ends at {ends[-1] if ends else 'none'}"
            )
        return self


class Algorithm(Section):
    """Group relative policy optimisation."""

    steps: PositiveInt = 30
    prompts_per_step: PositiveInt = 32
    group_size: PositiveInt = 8
    """Rollouts of each prompt; the group that advantages are computed in."""
    updates_per_step: PositiveInt = 1
    learning_rate: NonNegative = 2e-4
    warmup_steps: Count = 5
    adam_betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: NonNegative = 0.0
    gradient_clip: Positive = 1.0
    advantage: Literal["grpo", "rloo", "dr_grpo"] = "grpo"
    leave_one_out: bool = False
    clip_low: Share = 0.2
    clip_high: NonNegative = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    kl_coefficient: NonNegative = 0.0
    kl_form: Literal["k1", "k2", "k3"] = "k3"
    entropy_coefficient: NonNegative = 0.0
    normalization: Literal["token", "sequence", "constant"] = "token"
    importance_correction: Literal["tis", "icepop"] | None = None
    importance_max: Positive | None = None
    importance_min: Positive | None = None
    overlong_filtering: bool = False
    """Truncated answers keep their place in the baseline and are not trained."""
    shuffle_rewards: bool = False
    """A diagnostic: permute the rewards over the whole batch. Nothing can be learnt then."""

    @model_validator(mode="after")
    def _combinations(self) -> Algorithm:
        if (self.importance_correction is None) != (self.importance_max is None):
            raise ValueError("importance_correction and importance_max are given together or not at all")
        if self.leave_one_out and self.advantage != "grpo":
            raise ValueError(f"leave_one_out belongs to advantage=grpo, not to {self.advantage}")
        if self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"updates_per_step {self.updates_per_step} exceeds prompts_per_step {self.prompts_per_step}"
            )
        return self


class Generation(Section):
    """The rollout engine and how it samples during training."""

    backend: Literal["megatron"] = "megatron"
    max_new_tokens: PositiveInt = 32
    """Per turn."""
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count = 0

    @model_validator(mode="after")
    def _scorable(self) -> Generation:
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}: the policy cannot score a truncated distribution; "
                "train with top_p=1 and top_k=0 and use temperature instead"
            )
        return self


class Policy(Section):
    precision: Literal["float32", "bfloat16"] = "float32"
    micro_batch_size: PositiveInt = 64
    """Sequences per forward and backward pass; results do not depend on it."""


class Evaluation(Section):
    """Greedy decoding of the held-out problems."""

    every: PositiveInt = 5
    """Steps between measurements; before and after are always measured."""


class Checkpointing(Section):
    every: PositiveInt = 10
    keep: PositiveInt = 2
    """How many of the newest are kept."""


class Logging(Section):
    tensorboard: bool = True
    rollouts_per_step: Count = 4
    """How many rollouts of each step go to rollouts.jsonl."""


class Cluster(Section):
    """Where the workers run and how long anything may take."""

    address: str | None = None
    """Address of a running Ray cluster; none starts one on this machine for the run."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of the worker; 0 takes all cores that this process may use."""
    start_timeout_s: Positive = 180.0
    call_timeout_s: Positive = 3600.0
    """No single call to a worker may take longer."""
    shutdown_timeout_s: Positive = 20.0


class RunConfig(Section):
    """One run of GRPO."""

    seed: Count = 0
    model: Model
    data: Data
    environment: Environment = Environment()
    warm_start: WarmStart = WarmStart()
    algorithm: Algorithm = Algorithm()
    generation: Generation = Generation()
    policy: Policy = Policy()
    evaluation: Evaluation = Evaluation()
    checkpointing: Checkpointing = Checkpointing()
    logging: Logging = Logging()
    cluster: Cluster = Cluster()
