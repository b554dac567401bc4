"""Public names and their arguments: whoever changes one does so on purpose, with a line in
CHANGELOG.md. `python -m tests.test_signatures` writes the list anew."""

import inspect
import pathlib
import sys

import pytest

from tests.test_docstrings import public_objects

LIST = pathlib.Path(__file__).with_name("signatures.txt")


def signature_of(value):
    """Return names, kinds and defaults of arguments, without types."""
    try:
        found = inspect.signature(value)
    except ValueError:  # an enum's, which depends on the version of Python
        return ""
    blank = inspect.Signature.empty
    arguments = [one.replace(annotation=blank) for one in found.parameters.values()]
    return str(found.replace(parameters=arguments, return_annotation=blank))


def signatures():
    """Return a line for each public class, function, method and property that no base class has."""
    lines = (
        name if about.is_property else name + signature_of(about.value)
        for name, about in public_objects().items()
        if about.inherited is None
    )
    return "".join(sorted(f"{line}\n" for line in lines))


def test_public_signatures_change_on_purpose():
    for extra in ("torch", "stable_baselines3", "msgspec", "pyarrow"):
        pytest.importorskip(extra)
    assert signatures().splitlines() == LIST.read_text().splitlines()


if __name__ == "__main__":
    sys.stdout.write(f"{LIST.write_text(signatures()):,} characters\n")
