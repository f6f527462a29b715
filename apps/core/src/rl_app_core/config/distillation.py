"""What distillation is configured by."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from .job import JobConfig
from .section import File, NonNegative, Section, Share
from .training import Training


class Distillation(Training):
    """On-policy distillation: the student answers, and a teacher judges every token."""

    steps: PositiveInt = 40
    """Of the whole run, resumed parts included."""
    prompts_per_step: PositiveInt = 64
    """Rows taken by a step."""
    group_size: PositiveInt = 1
    """Rollouts of each prompt."""
    objective: Literal["topk", "opd"] = "topk"
    """``topk`` compares the distributions of student and teacher over the teacher's most likely tokens;
    ``opd`` takes the teacher's opinion of each sampled token for its advantage."""
    top_k: PositiveInt = 64
    """With ``topk``: how many of the teacher's most likely tokens, at each position."""
    divergence: Literal["forward", "reverse", "mixed"] = "reverse"
    """With ``topk``: ``forward`` (weighted by the teacher's probabilities), ``reverse`` (by the student's) or
    ``mixed``."""
    forward_weight: Share = 0.5
    """With ``mixed``: weight of the forward part."""
    outside: Literal["tail", "zero"] = "tail"
    """With ``topk``: all other tokens are one more bin (``tail``), or left out (``zero``)."""
    normalization: Literal["token", "sequence"] = "token"
    """What the loss is a mean over."""
    clip_low: Share = 0.2
    """With ``opd``: how far the importance ratio may fall below 1."""
    clip_high: NonNegative = 0.28
    """With ``opd``: how far it may rise above 1."""

    @model_validator(mode="after")
    def _what_is_given_is_read(self) -> Distillation:
        if self.objective == "opd":
            self.has_no_effect("with objective=opd", "divergence", "forward_weight", "outside")
        else:
            self.has_no_effect("with objective=topk", "clip_low", "clip_high")
        if self.divergence != "mixed":
            self.has_no_effect(f"with divergence={self.divergence}", "forward_weight")
        return self


class TeacherSource(Section):
    """Where a teacher comes from: exactly one of ``recipe``, ``run`` and ``model``."""

    recipe: str | None = None
    """A recipe of the GRPO job, shipped or a file: the teacher is trained by it first, in RUN_DIR/teacher."""
    run: File | None = None
    """Directory of an earlier run of the GRPO job; its newest checkpoint is the teacher."""
    model: File | None = None
    """A directory in Hugging Face format."""

    @model_validator(mode="after")
    def _one_source(self) -> TeacherSource:
        given = [name for name in ("recipe", "run", "model") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "give exactly one of recipe (a GRPO job to train it by), run (a directory of one) and model "
                f"(a Hugging Face directory), got {' and '.join(given) or 'none'}"
            )
        return self


class Teacher(TeacherSource):
    """The teacher: exactly one of ``recipe``, ``run`` and ``model``, and how it is asked."""

    engine: Literal["policy", "vllm"] = "policy"
    """``policy`` computes as the student does, in a process of its own; ``vllm`` is a replica of that
    engine."""
    micro_batch_size: PositiveInt = 16
    """Rows that go through the teacher at once."""


class DistillationConfig(JobConfig):
    """One run of on-policy distillation."""

    command: ClassVar[str] = "distill"

    algorithm: Distillation = Distillation()
    teacher: Teacher
    teachers: Annotated[dict[str, TeacherSource], Field(default_factory=dict)]
    """Teachers by the name of an environment, for its rows alone: ``{NAME: {model: DIR}}``, with the keys of
    ``teacher``. The rows of all others go to ``teacher``."""
