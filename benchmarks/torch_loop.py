"""The replay of a training loop on a GPU simulator, in PyTorch: `python benchmarks/torch_loop.py`.

Each iteration adds one step of 4,096 envs and samples one batch, of which every number is read.
The actor observes 100 floats, the critic these and 150 more. Writes TORCH_LOOP.md next to this
file, on a GPU TORCH_LOOP_GPU.md, but with `--quick`, which has small sizes.

- **jaxreplay**: `jr.Replay(framework="torch")`, which stores the critic's observation, once.
- **plain**: arrays [env, time, ...] of both observations and both next ones, as such projects write
  it for themselves, gathered by index. With n steps it looks for the first end of each window.
- **TorchRL**: `LazyTensorStorage` of the same transitions. With n steps, `MultiStep` would make
  windows before they are stored, of whole trajectories: it is measured with n = 1 alone.
"""

import argparse
import datetime
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

_ACTOR, _CRITIC, _ACTION, _GAMMA = 100, 250, 12, 0.97
_SIZES = {"num_envs": 4_096, "length": 256, "batches": (8_192, 32_768), "iterations": 20}
_QUICK = {"num_envs": 64, "length": 16, "batches": (128,), "iterations": 4}
_ROUNDS = 5
_HERE = Path(__file__).resolve().parent


class Plain:
    """A ring of whole transitions in tensors."""

    def __init__(self, num_envs, length, n_step, device):
        self.length, self.n_step, self.num_steps = length, n_step, 0
        self.env = torch.arange(num_envs, device=device)
        widths = {"obs": _ACTOR, "critic": _CRITIC, "next_obs": _ACTOR, "next_critic": _CRITIC}
        self.rows = {
            name: torch.zeros((num_envs, length, width), device=device)
            for name, width in (widths | {"action": _ACTION}).items()
        }
        for name, dtype in (
            ("reward", torch.float32),
            ("terminated", torch.bool),
            ("truncated", torch.bool),
        ):
            self.rows[name] = torch.zeros((num_envs, length), dtype=dtype, device=device)

    def add(self, critic, action, reward, terminated, truncated, final):
        values = {"obs": critic[:, :_ACTOR], "critic": critic, "next_obs": final[:, :_ACTOR]}
        values |= {"next_critic": final, "action": action, "reward": reward}
        values |= {"terminated": terminated, "truncated": truncated}
        for name, value in values.items():
            self.rows[name][:, self.num_steps % self.length] = value
        self.num_steps += 1

    def sample(self, batch_size):
        rows, length, device = self.rows, self.length, self.env.device
        stored = min(self.num_steps, length)
        env = torch.randint(len(self.env), (batch_size,), device=device)
        oldest = self.num_steps - stored
        first = oldest + torch.randint(stored - self.n_step + 1, (batch_size,), device=device)
        time = (first[:, None] + torch.arange(self.n_step, device=device)) % length
        ends = (rows["terminated"] | rows["truncated"])[env[:, None], time]
        goes_on = torch.cumprod((~ends).float(), dim=1)
        is_inside = torch.cat([torch.ones_like(goes_on[:, :1]), goes_on[:, :-1]], dim=1)
        powers = _GAMMA ** torch.arange(self.n_step + 1, device=device)
        num = is_inside.sum(dim=1).long()
        last = time.gather(1, num[:, None] - 1)[:, 0]
        alive = (~rows["terminated"][env, last]).float()
        return [
            *(rows[name][env, time[:, 0]] for name in ("obs", "critic", "action")),
            (rows["reward"][env[:, None], time] * is_inside * powers[:-1]).sum(dim=1),
            powers[num] * alive,
            *(rows[name][env, last] for name in ("next_obs", "next_critic")),
        ]


class TorchRL:
    def __init__(self, num_envs, length, n_step, device):
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, ReplayBuffer

        assert n_step == 1
        self.make = lambda leaves: TensorDict(leaves, [num_envs], device=device)
        self.buffer = ReplayBuffer(storage=LazyTensorStorage(num_envs * length, device=device))

    def add(self, critic, action, reward, terminated, truncated, final):
        after = {"obs": final[:, :_ACTOR], "critic": final, "reward": reward}
        after |= {"terminated": terminated, "done": terminated | truncated}
        now = {"obs": critic[:, :_ACTOR], "critic": critic, "action": action}
        self.buffer.extend(self.make({**now, "next": after}))

    def sample(self, batch_size):
        return [*self.buffer.sample(batch_size).values(include_nested=True, leaves_only=True)]


