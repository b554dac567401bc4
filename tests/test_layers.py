"""The architecture: a package imports only from earlier packages, and a call enters few
functions."""

import ast
import graphlib
import pathlib
import re
import tomllib

import jax
import numpy as np
import pytest

import jaxreplay
from tests.mutations import MUTATIONS
from tests.support.replays import entered_by, output_of
from tests.support.steps import nth, plain_step

ROOT = pathlib.Path(jaxreplay.__file__).parent
# A package, or a file at the top level, may import from the earlier lines. Samplers and views do
# not import from each other.
PACKAGES = (
    "_util _version",
    "types autoreset",
    "targets storage",
    "samplers views",
    "buffers",
    "distributed",
    "inspection",
    "checkpoint torch",
    "host",
    "datasets actors",
    "stateful",
    "sb3 compat",
    "jaxreplay",
    "__main__",
)


def name_of(path):
    """Return a module's name in the package, "jaxreplay" for the package itself."""
    parts = ("jaxreplay", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__").removeprefix("jaxreplay.")


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports(name):
    """Yield the package's modules that a module imports."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            found = [
                alias.name for alias in getattr(node, "names", ()) if isinstance(node, ast.Import)
            ]
        for one in found:
            if package_of(one) == "jaxreplay":
                inner = one.removeprefix("jaxreplay.")
                yield inner if inner in MODULES else inner.rpartition(".")[0] or "jaxreplay"


def package_of(module):
    return module.split(".")[0]


def test_packages_import_only_from_those_before_them():
    level_of = {name: level for level, names in enumerate(PACKAGES) for name in names.split()}
    assert set(level_of) == {*map(package_of, MODULES)}
    for name in MODULES:
        for imported in imports(name):
            if (own := package_of(name)) != (other := package_of(imported)):
                assert level_of[other] < level_of[own], f"{name} imports {imported}"


def test_no_package_has_a_circle():
    graph = {
        name: {one for one in imports(name) if package_of(one) == package_of(name)} - {name}
        for name in MODULES
    }
    graphlib.TopologicalSorter(graph).prepare()  # the error names the circle


def test_each_file_of_tests_is_in_one_part():
    here = pathlib.Path(__file__).parent
    makefile = (here.parent / "Makefile").read_text()
    parts = re.findall(r"^PART_(?!gpu|tpu)\w+ := (.*)$", makefile, re.MULTILINE)
    named = [f"test_{name}.py" for names in parts for name in names.split()]
    files = here.rglob("test_*.py")
    assert sorted(named) == sorted(path.name for path in files if path.parent.name != "aot")


def test_each_mutation_changes_one_place():
    for what, file, code, _, tests in MUTATIONS:
        assert (ROOT / file).read_text().count(code) == 1, what
        assert all((ROOT.parent / "tests" / name).exists() for name in tests.split()), what


def lines_of_code(path):
    """Count the lines without blank lines, comments and docstrings."""
    source = path.read_text()
    prose = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for number in range(node.lineno, node.end_lineno + 1)
    }
    return sum(
        number not in prose and line.strip()[:1] not in ("", "#")
        for number, line in enumerate(source.splitlines(), 1)
    )


def test_the_reading_order_is_short():
    text = (ROOT.parent / "CONTRIBUTING.md").read_text()
    order = text[text.index("## Reading order") : text.index("## Where things go")]
    paths = [ROOT.parent / name for name in re.findall(r"^\d\. `(\S+)`", order, re.MULTILINE)]
    assert len(paths) == 6
    assert sum(map(lines_of_code, paths)) <= 900


def test_the_remainder_operator_is_used_in_one_file():
    divide = {
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
    }
    # The second divides capacities once, in Python, when it checks them.
    assert divide == {"storage.ring", "_util.checks"}


def test_the_oldest_versions_that_are_asked_for_are_tested():
    """Those of the core and of checkpoints; `make matrix` runs those of the other extras."""
    tested = (ROOT.parent / "constraints-oldest.txt").read_text()
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"] + project["optional-dependencies"]["checkpoint"]:
        assert re.search(rf"^{line.replace('>=', '==')}(\.|$)", tested, re.MULTILINE), line


# Maximal numbers of the package's functions that one call enters while it is traced, and of their
# modules. They bound how much code a reader of the call has to read.
MOST_STOPS = {
    ("uniform", "add"): (34, 11),
    ("uniform", "sample"): (66, 15),
    ("prioritized", "add"): (52, 13),
    ("prioritized", "sample"): (67, 17),
    ("prioritized", "update_priorities"): (45, 11),
}


@pytest.mark.no_xla
@pytest.mark.parametrize(("kind", "name"), MOST_STOPS)
def test_a_call_enters_few_functions(kind, name):
    buffer = getattr(jaxreplay, kind)(
        capacity=64, num_envs=4, batch_size=8, autoreset="same_step_no_final_obs"
    )
    step = plain_step(np.zeros(4, np.float32), obs=np.zeros((4, 3), np.float32))
    state = jax.eval_shape(buffer.init, nth(step, 0))
    arguments = {
        "add": (step,),
        "sample": (jax.eval_shape(jax.random.key, 0),),
        "update_priorities": (jaxreplay.types.Index(*np.zeros((2, 8), np.int32)), np.ones(8)),
    }

    def call():
        jax.eval_shape(lambda *given: getattr(buffer, name)(*given), state, *arguments[name])

    call()  # fills caches
    check_enters_few(call, *MOST_STOPS[kind, name])


def check_enters_few(call, most_functions, most_modules):
    """Check how many functions of the package, of how many modules, a call enters in its thread."""
    entered = {
        (code.co_filename, code.co_qualname)
        for code in entered_by(call)
        if code.co_name != "__annotate__"  # Python 3.14 evaluates annotations by functions
    }
    assert len(entered) <= most_functions
    assert len({file for file, _ in entered}) <= most_modules


@pytest.mark.parametrize(("name", "most"), [("save", (101, 24)), ("restore", (120, 34))])
def test_a_save_and_a_restore_enter_few_functions(name, most, tmp_path):
    """The second save of a run, in the thread that calls it, and a restore by a new object."""
    checkpoint = pytest.importorskip("jaxreplay.checkpoint")
    buffer = jaxreplay.uniform(capacity=64, num_envs=4, batch_size=8, autoreset="next_step")
    step = plain_step(np.zeros(4, np.float32), obs=np.zeros((4, 3), np.float32))
    run = jaxreplay.jit(buffer)
    state = run.add(run.init(example := nth(step, 0)), step)
    first, other = (checkpoint.Checkpointer(tmp_path, buffer) for _ in range(2))
    first.save(state)
    first.restore(example)
    state = run.add(state, step)
    calls = {"save": lambda: first.save(state), "restore": lambda: other.restore(example)}
    check_enters_few(calls[name], *most)


def test_the_top_level_shows_what_users_type():
    """What needs an extra is imported at its first use. A star import leaves `open` as it is."""
    assert len(jaxreplay.__all__) <= 52
    names = {*jaxreplay.__all__, "open"} - {"__version__"}
    there = {name for name, value in vars(jaxreplay).items() if name[0] != "_"}
    submodules = {path.stem for path in ROOT.iterdir()}  # attributes once they are imported
    assert names <= there <= names | submodules
    lazy = {"checkpoint", "datasets", "sb3", "torch"}
    assert {name for name in dir(jaxreplay) if name[0] != "_"} == names | lazy
    code = "import sys, jaxreplay as jr; sys.modules['torch'] = None; print(jr.datasets.from_arrays"
    printed = output_of(f"{code}, hasattr(jr, 'torch'))")
    assert re.fullmatch("<function from_arrays .*> False", printed)


def test_importing_the_library_imports_no_extra():
    extras = "torch gymnax ray flax optax tensorstore google_crc32c minari stable_baselines3"
    code = f"import sys, jaxreplay; print([m for m in '{extras}'.split() if m in sys.modules])"
    assert output_of(code) == "[]"


def test_each_promise_names_tests_that_there_are():
    page = (ROOT.parent / "docs" / "checkpoint_failures.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    files = pathlib.Path(__file__).parent.rglob("test_*.py")
    text = "\n".join(path.read_text() for path in files)
    assert len(named) > 15
    assert not named - set(re.findall(r"^def (test_\w+)\(", text, re.M))
