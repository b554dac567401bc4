"""DQN of Stable-Baselines3 on CartPole over 5 seeds: its own buffer, the drop-in, and
`PrioritizedDQN`, side by side.

python benchmarks/sb3_returns.py        # writes SB3_RETURNS.md next to this file
"""

import datetime
import importlib.metadata
import time
from pathlib import Path

import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.evaluation import evaluate_policy
from tqdm import tqdm

from jaxreplay import sb3

_STEPS = 30_000
_SEEDS = range(5)
_OPTIONS = {
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 60_000,  # more than the steps and final observations: nothing is overwritten
    "learning_starts": 1_000,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
    "policy_kwargs": {"net_arch": [128, 128]},
    "device": "cpu",
}
_COLUMNS = {
    "DQN, SB3's ReplayBuffer": lambda seed: DQN("MlpPolicy", "CartPole-v1", seed=seed, **_OPTIONS),
    "DQN, jaxreplay's": lambda seed: DQN(
        "MlpPolicy", "CartPole-v1", seed=seed, replay_buffer_class=sb3.ReplayBuffer, **_OPTIONS
    ),
    "PrioritizedDQN, 3 steps": lambda seed: sb3.PrioritizedDQN(
        "MlpPolicy", "CartPole-v1", seed=seed, n_steps=3, **_OPTIONS
    ),
}


def main() -> None:
    torch.set_num_threads(1)
    runs = [(name, seed) for seed in _SEEDS for name in _COLUMNS]
    found = {run: _run(*run) for run in tqdm(runs, unit="run")}
    versions = {
        name: importlib.metadata.version(name)
        for name in ("stable_baselines3", "torch", "jax", "gymnasium")
    }
    lines = [
        "# Returns of Stable-Baselines3's DQN on CartPole-v1",
        "",
        f"{_STEPS:,} steps; the mean return of 20 greedy episodes after them, and the seconds of "
        "training. With equal seeds the first two",
        "columns are the same run to the last bit: `parameters` is the sum of the network's, in "
        "both.",
        "",
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}, "
        f"{datetime.date.today().isoformat()},",
        "`python benchmarks/sb3_returns.py`.",
        "",
        "| seed | "
        + " | ".join(f"{name}: return, seconds, parameters" for name in _COLUMNS)
        + " |",
        "| --- | " + " | ".join("---:" for _ in _COLUMNS) + " |",
    ]
    for seed in _SEEDS:
        cells = ["{:.0f}, {:.1f}, {:.6f}".format(*found[name, seed]) for name in _COLUMNS]
        lines.append(f"| {seed} | " + " | ".join(cells) + " |")
    medians = [f"{np.median([found[name, seed][0] for seed in _SEEDS]):.0f}, " for name in _COLUMNS]
    seconds = [f"{np.median([found[name, seed][1] for seed in _SEEDS]):.1f}" for name in _COLUMNS]
    lines.append(
        "| median | " + " | ".join(m + s for m, s in zip(medians, seconds, strict=True)) + " |"
    )
    text = "\n".join(lines) + "\n"
    (Path(__file__).parent / "SB3_RETURNS.md").write_text(text)
    print(text)


def _run(name: str, seed: int) -> tuple[float, float, float]:
    start = time.perf_counter()
    model = _COLUMNS[name](seed).learn(_STEPS)
    seconds = time.perf_counter() - start
    parameters = float(
        sum(parameter.detach().double().sum() for parameter in model.policy.parameters())
    )
    env = model.get_env()
    env.seed(seed + 1_000)
    return float(evaluate_policy(model, env, n_eval_episodes=20)[0]), seconds, parameters


if __name__ == "__main__":
    main()
