"""What the workspace needs to look after itself; run from the root with `python -m`, never installed."""
