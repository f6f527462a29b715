"""New weights for a running engine: announced, moved in buckets, checked, acknowledged."""
