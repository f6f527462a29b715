"""Seeds that differ where they must, whatever random generator takes them in.

Torch's CPU generator keeps the low 32 bits of a seed only, so seeds such as ``step << 32 | row`` would repeat
themselves every step. Mixing spreads all 64 bits over all others first.
"""

from __future__ import annotations

_MASK = 2**64 - 1


def mixed(value: int) -> int:
    """A bijection of [0, 2**64) in which every bit of the input moves half of the output's.

    SplitMix64's finaliser: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def request_seed(seed: int | None) -> int | None:
    """What vLLM gets for a request's seed in [0, 2**63); ``None`` leaves it to the engine's own state."""
    return None if seed is None else mixed(seed) >> 1


def engine_seed(seed: int, replica: int) -> int:
    """Of a whole engine, in [0, 2**31): replicas of one job must not sample the same numbers."""
    return mixed(mixed(seed & _MASK) ^ replica) >> 33
