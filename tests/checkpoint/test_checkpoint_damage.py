"""Tests of damaged checkpoints: swapped files, damage that several checkpoints share, and partial
restores."""

import contextlib
import random

import jax
import numpy as np
import pytest

from jaxreplay import checkpoint
from jaxreplay.__main__ import main
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError, PathInUseError
from tests.checkpoint.runs import files_of, groups_of, quiet, span_of
from tests.conftest import ALL
from tests.support.buffers import (
    CATALOG,
    KINDS,
    NUM_ENVS,
    bits,
    each,
    everything,
    jitted,
    jitted_draw,
)
from tests.support.checkpointed_run import EXAMPLE, REPLAY, added, begun, expected, items, numbers
from tests.support.refusals import refused, warned
from tests.support.steps import nth


def flipped(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def saves(checkpointer, ends):
    """Save a run at each of these steps, and return its last state."""
    state, start = begun(REPLAY, 0), 0
    for end in ends:
        state, start = added(REPLAY, state, start, end - start), end
        checkpointer.save(state, end)
    return state


def is_restored(path, step):
    """Return whether a step is restored, with its rows, or refused."""
    with quiet(), contextlib.suppress(CorruptCheckpointError):
        state = checkpoint.restore(path, REPLAY, EXAMPLE, step=step)
        assert numbers(REPLAY, state) == expected(REPLAY, step)
        return True
    return False


# Damage that several checkpoints share.


def damage(path, checkpointer):
    """Damage the oldest group, which all checkpoints share. Return the folder of the group."""
    oldest = min(group.file for group in groups_of(checkpointer))
    flipped(path / oldest)
    return oldest


@pytest.fixture
def shared(tmp_path):
    """Three checkpoints that share groups, and their path."""
    checkpointer = Checkpointer(tmp_path / "run", REPLAY, chunk_bytes=16_000)
    saves(checkpointer, (40, 44, 48))
    return checkpointer, tmp_path / "run"


def test_verify_names_what_is_broken_in_each_checkpoint(shared, capsys):
    checkpointer, path = shared
    steps = (48, 44, 40)
    assert [tuple(found) for found in checkpointer.verify()] == [(step, []) for step in steps]
    main(["inspect", "--verify", str(path)])
    assert capsys.readouterr().out == "".join(f"step {step}: is intact\n" for step in steps)
    for broken in files_of(path)[:: 1 if ALL else 5]:
        flipped(broken)
        found, own = checkpointer.verify(), str(broken.relative_to(path))
        assert any(one.problems for one in found), own
        for one in found:
            assert not one.problems or any(own in problem for problem in one.problems), (own, one)
            assert one.step is None or is_restored(path, one.step) == (not one.problems)
        flipped(broken)
    damage(path, checkpointer)

    def told(code, *arguments):
        """Return what the command prints, after a check of its exit status."""
        with pytest.raises(SystemExit) as ended:
            main(["inspect", "--verify", str(path), *arguments])
        assert ended.value.code == code
        return "".join(capsys.readouterr())

    said = told(1)
    assert said.count("is broken\n  rows/") == 3
    assert said.count("is not as it was written") == 3
    assert told(1, "--json", "--step", "44").count('"step": ') == 1
    # not checked is not intact
    assert "there is no checkpoint of step 9" in told(2, "--step", "9")
    assert "leave out --plot" in told(2, "--plot", "x")
    with refused("there is no checkpoint", FileNotFoundError):
        checkpoint.verify(path / "nothing")


# Partial restores.


def salvaged(path, text, buffer=REPLAY, **options):
    """Restore what is left, with a warning. Return the state and its Checkpointer."""
    checkpointer = Checkpointer(path, buffer)
    with warned(text):
        state = checkpointer.restore(EXAMPLE, allow_partial=True, **options)
    return state, checkpointer


def lost_of(checkpointer):
    """Return the (env, number) of each row that is missing."""
    return {
        (one.env, number)
        for one in checkpointer.missing_rows
        for number in range(one.first, one.last + 1)
    }


def numbered(times):
    return [[1_000_000 * env + t for t in times] for env in range(4)]


def test_only_what_is_lost_is_left_out(shared):
    before, path = shared
    checkpointer = Checkpointer(path, REPLAY)
    state = checkpointer.restore(EXAMPLE, allow_partial=True)  # without a warning
    assert checkpointer.missing_rows == []
    assert numbers(REPLAY, state) == expected(REPLAY, 48)
    damage(path, before)
    with refused(r"restore: nothing under .* can be restored", CorruptCheckpointError):
        checkpointer.restore(EXAMPLE)
    state, checkpointer = salvaged(path, r"of its 192 rows are lost:\n  rows/.* is not as it was")
    lost = {number for _, number in lost_of(checkpointer)}
    left = [t for t in range(48) if t not in lost]
    assert lost == set(range(left[0]))
    assert numbers(REPLAY, state) == numbered(left)
    # The state continues, and its next checkpoint is intact.
    checkpointer.save(added(REPLAY, state, 48, 3), 51)
    assert checkpointer.verify()[0].problems == []
    state = Checkpointer(path, REPLAY).restore(EXAMPLE)
    assert numbers(REPLAY, state) == numbered([*left, 48, 49, 50])


def test_when_the_rest_is_broken_an_older_checkpoint_is_restored(shared):
    checkpointer, path = shared
    damage(path, checkpointer)
    flipped(next((path / "rest").glob("*3-*")))
    assert salvaged(path, r"step 48: rest/(.|\n)*rows are lost")[1].step == 44


def test_the_checkpoint_of_which_most_is_left_is_salvaged(shared):
    """The newest rows of the newest one are damaged, and the oldest of all."""
    checkpointer, path = shared
    damage(path, checkpointer)
    flipped(max((path / "rows").iterdir()))
    state, reader = salvaged(path, "rows are lost")
    first = {one.last + 1 for one in reader.missing_rows}
    assert reader.step == 44
    assert numbers(REPLAY, state) == numbered(range(*first, 44))


def test_when_all_rows_are_lost_nothing_is_left_but_the_buffer(shared):
    path = shared[1]
    for file in (path / "rows").iterdir():
        flipped(file)
    state, _ = salvaged(path, "192 of its 192 rows")
    assert numbers(REPLAY, state) == [[]] * 4
    assert not bool(jitted(REPLAY, "can_sample")(state))
    assert numbers(REPLAY, added(REPLAY, state, 48, 2)) == numbered((48, 49))


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_is_left_in_another_capacity_is_saved_under_the_same_path(is_replaced, tmp_path):
    """As long as its checkpoint is there."""
    checkpointer = Checkpointer(tmp_path, REPLAY, chunk_bytes=4000)
    before = saves(checkpointer, [60])
    flipped(tmp_path / groups_of(checkpointer)[-3].file)
    small = items()
    state, checkpointer = salvaged(tmp_path, "rows are lost", small)
    assert checkpointer.missing_rows
    if is_replaced:
        checkpoint.save(tmp_path, REPLAY, before)
        with refused("has a newer checkpoint, by this process", PathInUseError):
            checkpointer.save(state)
    else:
        checkpointer.save(state)
        assert numbers(small, checkpointer.restore(EXAMPLE)) == numbers(small, state)


# Partial restores of every kind of buffer.

_NAMES = ("prioritized final_obs, masked", "transitions queue")
CASES = [case for case in CATALOG if case.name in _NAMES or (ALL and case in KINDS)]


@each(CASES)
def test_what_is_salvaged_is_as_it_was(case, tmp_path):
    """Damage a group and restore in part: rows that are older are as if they were overwritten. An
    item that is left is the same, or of rows around a loss."""
    r, buffer = random.Random(case.name), case.replay(capacity=96)
    checkpointer, state = Checkpointer(tmp_path, buffer, chunk_bytes=4096), None
    for block in range(5):
        state = fed(case, buffer, block, state)
        checkpointer.save(state, block)
    files = [group.file for group in groups_of(checkpointer)]
    assert len(files) >= 3
    flipped(tmp_path / r.choice(files[: len(files) // 2]))
    with warned("rows are lost"):
        got = checkpointer.restore(case.example(), 4, allow_partial=True)
    lost = lost_of(checkpointer)
    before, left = (
        {
            (env, n)
            for env, span in enumerate(zip(*span_of(buffer, one), strict=True))
            for n in range(*span)
        }
        for one in (state, got)
    )
    assert left == before - lost
    assert lost
    was, now = (jax.device_get(everything(buffer)(one, 1)) for one in (state, got))
    place = lambda env, number: env * buffer.length + number % buffer.length
    is_far = lambda env, number: not lost & {(env, number + away) for away in range(-4, 5)}
    assert not now.is_valid[[place(*row) for row in lost]].any()
    num_same = 0
    for row in (one for one in left if is_far(*one)):
        both = [nth((one.experience, one.is_valid), place(*row)) for one in (was, now)]
        if not buffer.sampler.consumes:
            assert both[0][1] == both[1][1]
        if both[1][1]:
            assert bits(both[0]) == bits(both[1])
            num_same += 1
    assert num_same > 5
    if buffer.sampler.has_priorities:  # ratios of priorities are unchanged
        is_both = (was.probability > 0) & (now.probability > 0)
        ratio = now.probability[is_both] / was.probability[is_both]
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)
    # The state continues around the ring.
    more = fed(case, buffer, 5, got)
    for key in range(3):
        batch = jitted_draw(buffer)(more, jax.random.key(key))
        assert np.asarray(batch.is_valid).all() or buffer.sampler.consumes


def fed(case, buffer, block, state=None):
    """Return a state after ten more steps, with random priorities where the sampler has any."""
    state = jitted(buffer, "init")(case.example()) if state is None else state
    given = [case.step(block, time=10), *(case.mask(buffer, block, 10) or [None])]
    if buffer.sampler.has_priorities:
        given.append(np.random.default_rng(block).random((10, NUM_ENVS), np.float32))
    return jitted(buffer, "extend")(state, *given)
