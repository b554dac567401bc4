"""Public docstrings explain every argument, array, default and error; all begin with a verb or with
the thing itself."""

import ast
import collections
import dataclasses
import importlib
import inspect
import pathlib
import re
import textwrap
import typing

import jax
import pytest

import jaxreplay
from jaxreplay.buffers.replay_buffer import BufferOptions

ROOT = pathlib.Path(jaxreplay.__file__).parent
PACKAGES = (
    "autoreset",
    "buffers",
    "checkpoint",
    "datasets",
    "distributed",
    "inspection",
    "samplers",
    "sb3",
    "targets",
    "torch",
    "types",
    "views",
)
MODULES = ["jaxreplay", *(f"jaxreplay.{name}" for name in PACKAGES)]
ODD_START = re.compile(r"(Of|What|Where|Whether|As|Beside|Who|That)\b")
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example", "References")
ARRAY = re.compile(r"\b(Array|ndarray|Tensor)\b")
ARRAYS = {"mask", "priority", "reward", "terminated", "truncated", "value", "next_value"}


def public_objects():
    """Yield each public class and function, and each public method, once, with its name."""
    seen = set()
    for module_name in MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # its extra is not installed
            continue
        for name in getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")]):
            value = getattr(module, name)
            is_ours = getattr(value, "__module__", "").startswith("jaxreplay")
            if not (inspect.isclass(value) or inspect.isfunction(value)) or not is_ours:
                continue
            is_package = hasattr(module, "__path__")
            if "__all__" not in vars(module) and not is_package and value.__module__ != module_name:
                continue  # imported for its own use
            if value in seen:
                continue
            seen.add(value)
            yield f"{module_name}.{name}", value
            if inspect.isclass(value):
                for method, function in vars(value).items():
                    function = unwrapped(function)
                    if (
                        not method.startswith("_")
                        and inspect.isfunction(function)
                        and function.__module__.startswith("jaxreplay")
                    ):
                        yield f"{module_name}.{name}.{method}", function


def unwrapped(member):
    """Return the function of a class's member: of a property or class method, too."""
    for name in ("__func__", "fget", "func"):
        member = getattr(member, name, None) or member
    return member


def inherited(name):
    """Return the docstring that a public method has of a base class, or None."""
    module_name, _, rest = name.partition(".")
    *above, last = rest.split(".")
    owner = importlib.import_module(module_name)
    for part in above:
        owner = getattr(owner, part)
    bases = owner.__mro__[1:] if inspect.isclass(owner) else ()
    docs = (unwrapped(vars(base)[last]).__doc__ for base in bases if last in vars(base))
    return next(docs, None)


PUBLIC = dict(public_objects())


def sections(doc):
    """Split a docstring into its sections; the text before them is named ""."""
    found, name = collections.defaultdict(list), ""
    for line in doc.splitlines():
        if match := re.fullmatch(r"(\w+):", line):
            name = match[1]
        else:
            found[name].append(line)
    return {name: "\n".join(lines) for name, lines in found.items()}


def entries(section):
    """Return the text of each `name: text` of a section, by name."""
    found = re.split(r"^  (\*{0,2}\w+)(?: \([^)]*\))?:", "\n" + section, flags=re.MULTILINE)[1:]
    return {
        name.lstrip("*"): " ".join(text.split())
        for name, text in zip(found[::2], found[1::2], strict=True)
    }


def parameters(value):
    """Yield the name, annotation and default of what a call takes."""
    if inspect.isclass(value) and dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if not field.name.startswith("_"):
                yield (
                    field.name,
                    field.type,
                    inspect.Parameter.empty
                    if field.default is dataclasses.MISSING
                    else field.default,
                )
        return
    if inspect.isclass(value) and "__init__" not in vars(value) and not issubclass(value, tuple):
        return
    for one in inspect.signature(value).parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.VAR_KEYWORD and typing.get_origin(one.annotation) is typing.Unpack:
            for name in BufferOptions.__annotations__:
                yield name, None, inspect.Parameter.empty
        elif not one.name.startswith("_"):
            yield one.name, one.annotation, one.default


