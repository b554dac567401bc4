"""Agent and replay as one step of orbax: by a `CheckpointManager`, and by its API of version 1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreplay.checkpoint import Checkpointer
from tests.checkpoint.runs import check_no_other_files
from tests.support.buffers import bits
from tests.support.checkpointed_run import EXAMPLE, added, begun, expected, items, numbers

ocp = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
orbax = pytest.importorskip("jaxreplay.compat.orbax", reason="an extra is not installed")

BUFFER = items()


def manager_at(path, **options):
    checkpointer = Checkpointer(path / "replay", BUFFER, chunk_bytes=4000)
    handlers = {
        "agent": ocp.StandardCheckpointHandler(),
        "replay": orbax.ReplayHandler(checkpointer),
    }
    options = ocp.CheckpointManagerOptions(**options)
    return checkpointer, ocp.CheckpointManager(
        path / "steps", item_handlers=handlers, options=options
    )


def save(manager, step, state, **options):
    args = ocp.args.Composite(
        agent=ocp.args.StandardSave({"w": jnp.full(3, step)}), replay=orbax.ReplaySave(state)
    )
    manager.save(step, args=args, **options)
    manager.wait_until_finished()


def restore(manager, step):
    like = {"w": jax.ShapeDtypeStruct((3,), jnp.int32)}
    args = ocp.args.Composite(
        agent=ocp.args.StandardRestore(like), replay=orbax.ReplayRestore(EXAMPLE)
    )
    found = manager.restore(step, args=args)
    assert found["agent"]["w"].tolist() == [step] * 3
    return found["replay"]


def test_orbax_commits_agent_and_replay(tmp_path):
    """What orbax keeps has its rows, and others are deleted. A run goes on from any of it."""
    checkpointer, manager = manager_at(tmp_path, max_to_keep=2)
    state = begun(BUFFER, 0)
    for step in range(10, 60, 10):
        state = added(BUFFER, state, step - 10, 10)
        save(manager, step, state)
    assert manager.all_steps() == [40, 50]
    assert len(checkpointer.all_steps()) == 3  # orbax deletes after a save
    for step in (50, 40):
        _, other = manager_at(tmp_path, max_to_keep=2)
        assert numbers(BUFFER, restore(other, step)) == expected(BUFFER, step)
    state = added(BUFFER, restore(other, 40), 40, 20)
    other.delete(50)
    save(other, 60, state)
    other.close()
    checkpointer, other = manager_at(tmp_path, max_to_keep=2)
    assert other.all_steps() == [40, 60]
    assert numbers(BUFFER, restore(other, 60)) == expected(BUFFER, 60)
    assert numbers(BUFFER, restore(other, 40)) == expected(BUFFER, 40)
    check_no_other_files(checkpointer, tmp_path / "replay")


def test_a_folder_that_orbax_deletes_while_it_is_read_names_no_step(tmp_path, monkeypatch):
    checkpointer, manager = manager_at(tmp_path)
    state = begun(BUFFER, 0)
    for step in (10, 20):
        state = added(BUFFER, state, step - 10, 10)
        save(manager, step, state)
    read = orbax._read

    def read_late(directory):
        if "10" in directory.parts:
            (directory / "jaxreplay.json").unlink(missing_ok=True)
        return read(directory)

    monkeypatch.setattr(orbax, "_read", read_late)
    save(manager, 30, added(BUFFER, state, 20, 10))
    assert checkpointer.all_steps() == [1, 2]
    manager.close()


def test_an_agent_that_resumes_by_orbax_has_the_returns_of_one_that_did_not(tmp_path):
    @jax.jit
    def trained(carry, state, stop):
        """What the agent does depends on what it has learned, and that on its samples."""

        def iteration(carry):
            agent, state = carry
            key, now = jax.random.wrap_key_data(agent["key"]), agent["time"]
            key, own = jax.random.split(key)
            reward = jnp.sin(agent["w"] * jnp.arange(4) + now)
            state = BUFFER.add(state, {"reward": reward})
            batch = BUFFER.sample(state, own)
            agent = {
                "w": agent["w"] + 0.1 * jnp.mean(batch.experience["reward"] * batch.weight),
                "key": jax.random.key_data(key),
                "time": now + 1,
                "return": agent["return"] + reward.sum(),
            }
            return agent, state

        return jax.lax.while_loop(lambda carry: carry[0]["time"] < stop, iteration, (carry, state))

    example = {"reward": jnp.float32(0)}
    agent = {
        "w": jnp.float32(1),
        "key": jax.random.key_data(jax.random.key(0)),
        "time": jnp.int32(0),
        "return": jnp.float32(0),
    }
    expected = trained(agent, BUFFER.init(example), 60)
    _, manager = manager_at(tmp_path)
    agent, state = trained(agent, BUFFER.init(example), 25)
    args = ocp.args.Composite(agent=ocp.args.StandardSave(agent), replay=orbax.ReplaySave(state))
    manager.save(25, args=args)
    manager.close()
    _, manager = manager_at(tmp_path)
    args = ocp.args.Composite(
        agent=ocp.args.StandardRestore(agent), replay=orbax.ReplayRestore(example)
    )
    found = manager.restore(25, args=args)
    assert bits(trained(found["agent"], found["replay"], 60)) == bits(expected)


def test_a_policy_of_orbax_decides_which_rows_stay(tmp_path):
    """Keep the best step, which is an old one."""
    checkpointer, manager = manager_at(
        tmp_path, max_to_keep=1, best_fn=lambda metrics: metrics["return"]
    )
    state = begun(BUFFER, 0)
    for step in range(10, 60, 10):
        state = added(BUFFER, state, step - 10, 10)
        save(manager, step, state, metrics={"return": 100 if step == 20 else step})
    assert manager.all_steps() == [20]
    assert numbers(BUFFER, restore(manager, 20)) == expected(BUFFER, 20)
    assert len(checkpointer.all_steps()) <= 3


def test_a_run_that_dies_between_the_two_commits_goes_on_from_the_step_before(tmp_path):
    checkpointer, manager = manager_at(tmp_path, max_to_keep=2)
    state = begun(BUFFER, 10)
    save(manager, 10, state)
    checkpointer.save(added(BUFFER, state, 10, 10))  # orbax's commit does not come
    checkpointer, manager = manager_at(tmp_path, max_to_keep=2)
    assert manager.latest_step() == 10
    state = restore(manager, 10)
    assert numbers(BUFFER, state) == expected(BUFFER, 10)
    for step in (20, 30):
        state = added(BUFFER, state, step - 10, 10)
        save(manager, step, state)
    for step in (20, 30):
        assert numbers(BUFFER, restore(manager, step)) == expected(BUFFER, step)
    assert len(checkpointer.all_steps()) <= 3


def test_version_1(tmp_path):
    v1 = pytest.importorskip("orbax.checkpoint.experimental.v1", reason="this orbax has no v1")
    checkpointer = Checkpointer(tmp_path / "replay", BUFFER)
    item = orbax.ReplayItem(checkpointer, EXAMPLE)
    for step in (10, 20):
        item.state = begun(BUFFER, step)
        v1.save_checkpointables(
            tmp_path / "steps" / str(step), {"agent": {"w": np.full(3, step)}, "replay": item}
        )
    for step in (10, 20):
        other = orbax.ReplayItem(Checkpointer(tmp_path / "replay", BUFFER), EXAMPLE)
        found = v1.load_checkpointables(
            tmp_path / "steps" / str(step), {"agent": {"w": np.zeros(3, int)}, "replay": other}
        )
        assert found["agent"]["w"].tolist() == [step] * 3
        assert numbers(BUFFER, other.state) == expected(BUFFER, step)
