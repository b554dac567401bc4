"""Drop-in buffers whose rows lie in the memory of the host or in files: the same batches."""

import copy
import functools
import pickle

import jax
import numpy as np
import pytest

from jaxreplay import sb3
from jaxreplay.storage import ring
from tests.conftest import thorough
from tests.sb3 import test_sb3_hindsight as hindsight, test_sb3_saves as saves
from tests.support.refusals import refused
from tests.support.replays import have_few_lengths
from tests.support.sb3_streams import BOX, DICT, VECTOR, added_to, check_same, sampled, stream

SIZE = 60
_few_lengths = pytest.fixture(autouse=True)(have_few_lengths)
KINDS = {
    "dict": lambda **rows: sb3.DictReplayBuffer(SIZE, DICT, BOX, n_envs=3, **rows),
    "priorities": lambda **rows: sb3.PrioritizedReplayBuffer(
        SIZE, VECTOR, BOX, n_envs=3, n_steps=3, gamma=0.99, **rows
    ),
    "n steps": lambda **rows: sb3.NStepReplayBuffer(
        SIZE, VECTOR, BOX, n_envs=1, gamma=0.99, **rows
    ),
}


def places(tmp_path):
    return ({}, {"rows": "host"}, {"rows": tmp_path / "rows"})


@jax.jit
def flags_of(state):
    """Return the flags of all rows, and which are written."""
    return state.rows.flags, state.is_written(ring.arange(state.layout.capacity))


@pytest.mark.parametrize("kind", [thorough("dict"), "priorities", thorough("n steps")])
def test_batches_are_the_same_wherever_the_rows_lie(kind, tmp_path):
    ours = [KINDS[kind](**place) for place in places(tmp_path)]
    space = DICT if kind == "dict" else VECTOR
    for t, step in enumerate(stream(space, BOX, ours[0].n_envs, 90)):
        if t == 50:
            for buffer in ours:
                buffer.reset()
        added_to(ours, [step])
        if t % 9 and t != 51:
            continue
        whole, *others = [sampled(buffer, 16, t) for buffer in ours]
        for batch in others:
            check_same(batch, whole, 1e-6 if kind == "n steps" else 0)
        if kind == "priorities":
            for buffer in ours:
                buffer.update_priorities(whole.indices, np.linspace(0, 2, 16))
    for name in ("observations", "next_observations", "rewards", "dones"):
        whole, *others = [getattr(buffer, name) for buffer in ours]
        for column in others:
            jax.tree.map(np.testing.assert_array_equal, column, whole)
    owner = ours[2]._owner  # as the device counts them, so that any buffer may open the folder
    (flags, written), journal = flags_of(owner.state), owner.place.tier._store.journal["flags"]
    np.testing.assert_array_equal(journal[written], np.asarray(flags)[written])
    again = pickle.loads(pickle.dumps(ours[1]))
    added_to([again, ours[0]], stream(space, BOX, ours[0].n_envs, 10, seed=1))
    check_same(sampled(again, 16), sampled(ours[0], 16), 1e-6 if kind == "n steps" else 0)
    with refused("rows are in files is not pickled; save it by", TypeError):
        pickle.dumps(ours[2])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [sb3.HerReplayBuffer, sb3.PrioritizedHerReplayBuffer])
def test_goals_are_the_same_wherever_the_rows_lie(kind, tmp_path):
    ours = [hindsight.make(90, kind, **place) for place in places(tmp_path)]
    for start in range(0, 60, 20):
        batches = []
        for buffer in ours:
            hindsight.fill(buffer, 20, start=start)
            batches.append(sampled(buffer, 32, start))
        for batch in batches[1:]:
            check_same(batch, batches[0])


def test_a_folder_goes_on_if_it_is_resumed_and_else_begins_anew(tmp_path):
    folder, saved = tmp_path / "rows", tmp_path / "saved"
    options = {"buffer_size": 100, "num_envs": 2}
    given = {"rows": folder, "n_steps": 2, "gamma": 0.99}
    made = functools.partial(saves.dqn, **options, replay_buffer_kwargs=given)
    made = functools.partial(made, kind=sb3.NStepReplayBuffer)
    model = made()
    model.learn(60, callback=sb3.SaveCallback(saved, save_freq=40))
    kept = copy.deepcopy(model.replay_buffer.rewards)
    model.learn(20, reset_num_timesteps=False)  # not saved, and then killed
    model.replay_buffer.close()
    with refused("this buffer is closed", RuntimeError):
        model.replay_buffer.sample(4)
    model = sb3.resume(saved, made())
    assert model.num_timesteps == 60
    np.testing.assert_array_equal(model.replay_buffer.rewards, kept)
    model.replay_buffer.close()
    model = made().learn(20)  # a new run
    assert model.replay_buffer.size() == 10
    assert np.count_nonzero(model.replay_buffer.rewards) == 20
    model.replay_buffer.close()
    with refused("the rows of this checkpoint are not in"):
        sb3.resume(saved, made())


@pytest.mark.parametrize("kind", [thorough("dict"), "priorities", thorough("goals")])
def test_a_guard_of_transfers_holds_for_no_buffer(kind):
    with jax.transfer_guard("disallow"):
        for place in ({}, {"rows": "host"}):
            if kind == "goals":
                buffer = hindsight.make(90, **place)
                hindsight.fill(buffer, 20)
            else:
                buffer = KINDS[kind](**place)
                space = DICT if kind == "dict" else VECTOR
                added_to([buffer], stream(space, BOX, buffer.n_envs, 40))
            batch = buffer.sample(16)
            if kind == "priorities":
                buffer.update_priorities(batch.indices, np.ones(16))
            assert buffer.rewards.any()
            assert pickle.loads(pickle.dumps(buffer)).size() == buffer.size()
            buffer.reset()