def raised(function):
    """Return the names of the errors in a function's own raise statements."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    inner = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda)][1:]
    hidden = {id(n) for one in inner for n in ast.walk(one)}
    return {
        node.exc.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and id(node) not in hidden
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
    }


def complaints(name, value):
    """Yield what a public docstring lacks."""
    above = inherited(name)  # explains the arguments already
    doc = inspect.cleandoc(value.__doc__ or "")
    if not doc:
        if not above:
            yield "has no docstring"
        return
    first = doc.partition("\n\n")[0]
    if ODD_START.match(first):
        yield f"begins with {first.split()[0]}"
    if not re.search(r"[.:]$", first):
        yield "the first sentence does not end"
    parts = sections(doc)
    yield from (f"a section {part}" for part in parts if part and part not in SECTIONS)
    if above:
        return
    known = entries(parts.get("Args", "")) | entries(parts.get("Attributes", ""))
    takes = list(parameters(value))
    for parameter, annotation, default in takes:
        if parameter not in known:
            yield f"{parameter} has no entry"
            continue
        text = known[parameter]
        said = str(annotation)
        is_array = ARRAY.search(said) and "Callable" not in said and parameter != "key"
        if (is_array or parameter in ARRAYS) and not re.search(r"\[.*\]", text):
            yield f"{parameter} has no shape"
        if default is not inspect.Parameter.empty and not re.search(r"[Dd]efault", text):
            yield f"{parameter} has no default"
    yield from (f"{entry} is no argument" for entry in known.keys() - {one[0] for one in takes})
    if inspect.isfunction(value) and not is_property(name):
        returns = inspect.signature(value).return_annotation
        if returns not in (None, "None", inspect.Signature.empty) and not (
            "Returns" in parts or re.match(r"(Return|Yield|Iterate)\b", first)
        ):
            yield "does not say what it returns"
        lacking = raised(value) - entries(parts.get("Raises", "")).keys()
        yield from (f"{error} is not in Raises" for error in sorted(lacking))
    is_result = inspect.isclass(value) and "Attributes" in parts
    needs_example = name.count(".") == 1 and not is_result and not is_error(value)
    if needs_example and not re.search("^ *>>> ", doc, re.MULTILINE):
        yield "has no example"


def is_error(value):
    return inspect.isclass(value) and issubclass(value, Exception)


def is_property(name):
    """Tell a property, which needs no verb, from a method."""
    owner = jaxreplay
    for part in name.split(".")[1:-1]:
        owner = getattr(owner, part)
    return inspect.isclass(owner) and not callable(vars(owner)[name.rpartition(".")[2]])


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_docstring_explains_itself(name):
    found = list(complaints(name, PUBLIC[name]))
    assert not found, f"{name}: " + "; ".join(found)


def test_a_configuration_shows_its_arguments():
    shown = inspect.signature(jaxreplay.Prioritized).parameters
    assert [*shown] == ["alpha", "beta", "normalize_weights", "stratified", "fan_out"]
    assert shown["alpha"].default == 0.6


def test_every_public_name_is_found():
    for name in jaxreplay.__all__:
        value = getattr(jaxreplay, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert f"jaxreplay.{name}" in PUBLIC
    assert {"jaxreplay.samplers.Sampler.sample", "jaxreplay.ReplayBuffer.length"} <= {*PUBLIC}


def test_shared_options_are_explained_alike():
    said = collections.defaultdict(set)
    for factory in (f for n, f in PUBLIC.items() if n.count(".") == 1 and inspect.isfunction(f)):
        hints = typing.get_type_hints(factory)
        if hints.get("shared"):
            known = entries(sections(inspect.cleandoc(factory.__doc__))["Args"])
            for option in BufferOptions.__annotations__:
                if factory is not jaxreplay.items:
                    said[option].add(known[option])
    assert len(said) == len(BufferOptions.__annotations__)
    assert not {option: texts for option, texts in said.items() if len(texts) > 1}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_docstring_begins_with_a_verb_or_the_thing(path):
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [
        (getattr(node, "name", "module"), ast.get_docstring(node) or "")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, nodes)
    ]
    assert not [f"{name}: {doc.splitlines()[0]}" for name, doc in docs if ODD_START.match(doc)]


def _bad(array: jax.Array, number: int = 3) -> int:
    """Of a thing.

    Fields:
      array: One.

    Args:
      array: Numbers.
      other: Another.
    """
    raise ValueError(array, number)


def test_a_bad_docstring_is_noticed():
    assert set(complaints("jaxreplay.gae", _bad)) == {
        "begins with Of",
        "a section Fields",
        "array has no shape",
        "number has no entry",
        "other is no argument",
        "does not say what it returns",
        "ValueError is not in Raises",
        "has no example",
    }
