"""Rollouts by vLLM. Importing this imports neither vLLM nor Ray."""
