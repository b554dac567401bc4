"""Programs of libraries that pin much: `make matrix` installs them, one at a time."""

import importlib.util
import re
from pathlib import Path

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of the libraries
PAGE = Path(__file__).parents[2] / "docs" / "migrating" / "torchrl.md"


def neighbour(name):
    """Import a module of a library that is installed; else skip the test."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"make matrix has {name}")
    return importlib.import_module(name)


def test_sbx_learns_the_same_from_our_buffer():
    sbx, sb3 = neighbour("sbx"), neighbour("jaxreplay.sb3")

    def params(**options):
        model = sbx.SAC("MlpPolicy", "Pendulum-v1", seed=0, buffer_size=500, **options)
        return model.learn(300).policy.actor_state.params

    theirs, ours = params(), params(replay_buffer_class=sb3.ReplayBuffer)
    jax.tree.map(np.testing.assert_array_equal, theirs, ours)


def test_a_loss_of_torchrl_takes_our_batch():
    objectives, torch = neighbour("torchrl.objectives"), neighbour("torch")
    modules = neighbour("torchrl.modules")
    names = {}
    for program in re.findall(r"{code-cell}\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(program, names)
    actor = modules.QValueActor(
        names["network"], in_keys=["observation"], action_space="categorical"
    )
    loss = objectives.DQNLoss(actor, action_space="categorical")
    loss.make_value_estimator(gamma=0.99)
    batch = names["tensordict_of"](names["replay"].sample())
    batch["action"] = batch["action"].long()
    found = loss(batch)["loss"]
    found.backward()
    assert torch.isfinite(found)
    names["replay"].update_priorities(batch["index"], batch["td_error"][:, 0])
    assert names["replay"].metrics()["num_stale_updates"] == 0


def test_tunix_is_imported_beside_it():
    """What it pins can be imported with the JAX that both take."""
    assert neighbour("tunix").__file__
