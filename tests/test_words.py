"""One word for one thing: a name has one meaning in the package."""

import ast
import collections

import pytest

from tests.test_layers import ROOT

FILES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT).parts[0] not in ("compat", "sb3")  # which have the names of others
}
# Short words that once meant several things: one function may have each as its name.
SHORT = ["made", "mapped", "own", "placed", "planned", "put", "restored", "split", "taken"]
# The word to say in place of one that means something else in JAX, or in this package.
INSTEAD = {
    "trace": "stamp, of a write",
    "traces": "stamps",
    "traced": "stamped",
    "trace_of": "stamp_of",
    "generation_of": "manifest_of",
    "generations": "manifests",
}


def places_of(kind):
    """Return the files in which each name is one of a kind of statement."""
    found = collections.defaultdict(list)
    for file, tree in FILES.items():
        for node in ast.walk(tree) if kind is ast.ClassDef else tree.body:
            if isinstance(node, kind):
                found[node.name].append(file)
    return found


def test_no_two_classes_have_one_name():
    places = places_of(ast.ClassDef)
    assert len(places) > 100
    assert not {name: files for name, files in places.items() if len(files) > 1}


@pytest.mark.parametrize("word", SHORT)
def test_one_function_has_a_short_word_as_its_name(word):
    assert len(places_of(ast.FunctionDef)[word]) <= 1, places_of(ast.FunctionDef)[word]


@pytest.mark.parametrize("word", INSTEAD)
def test_a_word_with_another_meaning_is_no_name(word):
    places = {
        file
        for file, tree in FILES.items()
        for node in ast.walk(tree)
        if word in (getattr(node, field, None) for field in ("name", "arg", "id", "attr"))
    }
    assert not places, f"say {INSTEAD[word]}"
