"""The workspace lock in a form that names no host, and the pinned requirement files exported from it."""
