"""HTTP libraries behind one interface."""
