"""Installs NeMo Gym for this checkout: one environment with an interpreter of its own, which serves many of its servers."""
