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

import jaxreplay
from jaxreplay.buffers import BufferOptions, ItemOptions

ROOT = pathlib.Path(jaxreplay.__file__).parent
PACKAGES = (
    "autoreset buffers checkpoint datasets distributed inspection samplers sb3 targets torch types"
    " views"
)
MODULES = ["jaxreplay", *(f"jaxreplay.{name}" for name in PACKAGES.split())]
ODD_START = re.compile(r"(Of|What|Where|Whether|As|Beside|Who|That)\b")
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example", "References")
ARRAY = re.compile(r"\b(Array|ndarray|Tensor)\b")
ARRAYS = {"mask", "priority", "reward", "terminated", "truncated", "value", "next_value"}


class Public(typing.NamedTuple):
    """Public class or function, and the docstring that a method has of a base class, or None."""

    value: typing.Any
    inherited: str | None = None
    is_property: bool = False  # which needs no verb


def public_of(module_name):
    """Yield the name and value of each public class and function of a module."""
    try:
        module = importlib.import_module(module_name)
    except ImportError:  # its extra is not installed
        return
    names = getattr(module, "__all__", [name for name in vars(module) if name[0] != "_"])
    names = [*names, "open"] if module is jaxreplay else names  # a star import leaves it out
    for name in names:
        value = getattr(module, name)
        # A file without `__all__` has also what it imports for its own use.
        is_own = hasattr(module, "__all__") or hasattr(module, "__path__")
        if inspect.isclass(value) or inspect.isfunction(value):
            home = value.__module__
            if home == module_name or (is_own and home.startswith("jaxreplay")):
                yield f"{module_name}.{name}", value


def unwrapped(member):
    """Return the function of a class's member: of a property or class method, too."""
    for name in ("__func__", "fget", "func"):
        member = getattr(member, name, None) or member
    return member


def methods_of(owner):
    """Yield the name of each public method of a class, and the method."""
    for name, member in vars(owner).items():
        function = unwrapped(member)
        if name[0] == "_" or not inspect.isfunction(function):
            continue
        if function.__module__.startswith("jaxreplay"):
            bases = (vars(base)[name] for base in owner.__mro__[1:] if name in vars(base))
            above = next((unwrapped(base).__doc__ for base in bases), None)
            yield name, Public(function, above, not callable(member))


def public_objects():
    """Return each public class, function and method, once, by its name."""
    named = {value: name for module in reversed(MODULES) for name, value in public_of(module)}
    found = {name: Public(value) for value, name in named.items()}
    for name, (value, *_) in [*found.items()]:
        if inspect.isclass(value):
            found |= {f"{name}.{method}": one for method, one in methods_of(value)}
    return found


PUBLIC = public_objects()


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
    found = re.split(r"^  \*{0,2}(\w+)(?: \([^)]*\))?:", "\n" + section, flags=re.MULTILINE)[1:]
    texts = (" ".join(text.split()) for text in found[1::2])
    return dict(zip(found[::2], texts, strict=True))


def parameters(value):
    """Yield the name and annotation of what a call takes, and whether it has a default."""
    if inspect.isclass(value) and dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if not field.name.startswith("_"):
                yield field.name, field.type, field.default is not dataclasses.MISSING
        return
    if typing.is_typeddict(value) and value not in (BufferOptions, ItemOptions):
        yield from ((name, None, True) for name in value.__annotations__)
        return
    if inspect.isclass(value) and "__init__" not in vars(value) and not issubclass(value, tuple):
        return
    for one in inspect.signature(value).parameters.values():
        if one.name not in ("self", "cls") and not one.name.startswith("_"):
            yield one.name, one.annotation, one.default is not one.empty