class Ours:
    def __init__(self, num_envs, length, n_step, device):
        import jaxreplay as jr

        del device  # JAX's own
        buffer = jr.uniform(
            capacity=num_envs * length,
            num_envs=num_envs,
            batch_size=1,
            n_step=n_step,
            gamma=_GAMMA,
            autoreset="same_step",
        )
        self.replay = jr.Replay(buffer, framework="torch")

    def add(self, critic, action, reward, terminated, truncated, final):
        ends = {"terminated": terminated, "truncated": truncated, "final_obs": final}
        self.replay.add(obs=critic, action=action, reward=reward, **ends)

    def sample(self, batch_size):
        t = self.replay.sample(batch_size).experience
        both = (t.obs, t.next_obs)
        return [*both, *(x[:, :_ACTOR] for x in both), t.action, t.reward, t.discount]


_KINDS = {"jaxreplay": Ours, "plain": Plain, "TorchRL": TorchRL}


def work(kind, sizes, n_step, batch_size):
    """Fill a replay; answer each line with the microseconds of an iteration, at last with MB."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    device, num_envs = "cuda" if torch.cuda.is_available() else "cpu", sizes["num_envs"]
    torch.manual_seed(0)
    draw = lambda *shape: torch.rand(shape, device=device)
    steps = [
        (
            draw(num_envs, _CRITIC),
            draw(num_envs, _ACTION),
            draw(num_envs),
            draw(num_envs) < 0.005,
            draw(num_envs) < 0.005,
            draw(num_envs, _CRITIC),
        )
        for _ in range(4)
    ]
    small = _KINDS[kind](16, 8, n_step, device)  # what it loads is there before
    for nth in range(10):
        small.add(*(leaf[:16] for leaf in steps[nth % len(steps)]))
    small.sample(16)
    before = _memory()
    replay, total = _KINDS[kind](num_envs, sizes["length"], n_step, device), draw()

    def iterate(number):
        nonlocal total
        for nth in range(number):
            replay.add(*steps[nth % len(steps)])
            total = total + sum(leaf.sum() for leaf in replay.sample(batch_size))
        total.item()  # waits

    for nth in range(sizes["length"] + 2):
        replay.add(*steps[nth % len(steps)])
    iterate(4)
    for _ in sys.stdin:
        start = time.perf_counter()
        iterate(sizes["iterations"])
        seconds = (time.perf_counter() - start) / sizes["iterations"]
        print(json.dumps([seconds * 1e6, _memory() - before]), file=answers, flush=True)


def _memory():
    """Return the most MB that the device, or this process, has held so far."""
    gc.collect()
    if torch.cuda.is_available():
        import jax

        ours = jax.devices()[0].memory_stats() if "jax" in sys.modules else {}
        return (torch.cuda.max_memory_allocated() + ours.get("peak_bytes_in_use", 0)) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(sizes, n_step, batch_size, rounds):
    """Return the rounds of each kind, [microseconds, MB], in turn."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    has_torchrl = n_step == 1 and importlib.util.find_spec("torchrl") is not None
    kinds = [kind for kind in _KINDS if kind != "TorchRL" or has_torchrl]
    workers = {}
    for kind in kinds:
        arguments = json.dumps([kind, sizes, n_step, batch_size])
        workers[kind] = subprocess.Popen(
            [sys.executable, __file__, "--work", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
    found = {kind: [] for kind in kinds}
    for nth in range(rounds):
        for kind in kinds[:: -1 if nth % 2 else 1]:
            workers[kind].stdin.write("\n")
            workers[kind].stdin.flush()
            found[kind].append(json.loads(workers[kind].stdout.readline()))
    for one in workers.values():
        one.stdin.close()
        one.wait()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(*args.work)
    sizes, rounds = (_QUICK, 2) if args.quick else (_SIZES, _ROUNDS)
    names = [name for name in ("jax", "torch", "torchrl") if importlib.util.find_spec(name)]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [
        "# Replay of a training loop in PyTorch",
        "",
        *__doc__.splitlines()[2:],
        "",
        f"{sizes['num_envs']:,} envs, rings of {sizes['length']} steps; medians of {rounds} rounds "
        "in turn. Memory: the most beyond that of a small replay.",
        f"{device}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}, "
        f"{datetime.date.today().isoformat()}.",
        "",
        "| | " + " | ".join(f"{kind}: us, MB" for kind in _KINDS) + " | time: plain / jaxreplay |",
        "| --- |" + " ---: |" * (len(_KINDS) + 1),
    ]
    for n_step in (1, 3):
        for batch_size in sizes["batches"]:
            found = measure(sizes, n_step, batch_size, rounds)
            medians = {kind: np.median(of, axis=0) for kind, of in found.items()}
            cells = [
                "{:,.0f}, {:,.0f}".format(*medians[kind]) if kind in medians else ""
                for kind in _KINDS
            ]
            ratio = medians["plain"][0] / medians["jaxreplay"][0]
            lines += [f"| n = {n_step}, {batch_size:,} items | {' | '.join(cells)} | {ratio:.2f} |"]
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if not args.quick:
        name = "TORCH_LOOP_GPU.md" if torch.cuda.is_available() else "TORCH_LOOP.md"
        (_HERE / name).write_text(text)
    print(text)
    return None


if __name__ == "__main__":
    main()
