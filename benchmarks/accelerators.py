"""The compilers' figures of a training step for absent accelerators: writes ACCELERATORS.md.

`make aot` installs the compilers first.

python benchmarks/accelerators.py v5e H100        # other devices keep their tables

flashbax's flat buffers, with rows in its own form, are compiled in the same way in the same run.
"""

import importlib.metadata
import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "aot"))

import devices  # noqa: E402
import flashbax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from programs import CASES, NUM_ENVS, STEPS, Case, programs  # noqa: E402

DEVICES = {"v5e": "tpu", "v5p": "tpu", "v6e": "tpu", "H100": "gpu", "A100": "gpu"}
OPERATIONS = ("add", "sample", "update", "loop")
BATCH_SIZE = 256
HEADER = """# Compiled for accelerators

Nothing in this file ran on a device: programs were compiled for devices that are not there, and
looked at.

{rows} rows of 8 numbers of {envs} envs, {images} of images uint8[84, 84, 4], or twice as many
frames uint8[84, 84]; batches of {batch}. A loop is a `lax.scan` of {steps} iterations of an add, a
sample and, with priorities, an update; its temporary memory holds its own inputs, where the
compiler lays them anew. **Held**: the arguments as the device holds them. **Bytes accessed**: as
XLA's cost analysis counts them, which takes all of what is read from for touched; of a GPU it has
none. **Kernels**: launches of a call, or of an iteration and what is around the loop. `tests/aot`
asserts what is promised of v5e and H100: no copy of the buffer, no loop or branch that waits for
the host, one CUDA graph.

{versions}; `make aot`.
"""


def of_flashbax(case: Case, platform: str) -> dict[str, Any]:
    """Map operations to flashbax's programs for the same rows; empty for buffers that it lacks."""
    sizes = {
        "max_length": case.capacity,
        "min_length": NUM_ENVS,
        "sample_batch_size": BATCH_SIZE,
        "add_batch_size": NUM_ENVS,
    }
    kind = case.name.partition(",")[0]
    if kind == "uniform":
        buffer = flashbax.make_flat_buffer(**sizes)
    elif kind == "prioritized":
        buffer = flashbax.make_prioritised_flat_buffer(**sizes, device=platform)
    else:
        return {}
    example = case.example()
    fields = {
        "obs": example.obs,
        "action": example.action,
        "reward": example.reward,
        "done": example.terminated,
    }
    state = jax.eval_shape(
        lambda: buffer.init(jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), fields))
    )
    step = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct((NUM_ENVS, *spec.shape), spec.dtype), fields
    )
    block = jax.tree.map(lambda spec: jax.ShapeDtypeStruct((STEPS, *spec.shape), spec.dtype), step)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), STEPS))
    key = jax.ShapeDtypeStruct((), keys.dtype)
    batch = jax.eval_shape(buffer.sample, state, key)

    def body(carry, x):
        state = buffer.add(carry[0], x[0])
        batch = buffer.sample(state, x[1])
        if kind == "prioritized":
            state = buffer.set_priorities(
                state, batch.indices, jnp.abs(batch.experience.first["reward"])
            )
        return (state, batch.experience), None

    found = {
        "add": (buffer.add, (state, step), 0),
        "sample": (buffer.sample, (state, key), None),
        "loop": (
            lambda carry, xs: jax.lax.scan(body, carry, xs)[0],
            ((state, batch.experience), (block, keys)),
            0,
        ),
    }
    if kind == "prioritized":
        found["update"] = (buffer.set_priorities, (state, batch.indices, batch.probabilities), 0)
    return found


def figures(device: str, program: Any) -> str:
    """Return the cells of a row."""
    try:
        found = devices.compiled(device, *program)
    except Exception as error:  # for example, the rows exceed the device's memory
        words = str(error).replace("\n", " ").replace("|", "/")
        return f"not compiled: {words[:90]} | | | |"
    mega = lambda size: f"{size / 1e6:,.1f}"
    kernels = f"{found.kernels:,}" if found.thunks else ""
    accessed = mega(found.accessed) if found.accessed is not None else ""
    return (
        f"{mega(found.temporary)} | {mega(found.held)} | {accessed} | {kernels} | "
        f"{found.seconds:.1f}"
    )


def table(device: str, platform: str) -> list[str]:
    lines = [
        f"## {device}",
        "",
        "| buffer | | library | temporary MB | held MB | MB accessed | kernels | compile s |",
    ]
    lines.append("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for case in CASES.values():
        own, other = programs(case, platform, BATCH_SIZE), of_flashbax(case, platform)
        for name in OPERATIONS:
            for library, found in (("jaxreplay", own), ("flashbax", other)):
                if name in found:
                    lines.append(
                        f"| {case.name} | {name} | {library} | {figures(device, found[name])} |"
                    )
                    sys.stdout.write(f"{device} {lines[-1]}\n")
                    sys.stdout.flush()
    return [*lines, ""]


def main() -> None:
    named = ("jax", "libtpu", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "flashbax")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in named)
    numbers, images = CASES["uniform"].capacity, CASES["uniform, images"].capacity
    head = HEADER.format(
        rows=f"{numbers:,}",
        envs=NUM_ENVS,
        images=f"{images:,}",
        batch=BATCH_SIZE,
        steps=STEPS,
        versions=versions,
    )
    file = pathlib.Path(__file__).parent / "ACCELERATORS.md"
    before = (
        re.split(r"^(?=## )", file.read_text(), flags=re.MULTILINE)[1:] if file.exists() else []
    )
    tables = {text.split()[1]: f"{text.rstrip()}\n" for text in before}
    for device in sys.argv[1:] or DEVICES:
        tables[device] = "\n".join(table(device, DEVICES[device]))
    file.write_text("\n".join([head, *(tables[device] for device in DEVICES if device in tables)]))


if __name__ == "__main__":
    main()
