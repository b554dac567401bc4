"""The house: each file imports only from those above it."""

import ast
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxreplay

ROOT = pathlib.Path(jaxreplay.__file__).parent
# Each may import from those before it; the files of one line from each other only if listed here by name.
LAYERS = (
    ("struct",),
    ("tiles",),
    ("ring", "types", "autoreset", "leaves", "window", "paths", "sizes", "description", "_version", "search"),
    ("memory", "checks", "bits", "advantages"),
    ("platforms",),
    ("layout",),
    ("streams",),
    ("episode_table", "sum_tree", "draws", "intake", "minibatches", "permutation"),
    ("drawable",),
    ("samplers.sampler", "views.anchor"),
    ("views.view",),
    ("views.item", "views.sequence", "views.transition", "views.future"),
    ("samplers.uniform", "samplers.recent", "samplers.episodes", "samplers.queue", "samplers.without_replacement"),
    ("samplers.prioritized", "views.frame_stack", "views.hindsight", "views.transformed"),
    ("samplers.rank_based",),
    ("samplers", "views", "donation", "weights"),
    ("trajectories",),
    ("state_check", "rollouts", "provisional"),
    ("buffer",),
    ("jitted",),
    ("catalog", "compose", "mixture", "plan", "resize", "inspection.contents"),
    ("inspection.measure", "inspection.text"),
    ("inspection.page",),
    ("inspection.inspection",),
    ("inspection",),
    ("torch", "limiter", "step_format", "interrupts"),
    ("monitor",),
    ("frameworks",),
    ("checkpoint.files", "checkpoint.rows", "checkpoint.trim", "checkpoint.unwritten", "checkpoint.progress"),
    ("checkpoint.lock", "checkpoint.schema", "checkpoint.groups"),
    ("checkpoint.folder", "checkpoint.objects", "checkpoint.manifest"),
    ("checkpoint.store", "checkpoint.generations", "checkpoint.identity", "checkpoint.fingerprint"),
    ("checkpoint.arrays",),
    ("checkpoint.reuse",),
    ("checkpoint.planning", "checkpoint.salvage", "checkpoint.verifying"),
    ("checkpoint.group_reader", "checkpoint.saving", "checkpoint.rounds"),
    ("checkpoint.restoring", "checkpoint.row_reader"),
    ("checkpoint.reading", "checkpoint.contents"),
    ("checkpoint.checkpointer",),
    ("checkpoint",),
    ("held",),
    ("stateful",),
    ("",),
    ("datasets",),
    ("__main__",),
    ("sb3.arrays", "sb3.learned"),
    ("sb3.stored",),
    ("sb3.buffers", "sb3.hindsight"),
    ("sb3.prioritized_dqn",),
    ("sb3",),
)
SIDEWAYS = {("checks", "types"), ("streams", "types")}


def test_each_file_of_tests_is_in_one_part_of_the_soak():
    makefile = (pathlib.Path(__file__).parent.parent / "Makefile").read_text()
    parts = dict(re.findall(r"^SOAK_(\w+) := (.*)$", makefile, re.MULTILINE))
    named = [name for part, names in parts.items() if not part.startswith(("gpu", "tpu")) for name in names.split()]
    assert sorted(named) == sorted(path.stem.removeprefix("test_") for path in pathlib.Path(__file__).parent.glob("test_*.py"))


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").strip(".")
        yield name, path


def imports(path):
    """The package's modules that a file imports."""
    names = {name for name, _ in modules()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jaxreplay":
            module = node.module.removeprefix("jaxreplay").strip(".")
            for alias in node.names:
                inner = f"{module}.{alias.name}".strip(".")
                yield inner if inner in names else module
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("jaxreplay").strip(".") for alias in node.names if alias.name.split(".")[0] == "jaxreplay")


def test_every_file_has_its_layer():
    assert sorted(name for name, _ in modules()) == sorted(name for layer in LAYERS for name in layer)


def test_imports_point_upwards_only():
    layer_of = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    for name, path in modules():
        for imported in imports(path):
            assert layer_of[imported] < layer_of[name] or (name, imported) in SIDEWAYS, f"{name} imports {imported}"


def test_samplers_and_views_know_neither_each_other_nor_the_buffer():
    for name, path in modules():
        if name.startswith(("samplers", "views")):
            other = "views" if name.startswith("samplers") else "samplers"
            assert not {i for i in imports(path) if i.startswith((other, "buffer", "catalog"))}


def test_the_remainder_operator_is_used_in_one_file():
    for name, path in modules():
        uses = [
            node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
        ]
        # Capacities are divided once, in Python, where they are checked.
        assert not uses or name in ("ring", "checks"), f"{name}: lines {uses}"


# Functions of the package that one eager call enters, and modules that they are in: who reads a call reads so much.
MOST_STOPS = {
    ("uniform", "add"): (45, 13),
    ("uniform", "sample"): (75, 17),
    ("prioritized", "add"): (64, 15),
    ("prioritized", "sample"): (70, 18),
    ("prioritized", "update_priorities"): (46, 11),
}


@pytest.mark.parametrize(("kind", "name"), MOST_STOPS)
def test_a_call_enters_few_functions(kind, name):
    replay = getattr(jaxreplay, kind)(capacity=64, num_envs=4, batch_size=8, autoreset="same_step")
    zeros, flags = jnp.zeros(4), jnp.zeros(4, bool)
    step = jaxreplay.Step(obs=jnp.zeros((4, 3)), action=zeros, reward=zeros, terminated=flags, truncated=flags)
    state = replay.init(jax.tree.map(lambda leaf: leaf[0], step))
    state = replay.add(replay.add(state, step), step)
    index = replay.sample(state, jax.random.key(0)).index
    arguments = {"add": (step,), "sample": (jax.random.key(0),), "update_priorities": (index, jnp.ones(8))}[name]
    entered = set()

    def enters(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)) and not code.co_name.startswith("<"):
            entered.add((code.co_filename, code.co_qualname))

    getattr(replay, name)(state, *arguments)  # what is known once is found out
    before = sys.getprofile()
    sys.setprofile(enters)
    try:
        getattr(replay, name)(state, *arguments)
    finally:
        sys.setprofile(before)
    most_functions, most_modules = MOST_STOPS[kind, name]
    assert len(entered) <= most_functions
    assert len({file for file, _ in entered}) <= most_modules


def test_importing_the_library_imports_no_extra():
    import subprocess

    extras = ("torch", "gymnax", "optax", "tensorstore", "google_crc32c", "minari", "stable_baselines3")
    code = f"import sys, jaxreplay; print([m for m in {extras} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_each_promise_names_tests_that_there_are():
    readme = (ROOT.parent / "README.md").read_text()
    promises = readme[readme.index("### Of checkpoints") : readme.index("## Compose your own")]
    named = set(re.findall(r"`(test_\w+)`", promises))
    tests = set(
        re.findall(r"^def (test_\w+)\(", "\n".join(path.read_text() for path in pathlib.Path(__file__).parent.glob("test_*.py")), re.M)
    )
    assert len(named) > 15
    assert not named - tests
