"""Helpers that know nothing of replay: base classes, checks, random bits, names, signals."""
