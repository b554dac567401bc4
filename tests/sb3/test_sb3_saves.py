"""Model and replay buffer in one checkpoint: a resumed run ends as one without a break."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import DQN, SAC, HerReplayBuffer as TheirHer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize

from jaxreplay import checkpoint, sb3
from tests.conftest import thorough
from tests.support.refusals import refused
from tests.support.sb3_streams import check_same, params_of, sampled


def small():
    """Return options of a small model: new ones, since a model changes its own."""
    return {
        "policy_kwargs": {"net_arch": [8]},
        "seed": 0,
        "buffer_size": 60,
        "learning_starts": 20,
        "batch_size": 8,
    }


def dqn(kind=sb3.ReplayBuffer, num_envs=1, normalize=False, **options):
    envs = DummyVecEnv([functools.partial(gymnasium.make, "CartPole-v1")] * num_envs)
    envs = VecMonitor(VecNormalize(envs)) if normalize else envs
    given = {"train_freq": 2, "replay_buffer_class": kind, **small(), **options}
    return DQN("MlpPolicy", envs, **given)


def sac():
    env = gymnasium.make("Pendulum-v1")
    return SAC("MlpPolicy", env, replay_buffer_class=sb3.ReplayBuffer, **small())


def her(model=DQN, kind=sb3.HerReplayBuffer):
    env = BitFlippingEnv(n_bits=3, continuous=False)
    return model("MultiInputPolicy", env, replay_buffer_class=kind, **small())


MODELS = {
    "dqn": dqn,
    "priorities": lambda: sb3.PrioritizedDQN(
        "MlpPolicy",
        DummyVecEnv([lambda: gymnasium.make("CartPole-v1")]),
        replay_buffer_class=sb3.PrioritizedReplayBuffer,
        **small(),
    ),
    "two envs": functools.partial(dqn, num_envs=2),
    "normalized": lambda: dqn(normalize=True, num_envs=2),
    "sac": sac,
    "her": her,
    "her with priorities": lambda: her(sb3.PrioritizedDQN, sb3.PrioritizedHerReplayBuffer),
}


@pytest.mark.parametrize(
    "name",
    [
        "normalized",
        *(thorough(name) for name in MODELS if name != "normalized"),
    ],
)
def test_a_resumed_run_ends_as_one_without_a_break(name, tmp_path):
    """With the envs saved too, bit for bit: parameters, batches and counters."""
    callback = sb3.SaveCallback(tmp_path, save_freq=40, save_envs=True, max_to_keep=3)
    whole = MODELS[name]().learn(150, callback=callback)
    steps = checkpoint.Checkpointer(tmp_path, whole.replay_buffer._replay).all_steps()
    assert len(steps) == 3
    assert steps[-1] == whole.num_timesteps
    model = sb3.resume(tmp_path, MODELS[name](), step=steps[0])
    assert model.num_timesteps == steps[0] < 120
    again = sb3.SaveCallback(tmp_path, save_freq=40, save_envs=True, max_to_keep=3)
    model.learn(150 - steps[0], callback=again, reset_num_timesteps=False)
    assert model.num_timesteps == whole.num_timesteps
    assert torch.equal(params_of(model), params_of(whole))
    check_same(*(sampled(each.replay_buffer, 8) for each in (model, whole)))


@pytest.mark.thorough
def test_without_the_envs_they_are_reset(tmp_path):
    model = dqn()
    assert sb3.resume(tmp_path, model) is model  # nothing was saved yet
    model.learn(100, callback=sb3.SaveCallback(tmp_path, save_freq=60))
    steps = checkpoint.Checkpointer(tmp_path, model.replay_buffer._replay).all_steps()
    assert steps[-1] == 100
    again = sb3.resume(tmp_path, dqn())
    assert again.replay_buffer.size() == model.replay_buffer.size()
    for _ in range(2):  # each with a callback of its own
        callback = sb3.SaveCallback(tmp_path, save_freq=60)
        again.learn(26, reset_num_timesteps=False, callback=callback)
    assert again.num_timesteps == 152
    again.save(tmp_path / "model")  # it has nothing that cannot be pickled
    with refused("has a newer checkpoint", checkpoint.PathInUseError):  # by another run
        dqn().learn(50, callback=sb3.SaveCallback(tmp_path, save_freq=10))


def test_the_statistics_of_normalized_envs_are_kept(tmp_path):
    make = MODELS["normalized"]
    model = make().learn(40, callback=sb3.SaveCallback(tmp_path, save_freq=40))
    again = sb3.resume(tmp_path, make())
    for name in ("obs_rms", "ret_rms"):
        saved, found = (getattr(one.get_vec_normalize_env(), name) for one in (model, again))
        assert found.count == saved.count > 40
        np.testing.assert_array_equal(found.mean, saved.mean)
    with refused("the saved model's envs are in a VecNormalize, the new one's are not"):
        sb3.resume(tmp_path, dqn(num_envs=2))


def test_a_resumed_buffer_stays_on_the_devices_of_the_new_one(tmp_path):
    """Those of the machine that saved it need not be here."""
    there = dqn(replay_buffer_kwargs={"storage_device": "cpu"})
    there.replay_buffer.device = torch.device("cuda:7")
    there.replay_buffer.add(*(np.zeros((1, 4), np.float32),) * 2, *np.zeros((3, 1)), [{}])
    callback = sb3.SaveCallback(tmp_path, save_freq=1)
    callback.init_callback(there)
    callback.on_training_start({}, {})
    callback._save()
    here = dqn()
    here.replay_buffer.device = torch.device("meta")
    buffer = sb3.resume(tmp_path, here).replay_buffer
    assert (buffer.device, buffer.storage_device) == (torch.device("meta"), None)
    assert buffer.sample(4).rewards.device.type == "meta"


def test_what_cannot_be_resumed_is_named(tmp_path):
    dqn().learn(30, callback=sb3.SaveCallback(tmp_path, save_freq=10))
    with refused("resume: the saved replay buffer is .* make it with the same arguments"):
        sb3.resume(tmp_path, dqn(buffer_size=90))
    with refused("resume: the model's replay buffer is a ReplayBuffer; make the model with"):
        sb3.resume(tmp_path, dqn(kind=None))
    with refused("SaveCallback: the model's replay buffer is a HerReplayBuffer"):
        env = BitFlippingEnv(n_bits=3, continuous=False)
        model = DQN("MultiInputPolicy", env, replay_buffer_class=TheirHer, **small())
        model.learn(30, callback=sb3.SaveCallback(tmp_path, save_freq=10))
