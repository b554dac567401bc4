"""Public names and their arguments: whoever changes one does so on purpose, with a line in
CHANGELOG.md. `python -m tests.test_signatures` writes the list anew."""

import inspect
import pathlib
import re
import sys

import pytest

import jaxreplay
from jaxreplay import actors
from tests.test_docstrings import public_objects

ROOT = pathlib.Path(jaxreplay.__file__).parents[1]
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
    return "".join(sorted(f"{line}\n" for line in [*lines, *signatures_of_actors()]))


def signatures_of_actors():
    """Yield a line for each name of the reference. Users make a `Feed`, `start` the others."""
    page = (ROOT / "docs" / "api" / "actors.md").read_text()
    conf = (ROOT / "docs" / "conf.py").read_text()
    members = dict(re.findall(r'"jaxreplay\.actors\.(\w+)": "(.*)"', conf))
    for name in re.findall(r"^   (\w+)$", page, re.MULTILINE):
        value, where = getattr(actors, name), f"jaxreplay.actors.{name}"
        yield where if name in ("Actor", "Actors") else where + signature_of(value)
        for member in members[name].split(", ") if inspect.isclass(value) else ():
            found = getattr(value, member)
            is_property = isinstance(found, property)
            yield f"{where}.{member}" + ("" if is_property else signature_of(found))


def test_public_signatures_change_on_purpose():
    for extra in ("torch", "stable_baselines3", "msgspec", "pyarrow"):
        pytest.importorskip(extra)
    assert signatures().splitlines() == LIST.read_text().splitlines()


def test_each_module_is_public_or_said_not_to_be():
    modules = {path.stem for path in (ROOT / "jaxreplay").iterdir() if path.stem[0].isalpha()}
    page = (ROOT / "docs" / "versioning.md").read_text().partition("## Experimental")[0]
    said = set(re.findall(r"`jaxreplay\.(\w+)`", page))
    adapters = (ROOT / "docs" / "api" / "adapters.md").read_text()
    listed = LIST.read_text() + adapters
    public = set(re.findall(r"(?:^|automodule:: )jaxreplay\.(\w+)", listed, re.MULTILINE))
    assert modules - public - {"py"} == said


if __name__ == "__main__":
    sys.stdout.write(f"{LIST.write_text(signatures()):,} characters\n")
