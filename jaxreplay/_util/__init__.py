"""Helpers independent of replay: base classes, checks, random bits, names, signals."""
