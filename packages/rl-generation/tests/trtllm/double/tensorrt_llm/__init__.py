"""A DOUBLE of TensorRT-LLM, for tests on machines without a GPU. Nothing here is NVIDIA's code.

It has the names that ``../../contract.json`` writes down and refuses every other; its model is a real
transformers model on the CPU, so that tokens and log-probabilities are real. The environment variable
``TRTLLM_DOUBLE_RELEASE`` says which release it stands for.
"""

from ._double.release import RELEASE
from ._torch.async_llm import AsyncLLM
from .sampling_params import SamplingParams

__version__ = RELEASE
IS_A_DOUBLE = True

__all__ = ["AsyncLLM", "SamplingParams", "__version__"]
