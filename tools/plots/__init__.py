"""Pictures of runs, for the documentation."""
