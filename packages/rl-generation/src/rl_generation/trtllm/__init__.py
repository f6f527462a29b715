"""Rollouts by TensorRT-LLM. Importing this imports neither TensorRT-LLM nor Ray."""
