"""The library's version, which checkpoints note."""

__version__ = "0.1.0"
