"""Every setting of a run, its default and its bounds."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PositiveInt, model_validator

from .gym import Gym
from .section import Beta, Count, File, Finite, NonNegative, Positive, Section, Share


class TinyModel(Section):
    """A Qwen3 with random weights, made on the spot from the run's seed."""

    vocab_size: Annotated[int, Field(ge=300, le=65536)] = 512
    """Entries of the byte-level BPE tokenizer, special tokens included."""
    hidden_size: PositiveInt = 64
    """Width of the residual stream."""
    intermediate_size: PositiveInt = 192
    """Width inside the MLP."""
    layers: PositiveInt = 2
    """Transformer blocks."""
    heads: PositiveInt = 2
    """Query heads."""
    kv_heads: PositiveInt = 1
    """Key and value heads; a divisor of ``heads``."""
    head_dim: PositiveInt = 32
    """Width of a head; even."""
    initializer_range: Positive = 0.08
    """Standard deviation of the initial matrices."""
    context: PositiveInt = 1024
    """Longest sequence, in tokens."""
    rope_theta: Positive = 10000.0
    """Base of the rotary positions."""

    @model_validator(mode="after")
    def _shape(self) -> TinyModel:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        return self


class Model(Section):
    """Where the policy comes from: exactly one of ``path`` and ``tiny``."""

    path: File | None = None
    """A directory in Hugging Face format: config.json, *.safetensors and the tokenizer's files."""
    tiny: TinyModel | None = None
    chat_template: File | None = None
    """A Jinja file that replaces the tokenizer's own chat template."""

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.tiny is None):
            raise ValueError(
                "give exactly one of model.path (a Hugging Face directory, as in model.path=DIR) "
                "and model.tiny"
            )
        return self


_ROW_FIELDS = frozenset({"responses_create_params", "agent_ref", "answer", "metadata", "row_id"})


class TrainData(Section):
    """The problems: a reasoning-gym generator by name, or a JSONL file in Gym format."""

    dataset_name: str | None = None
    """A generator of the reasoning-gym library, such as ``basic_arithmetic``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the generator, as its library documents them."""
    size: PositiveInt = 20000
    """Draws from the generator; repeated problems count once."""
    seed: Count = 0
    """Of the generator; not the run's, so that runs with other seeds share their problems."""
    prompt: str = "{question}"
    """The user message of a generated problem; ``{question}`` and every scalar of the problem's metadata
    can be used."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Further fields of each generated row, for a verifier that reads others than ``answer``: templates as
    ``prompt``, which may use ``{answer}`` too."""
    path: File | None = None
    """A JSONL file in Gym format instead of a generator."""

    @model_validator(mode="after")
    def _fields_are_free(self) -> TrainData:
        if self.fields and self.path is not None:
            raise ValueError("fields are of generated problems; write them into the rows of data.train.path")
        taken = sorted(self.fields.keys() & _ROW_FIELDS)
        if taken:
            raise ValueError(f"fields: {', '.join(taken)} of a generated row is made already; name others")
        return self

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
    """How many of them are used at most."""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of all distinct problems that is set aside; at most ``size`` of them are used."""
    path: File | None = None
    """A JSONL file of its own instead; problems that also appear in training are refused."""


class Data(Section):
    """Rows to train on and rows to be measured on."""

    train: TrainData
    held_out: HeldOutData = HeldOutData()


class Environment(Section):
    """What rows are played in: an in-process environment, or a NeMo Gym."""

    name: str = "exact_answer"
    """``exact_answer``, ``final_number`` (the last whole number of the answer counts) or ``calculator``
    (with a tool to call). Rows of a file may name another in ``agent_ref``. Of no use with ``gym``."""
    gym: Gym | None = None

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Environment:
        default = type(self).model_fields["name"].default
        if self.gym is not None and self.name != default:
            raise ValueError(
                f"name={self.name} is of an in-process environment, and gym has agents; name the agent with "
                "environment.gym.agent, or leave one of the two out"
            )
        return self


class DemonstrationPhase(Section):
    """Until this warm-start step, this share of the demonstrations shows the long way."""

    until_step: PositiveInt
    """Last step of the phase."""
    share: Share
    """Probability that a demonstration shows the long way."""


class WarmStart(Section):
    """Supervised steps before reinforcement learning; 0 steps turn it off."""

    steps: Count = 0
    """Supervised updates."""
    batch_size: PositiveInt = 64
    """Demonstrations per update."""
    demonstrations: str = "addition"
    """Which demonstrations: ``addition`` (thinks digit by digit, or answers at once) or
    ``calculator`` (calls the tool, or answers at once)."""
    phases: tuple[DemonstrationPhase, ...] = ()
    """``{until_step, share}`` each, in order: up to that step, this share of the demonstrations shows the
    long way. The last must reach ``steps``."""
    learning_rate: NonNegative = 6e-3
    """At the top of the schedule."""
    warmup_steps: Count = 20
    """Steps of linear rise to it."""
    final_share: Share = 0.1
    """The cosine schedule ends at this share of the learning rate."""
    adam_betas: tuple[Beta, Beta] = (0.9, 0.98)
    """Decay of AdamW's two moments."""
    weight_decay: NonNegative = 0.0
    """Of matrices, never of norms and biases."""
    gradient_clip: Positive = 1.0
    """Largest norm of the gradient."""

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


