"""How weights get into a model that keeps what it is given for a while, as vLLM's reload by layers does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from rl_generation.vllm.weight_loading import InPlace, LayerwiseReload


class Keeping(nn.Module):
    """Copies only when both of its parameters have come, which may be in different buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.kept: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.kept |= dict(weights)
        if set(self.kept) == {"a", "b"}:
            for name, tensor in self.kept.items():
                self.get_parameter(name).copy_(tensor)


def test_f1_a_layer_that_comes_in_several_buckets_is_not_read_from_a_bucket_that_is_gone() -> None:
    """The first bucket's memory holds another one when the layer is complete."""
    model, bucket = Keeping(), torch.ones(4)
    way = LayerwiseReload(model, None)
    way.load([("a", bucket)])
    bucket.fill_(9.0)
    way.load([("b", bucket)])
    assert model.a.tolist() == [1.0] * 4
    assert model.b.tolist() == [9.0] * 4


def test_a_model_that_copies_at_once_is_given_the_buckets_own_memory() -> None:
    model, bucket = Keeping(), torch.ones(4)
    InPlace(model).load([("a", bucket)])
    assert model.kept["a"].data_ptr() == bucket.data_ptr()
