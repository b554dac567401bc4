"""Modules of flashbax, as its tests import them: our adapter, and the functions of its modules
written with it. And a walk over the names of flashbax's modules."""

import ast
import collections
import fnmatch
import importlib
import inspect

import jax

import jaxreplay.compat.flashbax as fbx
from jaxreplay.compat.flashbax import buffers

LENGTH = 5  # `sample_sequence_length` of the tests that call a module's own functions
PERIOD = 3  # of the one test that sets priorities by such a function
INIT = "experience add_batch_size max_length_time_axis"
SAMPLE = "state key sample_batch_size sample_sequence_length period"

# Of each module: what makes its buffer, and the arguments of its functions.
FUNCTIONS = {
    "trajectory_buffer": (
        fbx.make_trajectory_buffer,
        {
            "init": INIT,
            "add": "state batch",
            "sample": SAMPLE,
            "can_sample": "state min_length_time_axis",
        },
    ),
    "prioritised_trajectory_buffer": (
        fbx.make_prioritised_trajectory_buffer,
        {
            "prioritised_init": f"{INIT} period",
            "prioritised_add": "state batch sample_sequence_length period device",
            "prioritised_sample": SAMPLE,
            "set_priorities": "state indices priorities priority_exponent device",
        },
    ),
    "trajectory_queue": (
        fbx.make_trajectory_queue,
        {
            "init": INIT,
            "add": "state batch",
            "sample": "state sample_sequence_length",
            "can_add": "state add_sequence_length max_length_time_axis",
            "can_sample": "state sample_sequence_length max_length_time_axis",
        },
    ),
}


def function(make, name, arguments):
    """Return a module's function, which calls a method of the buffer that its arguments make. The
    sizes are those of the state."""
    options = inspect.signature(make).parameters
    defaults = {
        "sample_batch_size": 1,
        "sample_sequence_length": 1 if make is fbx.make_trajectory_queue else LENGTH,
        "add_sequence_length": 1,
        "period": PERIOD if name == "set_priorities" else 1,
        "min_length_time_axis": 1,
    }

    def call(*values):
        given = defaults | dict(zip(arguments.split(), values, strict=True))
        if "state" in given:
            layout = given["state"].replay.layout
            given |= {"add_batch_size": layout.num_envs, "max_length_time_axis": layout.length}
        buffer = make(**{key: given[key] for key in options if key in given})
        own = [given[key] for key in arguments.split() if key not in options]
        return getattr(buffer, name.removeprefix("prioritised_"))(*own)

    return call


# The part of flashbax's tree that its tests read.
Tree = collections.namedtuple("Tree", "state indices nodes max_recorded_priority")


def _tree(state):
    sampler, layout = state.replay.sampler, state.replay.layout
    leaves = sampler.tree.sums[0]
    total = sampler.tree.sums[-1].sum(-1, keepdims=True)
    return Tree(state, leaves, total, sampler.max_priority**layout.sampler.alpha)


def get(tree, indices):
    """Return the mass of each item: float32[B]. Leaves are ordered by time, then env."""
    layout = tree.state.replay.layout
    period = PERIOD if layout.window.after == LENGTH - 1 else 1
    env, position = layout.split(indices * period)
    return tree.indices[position * layout.num_envs + env]


def modules():
    """Return the members of each module, and add what the tests want of JAX and of our states."""
    jax.tree_map = jax.tree.map  # newer JAX has none
    fbx.prioritised_trajectory_buffer.PrioritisedTrajectoryBufferState.sum_tree_state = property(
        _tree
    )
    found = {"sum_tree": {"get": get}}
    kinds = ("flat_buffer", "item_buffer", "prioritised_flat_buffer", "prioritised_item_buffer")
    for module in (*kinds, "mixer", *FUNCTIONS):
        found[module] = dict(vars(getattr(buffers, module)))
    for module, (make, functions) in FUNCTIONS.items():
        for name, arguments in functions.items():
            found[module][name] = function(make, name, arguments)
    return found


def names_of(path):
    """Return the public names that a module of flashbax defines, or imports from flashbax."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets}
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("flashbax"):
            found |= {alias.name for alias in node.names}
    return {name for name in found if not name.startswith("_")}


def missing_names(folder, left_out):
    """Return the names of flashbax's modules that ours lack and that are not left out, and the
    patterns of `left_out` that fit no such name."""
    missing, unused = [], set(left_out)
    for path in sorted(folder.rglob("*.py")):
        if path.stem.endswith(("_test", "conftest")):
            continue
        parts = path.relative_to(folder).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        try:
            ours = importlib.import_module(f"jaxreplay.compat.flashbax.{module}".rstrip("."))
        except ModuleNotFoundError:
            ours = None
        for name in sorted(names_of(path) - set(vars(ours or object))):
            full = f"{module}.{name}".lstrip(".")
            patterns = [one for one in left_out if fnmatch.fnmatchcase(full, one)]
            unused -= {*patterns}
            missing += [] if patterns else [full]
    return missing, sorted(unused)