class RewardScaling(Section):
    """Rewards from one range to another, clamped to it."""

    source_min: Finite
    """The environment's lowest reward."""
    source_max: Finite
    """Its highest."""
    target_min: Finite = 0.0
    """What the lowest becomes."""
    target_max: Finite = 1.0
    """What the highest becomes."""


class RewardPenalties(Section):
    """Subtracted from the reward of a rollout that broke a rule, once for each rule."""

    invalid_tool_call: NonNegative = 0.0
    """A turn wrote its tool call as text instead of making it."""
    malformed_thinking: NonNegative = 0.0
    """A turn's thinking tags do not match."""
    truncated: NonNegative = 0.0
    """The policy was cut off before it ended its answer."""


class Rewards(Section):
    """What is done to an environment's rewards before advantages are made of them."""

    scaling: RewardScaling | None = None
    penalties: RewardPenalties = RewardPenalties()

    overlong_buffer: Count = 0
    """The last so many tokens before ``generation.max_new_tokens`` are punished, linearly; 0 is off."""
    overlong_penalty: NonNegative = 1.0
    """The punishment at the very end of the buffer."""
    stop_properly_coefficient: Share | None = None
    """Factor on the reward of truncated answers, instead of the overlong penalty."""

    @model_validator(mode="after")
    def _a_penalty_has_a_buffer(self) -> Rewards:
        if self.overlong_buffer and not self.overlong_penalty:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer} has no effect with overlong_penalty=0; leave one out"
            )
        if not self.overlong_buffer and self.overlong_penalty != 1.0:
            raise ValueError(
                f"overlong_penalty={self.overlong_penalty:g} has no effect without overlong_buffer; give one"
            )
        return self


class Evaluation(Section):
    """Greedy decoding of the held-out problems."""

    every: PositiveInt = 5
    """Steps between measurements; before and after are always measured."""
    samples: Count = 0
    """Sampled answers to each held-out problem, beside the greedy one; for pass@k."""
    pass_at: tuple[PositiveInt, ...] = ()
    """Each k of pass@k to report, at most ``samples``."""
    stop_at: Share | None = None
    """End the run once the held-out accuracy is at least this."""

    @model_validator(mode="after")
    def _enough_samples(self) -> Evaluation:
        if max(self.pass_at, default=0) > self.samples or bool(self.samples) != bool(self.pass_at):
            raise ValueError(
                f"pass_at={list(self.pass_at)} with samples={self.samples}: pass@k needs at least k samples, "
                "and samples are of no use without it; give both, or neither"
            )
        return self


class Checkpointing(Section):
    """When the run can be resumed from; before the first and after the last step always."""

    every: PositiveInt = 10
    """Steps between checkpoints."""
    keep: PositiveInt = 2
    """How many of the newest are kept."""
    keep_best: Count = 0
    """How many of the best are kept beside them, by held-out accuracy; of equal ones the later."""


class Logging(Section):
    """Beside ``metrics.jsonl``, which is always written."""

    tensorboard: bool = True
    """Write TensorBoard files below ``logs``."""
    rollouts_per_step: Count = 4
    """How many rollouts of each step go to rollouts.jsonl."""


class Cluster(Section):
    """Where the workers run and how long anything may take."""

    address: str | None = None
    """Address of a running Ray cluster; none starts one on this machine for the run."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of each of the policy's processes; 0 shares all cores among them."""
    start_timeout_s: Positive = 180.0
    """For the policy's processes to start, and then to load the model."""
    call_timeout_s: Positive = 3600.0
    """No single call to a worker may take longer."""
    shutdown_timeout_s: Positive = 20.0
    """For the worker to release what it holds; then it is ended."""
