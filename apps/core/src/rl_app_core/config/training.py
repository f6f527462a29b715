"""How a trainer steps: what every method has in common."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt, model_validator

from .section import Beta, Count, NonNegative, Positive, Section, Share


class Training(Section):
    """Steps, batches, optimizer and limits of a trainer, whatever its method."""

    steps: PositiveInt = 30
    """Of the whole run, resumed parts included."""
    prompts_per_step: PositiveInt = 32
    """Rows taken by a step."""
    group_size: PositiveInt = 8
    """Rollouts of each prompt; the group that advantages are computed in."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates, each on its part of the step's rollouts; the parts are as equal as can be."""
    max_epochs: PositiveInt | None = None
    """Passes over the rows after which the run ends, if its steps are not done before."""
    learning_rate: NonNegative = 2e-4
    """After the warm-up; 0 changes nothing, as a control."""
    warmup_steps: Count = 5
    """Steps of linear rise to it."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up, until the last step."""
    final_share: Share = 0.0
    """Share of the learning rate that a decay ends at."""
    adam_betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    weight_decay: NonNegative = 0.0
    """Of matrices, never of norms and biases."""
    gradient_clip: Positive = 1.0
    """Largest norm of the gradient."""
    max_infra_failures: Count = 5
    """Rollouts of one step that the infrastructure may fail before the run ends."""
    max_data_failures_share: Share = 0.5
    """Share of a step's rollouts that may fail for the row's or the environment's own fault."""
    max_skipped_steps: Count = 10
    """Steps in a row that may train nothing, because no sample is usable or the rewards of every group are
    all equal; one more ends the run. Steps that are all right do not count."""

    def has_no_effect(self, without: str, *names: str) -> None:
        """Refuse keys that differ from their defaults although nothing reads them.

        Raises:
            ValueError: naming the first of them, and ``without`` what it has no effect.
        """
        for name in names:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default:
                raise ValueError(f"{name}={value} has no effect {without}; leave it out")

    @model_validator(mode="after")
    def _a_decay_has_an_end(self) -> Training:
        if self.final_share and self.decay == "constant":
            raise ValueError(
                f"final_share={self.final_share} has no effect with decay=constant; set decay to linear or "
                "cosine, or leave it out"
            )
        return self