def raised(function):
    """Return the names of the errors in a function's own raise statements."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    inner = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda)][1:]
    hidden = {node for one in inner for node in ast.walk(one)}
    own = (node.exc for node in {*ast.walk(tree)} - hidden if isinstance(node, ast.Raise))
    calls = (error.func for error in own if isinstance(error, ast.Call))
    return {name.id for name in calls if isinstance(name, ast.Name)}


def complaints(name, public):
    """Yield what a public docstring lacks."""
    value, inherited, is_property = public
    doc = inspect.cleandoc(value.__doc__ or "")
    if not doc:
        yield from () if inherited else ("has no docstring",)
        return
    first = doc.partition("\n\n")[0]
    if ODD_START.match(first):
        yield f"begins with {first.split()[0]}"
    if first[-1] not in ".:":
        yield "the first sentence does not end"
    parts = sections(doc)
    yield from (f"a section {part}" for part in parts if part and part not in SECTIONS)
    if inherited:  # it explains the arguments already
        return
    known = entries(parts.get("Args", "")) | entries(parts.get("Attributes", ""))
    takes = list(parameters(value))
    for parameter, annotation, has_default in takes:
        if parameter not in known:
            yield f"{parameter} has no entry"
            continue
        text, said = known[parameter], str(annotation)
        is_array = ARRAY.search(said) and "Callable" not in said and parameter != "key"
        if (is_array or parameter in ARRAYS) and not re.search(r"\[.*\]", text):
            yield f"{parameter} has no shape"
        if has_default and "efault" not in text:
            yield f"{parameter} has no default"
    yield from (f"{entry} is no argument" for entry in known.keys() - {one[0] for one in takes})
    if inspect.isfunction(value) and not is_property:
        returns = inspect.signature(value).return_annotation
        says_it = "Returns" in parts or re.match(r"(Return|Yield|Iterate)\b", first)
        if returns not in (None, "None", inspect.Signature.empty) and not says_it:
            yield "does not say what it returns"
        lacking = raised(value) - entries(parts.get("Raises", "")).keys()
        yield from (f"{error} is not in Raises" for error in sorted(lacking))
    is_result = inspect.isclass(value) and ("Attributes" in parts or issubclass(value, Exception))
    if name.count(".") == 1 and not is_result and not re.search("^ *>>> ", doc, re.MULTILINE):
        yield "has no example"


def test_public_docstrings_explain_themselves():
    assert len(PUBLIC) > 400
    assert not [f"{name} {said}" for name, one in PUBLIC.items() for said in complaints(name, one)]


def test_a_configuration_shows_its_arguments():
    shown = inspect.signature(jaxreplay.Prioritized).parameters
    assert " ".join(shown) == "alpha beta stratified new_priority fan_out"
    assert shown["alpha"].default == 0.6


def test_every_public_name_is_found():
    for name in jaxreplay.__all__:
        value = getattr(jaxreplay, name)
        assert f"jaxreplay.{name}" in PUBLIC or not callable(value)
    assert {"jaxreplay.samplers.Sampler.sample", "jaxreplay.ReplayBuffer.length"} <= {*PUBLIC}


def test_shared_options_are_explained_alike():
    said = collections.defaultdict(set)
    for name, (factory, *_) in PUBLIC.items():
        takes = inspect.signature(factory).parameters if inspect.isfunction(factory) else ()
        if name.count(".") == 1 and {*BufferOptions.__annotations__} <= {*takes}:
            known = entries(sections(inspect.cleandoc(factory.__doc__))["Args"])
            for option in BufferOptions.__annotations__:
                said[option].add(known[option])
    assert {*said} == {*BufferOptions.__annotations__}
    assert {len(texts) for texts in said.values()} == {1}


def test_every_docstring_begins_with_a_verb_or_the_thing():
    nodes = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for path in ROOT.rglob("*.py"):
        found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, nodes))
        docs = [ast.get_docstring(node) or "" for node in found]
        assert not [doc.splitlines()[0] for doc in docs if ODD_START.match(doc)], path


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
    assert set(complaints("jaxreplay.gae", Public(_bad))) == {
        "begins with Of",
        "a section Fields",
        "array has no shape",
        "number has no entry",
        "other is no argument",
        "does not say what it returns",
        "ValueError is not in Raises",
        "has no example",
    }
