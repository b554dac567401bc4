"""A run that is killed goes on as if it had not been: the agent in orbax's CheckpointManager, its
buffer in jaxreplay's Checkpointer.

    python examples/resume.py        # a minute on two CPU cores

The training of `dqn.py` runs twice: once from end to end, and once in a process that is killed two
times, wherever it happens to be, and started again. The returns of all chunks must be equal to the
last bit.

What to look at: `save` writes the buffer first and the agent after it, under the same step, so that
a step which orbax has is there in both; what a kill between the two has left is replaced later. The
buffer's save writes only the rows that came since the one before.
"""

import argparse
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import dqn
import jax
import numpy as np
import orbax.checkpoint as ocp
from tqdm import tqdm

from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError


class Saves:
    """Both checkpoints of a run, in one folder."""

    def __init__(self, folder):
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._agent = ocp.CheckpointManager(folder.absolute() / "agent", options=options)
        self._checkpointer = Checkpointer(
            folder / "replay", dqn.BUFFER, max_to_keep=3, progress=False
        )

    def save(self, step, carry):
        self._checkpointer.save(carry.buffer_state, step)
        self._agent.save(step, args=ocp.args.StandardSave(_without_buffer(carry)))
        self._agent.wait_until_finished()

    def restore(self, carry):
        """The newest step that is there in both, and the carry; 0 and the one given, where there is
        none."""
        steps = set(self._agent.all_steps()) & set(self._checkpointer.all_steps())
        if not steps:
            return 0, carry
        wanted = _without_buffer(carry)
        del carry  # before the buffer comes back: there is one at a time
        for step in sorted(steps, reverse=True):
            try:
                buffer_state = self._checkpointer.restore(dqn.example_step(), step)
            except CorruptCheckpointError as error:
                print(error, file=sys.stderr)
                continue
            for newer in steps:
                if newer > step:
                    self._agent.delete(newer)
            agent = self._agent.restore(step, args=ocp.args.StandardRestore(wanted))
            return step, agent.replace(
                buffer_state=buffer_state, key=jax.random.wrap_key_data(agent.key)
            )
        raise SystemExit("no step can be restored")


def _without_buffer(carry):
    return carry.replace(buffer_state=None, key=jax.random.key_data(carry.key))


def work(folder, chunks, iterations, seed):
    """Train from the newest save on, and say each chunk's return."""
    saves = Saves(folder)
    init_key, evaluation_key = jax.random.split(jax.random.key(seed))
    start, carry = saves.restore(dqn.init(init_key))
    for chunk in range(start, chunks):
        carry, _ = dqn.train(carry, chunks * iterations * dqn.NUM_ENVS, iterations)
        mean = float(dqn.evaluate(carry.params, jax.random.fold_in(evaluation_key, chunk)))
        print(json.dumps({"chunk": chunk, "return": mean}), flush=True)
        saves.save(chunk + 1, carry)


def run(folder, args, kills, bar):
    """The return of each chunk, of a run whose process is killed so often."""
    script = [
        sys.executable,
        __file__,
        "--work",
        "--folder",
        folder,
        "--chunks",
        args.chunks,
        "--iterations",
        args.iterations,
    ]
    chance, returns = random.Random(args.seed), {}
    for number in range(kills + 1):
        command = [str(part) for part in [*script, "--seed", args.seed]]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for begun, line in enumerate(process.stdout, 1):
                found = json.loads(line)
                returns.setdefault(found["chunk"], []).append(found["return"])
                bar.update()
                if number < kills and begun > args.chunks // (kills + 1):
                    time.sleep(chance.random() * 0.2)  # somewhere in the save, or in the next chunk
                    process.send_signal(signal.SIGKILL)
                    break
        if number == kills and process.returncode:
            raise SystemExit(f"the run ended with status {process.returncode}")
    return returns


def main(argv=None):
    """Returns the figures that it prints, and whether all returns are equal."""
    parser = argparse.ArgumentParser(description="A run that is killed, and goes on.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--chunks", type=int, default=12, help="of the run: after each an evaluation and a save"
    )
    parser.add_argument(
        "--iterations", type=int, default=1_000, help="of a chunk, a step of 16 envs each"
    )
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=pathlib.Path("out/resume"),
        help="where the checkpoints go",
    )
    parser.add_argument("--work", action="store_true", help="one process of a run")
    args = parser.parse_args(argv)
    if args.work:
        work(args.folder, args.chunks, args.iterations, args.seed)
        return {"reached": True}
    for name in ("whole", "killed"):
        shutil.rmtree(args.folder / name, ignore_errors=True)
    with tqdm(total=2 * args.chunks, unit="chunk") as bar:
        whole = run(args.folder / "whole", args, 0, bar)
        killed = run(args.folder / "killed", args, args.kills, bar)
    # A chunk that was lost in a kill came twice, and was the same.
    is_equal = sorted(whole) == sorted(killed) and all(
        set(killed[chunk]) == set(whole[chunk]) for chunk in whole
    )
    figures = {
        "chunks": len(whole),
        "chunks of the killed run": sum(map(len, killed.values())),
        "last return": round(whole[args.chunks - 1][0], 1),
        "largest difference": max(
            (float(np.ptp([*whole[chunk], *killed.get(chunk, [])])) for chunk in whole),
            default=float("nan"),
        ),
        "folder": str(args.folder),
    }
    for name, value in figures.items():
        print(f"{name:26}", value if isinstance(value, str) else f"{value:,}")
    return figures | {"reached": is_equal}


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: the returns of the killed run are others")
