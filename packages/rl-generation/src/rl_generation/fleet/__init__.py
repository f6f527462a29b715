"""Data-parallel replicas of one engine: which may serve, who serves what, what is restarted."""
