"""vLLM's executors, in whose processes nothing outlives its owner and nobody waits for a garbage collector.

They run in the engine's process. Being classes of their own, they also keep vLLM on CPUs from putting another
process between the engine and its only worker.
"""

from __future__ import annotations

import gc
import os

from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.v1.executor import multiproc_executor, uniproc_executor

from .arguments import OWNER
from .parentage import die_with_parent
from .scratch import meeting_there


class OneProcess(uniproc_executor.UniProcExecutor):
    """The worker lives in the engine's process."""

    def _init_executor(self) -> None:
        owner = self.vllm_config.additional_config[OWNER]
        die_with_parent(owner)
        self._is_alone = os.getpid() != owner
        if self._is_alone:
            # vLLM collects several times on its way up, each time through everything that was imported.
            gc.freeze()
        with meeting_there(uniproc_executor):
            super()._init_executor()

    def shutdown(self) -> None:
        """End the worker, and this process with it where it is for nothing else."""
        super().shutdown()
        if self._is_alone:
            destroy_model_parallel()
            destroy_distributed_environment()
            # What is left of vLLM's own end takes seconds to look for garbage in a process that goes away.
            os._exit(0)


class ManyProcesses(multiproc_executor.MultiprocExecutor):
    """One process per worker, each a child of the engine's."""

    def _init_executor(self) -> None:
        owner = self.vllm_config.additional_config[OWNER]
        die_with_parent(owner)
        if os.getpid() != owner:
            gc.freeze()
        with meeting_there(multiproc_executor):
            super()._init_executor()
