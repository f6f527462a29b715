"""Takes megatron's process groups out of a policy that is given up.

A model and what wraps it for training refer to each other, so Python frees them only when its collector comes
by, which may be late. Each group has threads of its own, on a CPU ones that wake a hundred times a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

# Of megatron's wrapper: lists of things that hold groups, and what those hold in turn.
_PARTS = ("buffers", "expert_parallel_buffers", "bucket_groups", "expert_parallel_bucket_groups", "buckets")


def forget_groups(wrapped: nn.Module) -> None:
    """Leave no group in the modules and in megatron's wrapper around them, none of which can compute then."""
    for module in wrapped.modules():
        for holder in (module, *_parts(module)):
            held: dict[str, Any] = getattr(holder, "__dict__", {})
            for name, value in list(held.items()):
                if isinstance(value, dist.ProcessGroup) or type(value).__name__ == "ProcessGroupCollection":
                    held[name] = None


def _parts(holder: Any) -> Iterator[Any]:
    for name in _PARTS:
        parts = getattr(holder, "__dict__", {}).get(name)
        for part in parts if isinstance(parts, list) else ():
            yield part
            yield from _parts(part)
