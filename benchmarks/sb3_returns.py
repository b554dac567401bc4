"""Whole runs of Stable-Baselines3 over 5 seeds: DQN on CartPole and SAC on Pendulum, with its own
buffer and the drop-in, and `PrioritizedDQN`, side by side.

python benchmarks/sb3_returns.py        # writes SB3_RETURNS.md next to this file
"""

import datetime
import importlib.metadata
import time
from pathlib import Path

import numpy as np
import torch
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.evaluation import evaluate_policy
from tqdm import tqdm

from jaxreplay import sb3

_SEEDS = range(5)
_OURS = {"replay_buffer_class": sb3.ReplayBuffer}
# In buffers of more than the steps and final observations, nothing is overwritten.
_DQN = {
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 60_000,
    "learning_starts": 1_000,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
    "policy_kwargs": {"net_arch": [128, 128]},
}
_SAC = {"buffer_size": 60_000, "learning_starts": 100}
# by algorithm and env: the steps, and what makes each column's model
_RUNS = {
    ("DQN", "CartPole-v1"): (
        30_000,
        {
            "SB3's ReplayBuffer": (DQN, _DQN),
            "jaxreplay's": (DQN, _DQN | _OURS),
            "PrioritizedDQN, 3 steps": (sb3.PrioritizedDQN, _DQN | {"n_steps": 3}),
        },
    ),
    ("SAC", "Pendulum-v1"): (
        3_000,
        {"SB3's ReplayBuffer": (SAC, _SAC), "jaxreplay's": (SAC, _SAC | _OURS)},
    ),
}


def main() -> None:
    torch.set_num_threads(1)
    runs = [
        (which, column, seed)
        for which, (_, columns) in _RUNS.items()
        for seed in _SEEDS
        for column in (columns if seed % 2 else reversed(columns))
    ]
    found = {run: _run(*run) for run in tqdm(runs, unit="run")}
    versions = {
        name: importlib.metadata.version(name)
        for name in ("stable_baselines3", "torch", "jax", "gymnasium")
    }
    lines = [
        "# Whole runs of Stable-Baselines3",
        "",
        "The mean return of 20 greedy episodes after training, and the seconds of training, in",
        "alternating runs. With equal seeds the first two columns are the same run to the last",
        "bit: `parameters` is the sum of the network's, in both.",
        "",
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}, "
        f"{datetime.date.today().isoformat()},",
        "`python benchmarks/sb3_returns.py`.",
    ]
    for which, (num_steps, columns) in _RUNS.items():
        lines += ["", f"## {', '.join(which)}, {num_steps:,} steps", ""]
        heads = [f"{column}: return, seconds, parameters" for column in columns]
        lines += [f"| seed | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(columns)}"]
        for seed in _SEEDS:
            cells = ["{:.0f}, {:.1f}, {:.6f}".format(*found[which, one, seed]) for one in columns]
            lines.append(f"| {seed} | {' | '.join(cells)} |")
        of_all = np.median([[found[which, one, k][:2] for one in columns] for k in _SEEDS], axis=0)
        cells = [f"{mean:.0f}, {seconds:.1f}" for mean, seconds in of_all]
        lines.append(f"| median | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    (Path(__file__).parent / "SB3_RETURNS.md").write_text(text)
    print(text)


def _run(which: tuple[str, str], column: str, seed: int) -> tuple[float, float, float]:
    num_steps, columns = _RUNS[which]
    kind, options = columns[column]
    start = time.perf_counter()
    model = kind("MlpPolicy", which[1], seed=seed, device="cpu", **options).learn(num_steps)
    seconds = time.perf_counter() - start
    parameters = float(
        sum(parameter.detach().double().sum() for parameter in model.policy.parameters())
    )
    env = model.get_env()
    env.seed(seed + 1_000)
    return float(evaluate_policy(model, env, n_eval_episodes=20)[0]), seconds, parameters


if __name__ == "__main__":
    main()
