"""Buffers with the interfaces of other libraries: import one under that library's name."""
