"""Ways for the bytes of a bucket to get from the policy's process into an engine's."""
