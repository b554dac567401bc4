"""One of two processes, with two devices each, of whose saves and restores one fails:
`python errors.py 2 WHICH PORT FOLDER NUMBER_OF_MESHES`. Both get the error, and both go on."""

import errno
import functools
import gc
import os
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError, PathInUseError
from tests.distributed.processes import digests, part_of, run
from tests.support.checkpointed_run import EXAMPLE, expected, items, numbers, step

REPLAY = items(capacity=256, num_envs=8)


def fails(checkpointer, in_process):
    """Let writes of rows fail in a process, until the returned function is called."""
    store = checkpointer._store
    write, error = store.write, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def broken(name, parts):
        if name.startswith("rows"):
            raise error  # the same object each time
        write(name, parts)

    if jax.process_index() == in_process:
        store.write = broken
    return lambda: setattr(store, "write", write)


def refused(message, call, *given, kind=ValueError, **options):
    with pytest.raises(kind, match=message):
        call(*given, **options)


def not_there(state):
    raise KeyError("not there")


def pointers(state):
    shards = state.rows.steps["bytes"].addressable_shards
    return [shard.data.unsafe_buffer_pointer() for shard in shards]


def live_bytes():
    """Return the bytes of this process's arrays."""
    gc.collect()
    shards = (shard for leaf in jax.live_arrays() for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards)


def deep(levels):
    return [deep(levels - 1)] if levels else []


def left(processes, error):
    with processes.agreed():
        if error is not None:
            raise error


def placed(sharding, leaf):
    return jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)


