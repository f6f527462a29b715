"""What the workspace needs to look after itself; never installed, run from the root with `python -m tools.…`."""
