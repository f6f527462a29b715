"""What TensorRT-LLM's workers need of the environment of the process that starts them: they inherit it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_FIXED: Mapping[str, str] = {
    # The workers are Ray's and use no MPI.
    "TLLM_DISABLE_MPI": "1",
    # A refit's copies stay on one stream, in order.
    "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",
    # TensorRT-LLM itself counts GPUs as the machine does.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}


def workers_environment(inherited: Mapping[str, str], executable: str) -> dict[str, str | None]:
    """Variables to set, and with ``None`` to unset.

    Args:
        inherited: of this process.
        executable: its interpreter. Kernels that are compiled at run time find their headers by asking the
            first ``pip`` on the path.
    """
    changes: dict[str, str | None] = dict(_FIXED)
    folder = str(Path(executable).parent)
    path = inherited.get("PATH", "")
    if path.split(os.pathsep)[0] != folder:
        changes["PATH"] = os.pathsep.join([folder, path]) if path else folder
    if inherited.get("CUDA_VISIBLE_DEVICES") == "":
        # Ray hides all GPUs from an actor that asks for none; its workers do ask.
        changes["CUDA_VISIBLE_DEVICES"] = None
    return changes
