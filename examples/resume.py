"""Kill a run and resume it with bit-identical returns: one checkpoint has the agent and the buffer.

    python examples/resume.py   # 2 minutes on two CPU cores

A save is complete with both of them, or it does not count. It writes the rows that are new since
the save before.

The training of `dqn.py` runs twice: once without a break, and once in a process that is killed two
times and started again. The returns of all chunks must be equal.
"""

import argparse
import functools
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import _common as common
import dqn
import jax
import numpy as np
from tqdm import tqdm

from jaxreplay.checkpoint import Checkpointer


def save(checkpointer, step, carry):
    checkpointer.save(carry.buffer_state, step, extras=carry.replace(buffer_state=None))


def restored(checkpointer, carry):
    """Return the newest saved step and its carry; 0 and the given one if none was saved."""
    if not checkpointer.all_steps():
        return 0, carry
    agent = carry.replace(buffer_state=None)
    del carry  # frees its buffer before another one is read
    buffer_state, agent = checkpointer.restore(dqn.EXAMPLE, extras=agent)
    return checkpointer.step, agent.replace(buffer_state=buffer_state)


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def train(carry, total, iterations):
    """Return the carry of one seed after so many iterations."""
    return jax.lax.scan(lambda c, _: (dqn.iteration(c, total), None), carry, length=iterations)[0]


def work(folder, chunks, iterations, seed):
    """Train from the newest save on, and print each chunk's return."""
    checkpointer = Checkpointer(folder, dqn.BUFFER, max_to_keep=2, progress=False)
    init_key, evaluation_key = jax.random.split(jax.random.key(seed))
    start, carry = restored(checkpointer, jax.jit(dqn.init)(init_key))
    evaluate = jax.jit(dqn.evaluate)
    for chunk in range(start, chunks):
        carry = train(carry, chunks * iterations, iterations)
        mean = float(evaluate(carry, jax.random.fold_in(evaluation_key, chunk)))
        print(json.dumps({"chunk": chunk, "return": mean}), flush=True)
        save(checkpointer, chunk + 1, carry)


def run(folder, args, kills, bar):
    """Return the returns of each chunk, by its number, of a run that is killed `kills` times."""
    options = {"chunks": args.chunks, "iterations": args.iterations, "seed": args.seed}
    command = [sys.executable, __file__, "--work", "--folder", str(folder)]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    chance, returns = random.Random(args.seed), {}
    for number in range(kills + 1):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for begun, line in enumerate(process.stdout, 1):
                found = json.loads(line)
                returns.setdefault(found["chunk"], []).append(found["return"])
                bar.update()
                if number < kills and begun > args.chunks // (kills + 1):
                    time.sleep(chance.random() * 0.2)  # during the save, or in the next chunk
                    process.send_signal(signal.SIGKILL)
                    break
        if number == kills and process.returncode:
            raise SystemExit(f"the run ended with status {process.returncode}")
    return returns


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=12, help="each with an evaluation and a save")
    parser.add_argument("--iterations", type=int, default=500, help="of a chunk")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument(
        "--folder", type=pathlib.Path, default=pathlib.Path("out/resume"), help="for checkpoints"
    )
    parser.add_argument("--work", action="store_true", help="be one process of a run")
    args = parser.parse_args(argv)
    if args.work:
        work(args.folder, args.chunks, args.iterations, args.seed)
        return {"reached": True}
    for name in ("unbroken", "killed"):
        shutil.rmtree(args.folder / name, ignore_errors=True)
    with tqdm(total=2 * args.chunks, unit="chunk") as bar:
        unbroken = run(args.folder / "unbroken", args, 0, bar)
        killed = run(args.folder / "killed", args, args.kills, bar)
    # A chunk that was lost in a kill has two returns, which must be equal, too.
    is_equal = sorted(unbroken) == sorted(killed) and all(
        set(killed[chunk]) == set(unbroken[chunk]) for chunk in unbroken
    )
    spread = [np.ptp([*unbroken[chunk], *killed.get(chunk, [])]) for chunk in unbroken]
    return common.report(
        is_equal,
        chunks=len(unbroken),
        chunks_of_the_killed_run=sum(map(len, killed.values())),
        last_return=round(unbroken[args.chunks - 1][0], 1),
        largest_difference=float(max(spread, default=np.nan)),
        folder=str(args.folder),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: the returns of the killed run differ")
