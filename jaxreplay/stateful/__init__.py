"""A buffer that keeps its own state, for loops that are not jitted."""
