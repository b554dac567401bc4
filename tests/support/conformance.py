"""The suite of `benchmarks/conformance`, whose modules import each other by name."""

import pathlib
import sys

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks" / "conformance"
sys.path.append(str(FOLDER))

from properties import ALL as PROPERTIES  # noqa: E402, F401
from replay import NotOffered, adapters_of  # noqa: E402, F401
