"""The token-faithful OpenAI server of engines that bring none, and what every backend's server shares."""
