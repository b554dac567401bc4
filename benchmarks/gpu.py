"""jaxreplay beside flashbax and TorchRL on a GPU: `python benchmarks/gpu.py [--quick]`.

Writes GPU.md next to this file, anew after each row, so that a run may be stopped. Without a GPU it
measures on the CPU, and prints the tables only: so each of its lines can be tried anywhere.
"""

import argparse
import os
import sys
from pathlib import Path

# set before a worker starts: two libraries share the GPU's memory
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import report
from cases import QUICK, Sizes, gpu_rows
from run import Worker, measure
from tqdm import tqdm

_INTRO = """\
Microseconds per iteration: the median over {rounds} rounds, with the quartiles in brackets. Columns
of a row are timed one after another, round after round. Buffers and words are those of RESULTS.md.
**call**: one jitted call after another, waited for once at the end. TorchRL: {torchrl}."""

_TORCHRL = {
    "cuda": "plain calls, with rows and tree on the GPU",
    "cpu": "plain calls, with rows and tree on the host",
    None: "this build has no tree for the installed torch",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure on a GPU beside flashbax and TorchRL.")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few minutes")
    quick = parser.parse_args().quick
    platform, kind = jax.default_backend(), jax.devices()[0].device_kind
    os.environ["JAX_PLATFORMS"] = "cuda" if platform == "gpu" else platform
    sizes = QUICK if quick else Sizes(batches=(32, 4_096, 16_384), rounds=5)
    workers = {name: Worker(name) for name in ("jaxreplay", "flashbax", "torchrl")}
    torchrl = workers["torchrl"].ask(where=True)
    rows = gpu_rows(sizes, has_torchrl=torchrl is not None)
    about = {**report.about(quick), "device": kind, "command": " ".join(["gpu.py", *sys.argv[1:]])}
    intro = _INTRO.format(rounds=sizes.rounds, torchrl=_TORCHRL[torchrl])
    results = []
    for row in tqdm(rows, unit="row"):
        results.append(measure(workers, row, sizes.rounds))
        text = report.markdown(results, about, intro)
        if platform == "gpu" and not quick:
            (Path(__file__).resolve().parent / "GPU.md").write_text(text)
    for worker in workers.values():
        worker.close()
    print(text)


if __name__ == "__main__":
    main()
