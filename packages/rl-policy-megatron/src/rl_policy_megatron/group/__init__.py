"""One policy over several processes: Ray actors that move in lockstep, and the driver's side of them.

Importing this package imports no Ray; :class:`MegatronPolicyGroup` does, when it is made.
"""

from __future__ import annotations

from .group import MegatronPolicyGroup
from .rank import PolicyRank
from .saving import PendingGroupSave
from .settings import GroupSettings, RankSettings, WeightSource

__all__ = [
    "GroupSettings",
    "MegatronPolicyGroup",
    "PendingGroupSave",
    "PolicyRank",
    "RankSettings",
    "WeightSource",
]
