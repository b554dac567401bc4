"""Recipes for data that others have published: copy the function that you need.

    state = jaxreplay.datasets.from_episodes(open_x(source), buffer)

Each is small, since `jaxreplay.datasets.from_arrays` reads whatever has arrays by name, and
`to_episodes` returns plain arrays. `make datasets` tries them on small files.

References:
  O'Neill et al., "Open X-Embodiment" (2023); Ramos et al., "RLDS" (2021).
  Park et al., "OGBench: Benchmarking Offline Goal-Conditioned RL" (2025).
  Mandlekar et al., "What Matters in Learning from Offline Human Demonstrations" (2021): robomimic.
  Chi et al., "Diffusion Policy" (2023).
"""

import os

import jax
import numpy as np

from jaxreplay import datasets


def open_x(source, keys=None):
    """Yield the episodes of an RLDS dataset, such as Open X-Embodiment's.

    Its last step has the final observation, and no action. `source` may be
    `tfds.data_source(name, split="train")`, which needs no TensorFlow, or
    `tfds.as_numpy(tfds.load(name, split="train"))`. `keys` are those of the observation: a text
    cannot be stored.
    """
    for number, episode in enumerate(source):
        steps = [*episode["steps"]]
        obs = [
            {key: step["observation"][key] for key in keys or step["observation"]} for step in steps
        ]
        is_end = np.arange(1, len(steps)) == len(steps) - 1
        is_terminated = is_end & bool(steps[-1]["is_terminal"])
        stacked = lambda values: jax.tree.map(lambda *leaves: np.stack(leaves), *values)
        yield datasets.Episode(
            stacked(obs),
            stacked([step["action"] for step in steps[:-1]]),
            np.float32([step["reward"] for step in steps[:-1]]),
            is_terminated,
            is_end & ~is_terminated,
            id=number,
        )


def ogbench(path, buffer):
    """Return the state of an OGBench file. A row with a flag has its episode's final observation,
    and there are no rewards: relabel them, with `jr.hindsight` or `jr.transform`."""
    file = datasets.open_npz(path)
    return datasets.from_arrays(file, buffer, names={"reward": None}, final_rows=True)


def robomimic(file, buffer):
    """Return the state of a robomimic file, `h5py.File(path)`: a group for each demonstration."""
    return datasets.from_arrays(file["data"], buffer)


def diffusion_policy(group, buffer):
    """Return the state of the data of a diffusion policy, `zarr.open(path)`."""
    names = {"obs": {"image": "data/img", "state": "data/state"}, "action": "data/action"}
    names |= {"reward": None, "episode_ends": "meta/episode_ends"}
    return datasets.from_arrays(group, buffer, names=names)


def vault(path, buffer, names=None):
    """Return the state of a flashbax vault, `rel_dir/vault_name/vault_uid`, such as OG-MARL's. It
    is read whole by flashbax, and each env has a stream of its own."""
    from flashbax.vault import Vault

    folder, name, uid = str(path).rsplit(os.sep, 2)
    rows = jax.device_get(Vault(name, rel_dir=folder, vault_uid=uid).read().experience)
    num_envs = len(jax.tree.leaves(rows)[0])
    envs = [jax.tree.map(lambda leaf, env=env: leaf[env], rows) for env in range(num_envs)]
    return datasets.from_arrays(envs, buffer, names=names)


def to_minari(buffer, state, dataset_id, **options):
    """Write a buffer's episodes to a new dataset of Minari, and return it. `options` are those of
    `minari.create_dataset_from_buffers`, such as `env`; images are stored losslessly."""
    import minari
    from minari.data_collector.episode_buffer import EpisodeBuffer

    episodes = [
        EpisodeBuffer(
            observations=one.observations,
            actions=one.actions,
            rewards=list(one.rewards),
            terminations=list(one.terminations),
            truncations=list(one.truncations),
        )
        for one in datasets.to_episodes(buffer, state)
    ]
    options = {"jpeg_encoding": False} | options
    return minari.create_dataset_from_buffers(dataset_id, episodes, **options)