def main(num, which, folder, num_meshes):
    mesh = jax.make_mesh((4,), ("data",))
    buffer = jr.sharded(REPLAY, mesh)
    add = jax.jit(buffer.add, donate_argnums=0)

    def added(state, start, count):
        for t in range(start, start + count):
            state = add(state, buffer.from_local(part_of(step(t, 8), num, which)))
        return state

    def sums(state):
        return int(jax.jit(lambda s: s.rows.steps["number"].sum())(state))

    folder = pathlib.Path(folder)
    state = added(buffer.init(EXAMPLE), 0, 20)
    elsewhere = Checkpointer(folder / f"of {which}", buffer)
    refused("is another place for each process", elsewhere.save, state, kind=OSError)
    refused("there is no checkpoint", elsewhere.restore, EXAMPLE, kind=FileNotFoundError)

    processes = elsewhere._processes
    sizes = 0, 2**25 + 77  # of which the second is sent in pieces
    assert [len(one) for one in processes.told(bytes(sizes[which]))] == [*sizes]
    assert processes.first(lambda: bytes(sizes[1 - which])) == bytes(sizes[1])
    error, kind, text = None, RuntimeError, "an error that cannot be read in this process"
    if which:  # of a class that the other process does not have
        globals()["Unknown"] = kind = type("Unknown", (ValueError,), {})
        error, text = kind("not known"), "not known"
    for _ in range(2):
        refused(text, left, processes, error, kind=kind)

    one = Checkpointer(folder / "run", buffer, chunk_bytes=2000)
    one.save(state, 20)
    assert len(one._base.members[""].saves) == 1
    before = pointers(state)
    state = added(state, 20, 1)  # in place
    assert pointers(state) == before
    wanted = {20: sums(state)}
    other = Checkpointer(folder / "run", buffer)
    refused("has a newer checkpoint, by", other.save, state, 21, kind=PathInUseError)
    message = "No space left on device"
    for which_fails in (0, 1):
        state = added(state, 20, 5)
        whole = fails(one, which_fails)
        for _ in range(2):
            refused(message, one.save, state, 25, kind=OSError)
        assert one.all_steps() == [20]
        whole()
    refused("the state must be a ReplayState", one.save, 3 if which else state, 40)
    everywhere = NamedSharding(mesh, P())
    refused("must lie where init puts it", one.save, jax.device_put(state, everywhere), 40)
    uneven = Checkpointer(folder / "run", buffer, chunk_bytes=2000 + which)
    message = "chunk_bytes and compression_level must be eq"
    uneven.restore(EXAMPLE)
    refused(message, uneven.save, state, 40)
    message = "step and allow_partial must be equal in all"
    refused(message, one.restore, EXAMPLE, [None, 20][which])
    message = "metadata must be JSON, nested at most 100"
    refused(message, one.save, state, 40, metadata={"a": deep(200 * which)})
    assert one.all_steps() == [20]
    shards = one._savers[""]._shards
    parts, shards.parts = shards.parts, [shards.parts, not_there][which]
    refused("not there", one.save, state, 40, kind=KeyError)
    shards.parts = parts
    one.save(state, 40, metadata={"of": which})
    wanted[40] = sums(state)
    state = added(state, 40, 20)
    one.save(state, 60)
    wanted[60] = sums(state)
    one.save(state, 62)
    wanted[62] = sums(state)
    assert one.all_steps() == [40, 60, 62]

    # groups that lie on the last device alone
    newest = [group for group in one._base.members[""].groups if group.env == 6][-1]
    if which == 0:
        file = folder / "run" / newest.file
        file.write_bytes(b"\0" + file.read_bytes()[1:])
    one._processes.told(None)
    before = live_bytes()
    with pytest.warns(UserWarning, match="step 40 was restored; this is damaged"):
        got = one.restore(EXAMPLE)
    assert (one.step, sums(got), one.metadata) == (40, wanted[40], {"of": 0})
    size = sum(leaf.nbytes // 2 for leaf in jax.tree.leaves(got))
    assert size <= live_bytes() - before < 1.1 * size
    del got
    assert live_bytes() == before
    refused("no step 62", one.restore, EXAMPLE, 62, kind=CorruptCheckpointError)
    with pytest.warns(UserWarning, match="rows are lost"):
        got = one.restore(EXAMPLE, 62, allow_partial=True)
    lost = {missing.env for missing in one.missing_rows}
    assert one.step == 62
    assert lost
    assert lost >= set(range(newest.env, newest.env_stop))
    counts = np.asarray(one._savers[""]._shards.split(got)[1]["counters"]["filled"])
    assert (counts < 32).sum() == len(lost)

    devices = np.array(jax.devices())
    meshes = (
        (devices[[0, 2, 1, 3]], ("data",)),  # each process has two runs of shards
        (devices.reshape(2, 2).T, ("data", "model")),  # replicas in the other process
        (devices.reshape(2, 2), ("data", "model")),  # replicas in one process
    )
    for nth, (found, names) in enumerate(meshes[: int(num_meshes)]):
        buffer = jr.sharded(REPLAY, Mesh(found, names))
        sharding = NamedSharding(buffer.mesh, P("data"))
        add, state = jax.jit(buffer.add, donate_argnums=0), buffer.init(EXAMPLE)
        checkpointer = Checkpointer(folder / f"mesh {nth}", buffer, chunk_bytes=2000)
        for t in range(40):
            state = add(state, jax.tree.map(functools.partial(placed, sharding), step(t, 8)))
            if t in (10, 39):
                checkpointer.save(state, t)
        got = checkpointer.restore(EXAMPLE)
        leaves = zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True)
        assert all(leaf.sharding == wanted.sharding for leaf, wanted in leaves)
        assert digests("own", got) == digests("own", state)
        if which == 0:
            alone = Checkpointer(folder / f"mesh {nth}", REPLAY).restore(EXAMPLE)
            assert numbers(REPLAY, alone) == expected(REPLAY, 40)

    if which == 0:  # a buffer of this process alone asks nobody
        alone = jr.sharded(REPLAY, Mesh(jax.local_devices(), ("data",)))
        checkpointer = Checkpointer(folder / "alone", alone)
        checkpointer.save(alone.init(EXAMPLE), 3)
        assert int(alone.size(checkpointer.restore(EXAMPLE))) == 0
    else:
        others = jr.sharded(REPLAY, Mesh(devices[:2], ("data",)))
        refused("this process has no device of the buffer's mesh", Checkpointer, folder, others)


if __name__ == "__main__":
    run(main)
