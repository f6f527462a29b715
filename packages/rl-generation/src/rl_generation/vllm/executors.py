"""vLLM's executors, whose processes end with the process that wants the engine.

They run in the engine's process. Being classes of their own, they also keep vLLM on CPUs from putting another
process between the engine and its only worker.
"""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from .arguments import OWNER
from .parentage import die_with_parent


class OneProcess(UniProcExecutor):
    """The worker lives in the engine's process."""

    def _init_executor(self) -> None:
        die_with_parent(self.vllm_config.additional_config[OWNER])
        super()._init_executor()


class ManyProcesses(MultiprocExecutor):
    """One process per worker, each a child of the engine's."""

    def _init_executor(self) -> None:
        die_with_parent(self.vllm_config.additional_config[OWNER])
        super()._init_executor()
