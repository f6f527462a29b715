"""Files that need vLLM run where it is: see tests/vllm_environment."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_vllm_*.py"]
