"""Which transport reaches which engines."""

from __future__ import annotations

import pytest

from rl_generation.failures import RefitError
from rl_generation.refit.contract import TransportName
from rl_generation.refit.transports.choice import Endpoint, choose

CPU = Endpoint("n1")
CPU_ELSEWHERE = Endpoint("n2")
GPU_0 = Endpoint("n1", "cuda", "GPU-0")
GPU_1 = Endpoint("n1", "cuda", "GPU-1")
GPU_2 = Endpoint("n1", "cuda", "GPU-2")
GPU_ELSEWHERE = Endpoint("n2", "cuda", "GPU-9")


@pytest.mark.parametrize(
    ("source", "targets", "expected"),
    [
        (CPU, [CPU], "shared_memory"),
        (CPU, [CPU, CPU], "shared_memory"),
        (CPU, [CPU, CPU_ELSEWHERE], "object_store"),
        (CPU, [GPU_0], "shared_memory"),
        (GPU_0, [CPU], "shared_memory"),
        (GPU_0, [CPU_ELSEWHERE], "object_store"),
        (GPU_0, [GPU_0], "cuda_ipc"),
        (GPU_0, [GPU_0, GPU_0], "cuda_ipc"),
        (GPU_0, [GPU_1], "collective"),
        (GPU_0, [GPU_1, GPU_2], "collective"),
        (GPU_0, [GPU_1, GPU_ELSEWHERE], "collective"),
        # NCCL refuses two members on one GPU.
        (GPU_0, [GPU_0, GPU_1], "shared_memory"),
        (GPU_0, [GPU_1, GPU_1], "shared_memory"),
        (GPU_0, [GPU_0, GPU_ELSEWHERE], "object_store"),
        (GPU_0, [GPU_1, CPU], "shared_memory"),
        (GPU_0, [GPU_1, CPU_ELSEWHERE], "object_store"),
    ],
)
def test_the_fastest_transport_that_reaches_everyone(
    source: Endpoint, targets: list[Endpoint], expected: TransportName
) -> None:
    assert choose(source, targets) == expected


def test_what_one_side_cannot_do_is_not_chosen() -> None:
    limited = Endpoint("n1", "cuda", "GPU-0", frozenset({"shared_memory", "object_store"}))
    assert choose(GPU_0, [limited]) == "shared_memory"
    assert choose(limited, [GPU_0]) == "shared_memory"
    only_store = Endpoint("n1", transports=frozenset({"object_store"}))
    assert choose(CPU, [CPU, only_store]) == "object_store"


def test_nothing_in_common_is_said_with_a_remedy() -> None:
    far = Endpoint("n2", transports=frozenset({"shared_memory"}))
    with pytest.raises(
        RefitError, match=r"object_store would reach .* can do shared_memory; move them or install"
    ):
        choose(CPU, [far])
    with pytest.raises(RefitError, match="no engine to choose a transport for"):
        choose(CPU, [])


def test_an_endpoint_says_which_gpu_it_means() -> None:
    with pytest.raises(ValueError, match="an endpoint on cuda has the GPU ''"):
        Endpoint("n1", "cuda")
    with pytest.raises(ValueError, match="an endpoint on cpu has the GPU 'GPU-0'"):
        Endpoint("n1", gpu="GPU-0")
