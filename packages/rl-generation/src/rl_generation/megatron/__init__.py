"""Rollouts from the policy's own megatron-core model: shared weights, key-value cache, no server."""

from .engine import MegatronGeneration

__all__ = ["MegatronGeneration"]
