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
    replay, agent = orbax.ReplayHandler(checkpointer), ocp.StandardCheckpointHandler()
    options = ocp.CheckpointManagerOptions(**options)
    handlers = {"agent": agent, "replay": replay}
    manager = ocp.CheckpointManager(path / "steps", item_handlers=handlers, options=options)
    return checkpointer, manager


def saved(manager, state, *steps, **metrics):
    """Add ten rows before each of the steps, and save it."""
    for step in steps:
        state = added(BUFFER, state, step - 10, 10)
        agent = ocp.args.StandardSave({"w": jnp.full(3, step)})
        args = ocp.args.Composite(agent=agent, replay=orbax.ReplaySave(state))
        given = {"metrics": {name: of[step] for name, of in metrics.items()}} if metrics else {}
        manager.save(step, args=args, **given)
        manager.wait_until_finished()
    return state


def check(manager, *steps):
    """Check that these steps are there, with the rows of each; return the state of the last."""
    like = {"w": jax.ShapeDtypeStruct((3,), jnp.int32)}
    agent, replay = ocp.args.StandardRestore(like), orbax.ReplayRestore(EXAMPLE)
    assert manager.all_steps() == [*steps]
    for step in steps:
        found = manager.restore(step, args=ocp.args.Composite(agent=agent, replay=replay))
        assert found["agent"]["w"].tolist() == [step] * 3
        assert numbers(BUFFER, found["replay"]) == expected(BUFFER, step)
    return found["replay"]


def test_orbax_commits_agent_and_replay(tmp_path):
    """What orbax keeps has its rows, and others are deleted. A run goes on from any of it, to the
    bit."""
    checkpointer, manager = manager_at(tmp_path, max_to_keep=2)
    state = saved(manager, begun(BUFFER, 0), 10, 20, 30, 40, 50)
    assert len(checkpointer.all_steps()) == 3  # orbax deletes after a save
    _, other = manager_at(tmp_path, max_to_keep=2)
    assert bits(check(other, 40, 50)) == bits(state)
    other.delete(50)
    saved(other, added(BUFFER, check(other, 40), 40, 10), 60)
    other.close()
    checkpointer, other = manager_at(tmp_path, max_to_keep=2)
    check(other, 40, 60)
    check_no_other_files(checkpointer, tmp_path / "replay")


def test_a_folder_that_orbax_deletes_while_it_is_read_names_no_step(tmp_path, monkeypatch):
    checkpointer, manager = manager_at(tmp_path)
    state, read = saved(manager, begun(BUFFER, 0), 10, 20), orbax._read

    def read_late(directory):
        if "10" in directory.parts:
            (directory / "jaxreplay.json").unlink(missing_ok=True)
        return read(directory)

    monkeypatch.setattr(orbax, "_read", read_late)
    saved(manager, state, 30)
    assert checkpointer.all_steps() == [1, 2]
    manager.close()


def test_a_policy_of_orbax_decides_which_rows_stay(tmp_path):
    """Keep the best step, which is an old one."""
    best = {"best_fn": lambda metrics: metrics["score"], "max_to_keep": 1}
    checkpointer, manager = manager_at(tmp_path, **best)
    scores = {10: 10, 20: 100, 30: 30, 40: 40, 50: 50}
    saved(manager, begun(BUFFER, 0), *scores, score=scores)
    check(manager, 20)
    assert len(checkpointer.all_steps()) <= 3


def test_a_run_that_dies_between_the_two_commits_goes_on_from_the_step_before(tmp_path):
    checkpointer, manager = manager_at(tmp_path, max_to_keep=2)
    state = saved(manager, begun(BUFFER, 0), 10)
    checkpointer.save(added(BUFFER, state, 10, 10))  # orbax's commit does not come
    checkpointer, manager = manager_at(tmp_path, max_to_keep=2)
    saved(manager, check(manager, 10), 20, 30)
    check(manager, 20, 30)
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
