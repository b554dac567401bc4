"""A sharded buffer, compiled for four TPUs that are not there: what is sent, and that no program
copies the buffer. Only `make aot` runs it."""

import os

import pytest

if "libtpu" not in os.environ.get("JAXREPLAY_AOT", ""):
    pytest.skip("needs the compilers that `make aot` installs", allow_module_level=True)

import dataclasses

import devices
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from programs import CASES, NUM_ENVS
from test_programs import copies

import jaxreplay as jr
from tests.support.hlo import sent
from tests.support.steps import num_bytes

D, BATCH_SIZE = 4, 256
NAMES = ("uniform", "prioritized", "uniform, images")


def compiled(buffer, case):
    """Return each compiled program by name: add, sample, update and a loop of all."""
    by_shard, whole = (NamedSharding(buffer.mesh, spec) for spec in (P("data"), P()))

    def placed(spec, shape, sharding=by_shard):
        return jax.ShapeDtypeStruct(shape, spec.dtype, sharding=sharding)

    own = jax.eval_shape(buffer.local.buffer.init, case.example())
    state = jax.tree.map(
        lambda spec: placed(spec, (D * (spec.shape or (1,))[0], *spec.shape[1:])), own
    )
    step = jax.tree.map(lambda spec: placed(spec, (NUM_ENVS, *spec.shape)), case.example())
    key = placed(jax.eval_shape(lambda: jax.random.key(0)), (), whole)
    batch = jax.eval_shape(buffer.sample, state, key)

    def loop(state, step, key):
        def iteration(state, key):
            state = buffer.add(state, step)
            batch = buffer.sample(state, key)
            reward = jnp.abs(batch.experience.reward)
            if buffer.buffer.sampler.has_priorities:
                state = buffer.update_priorities(state, batch.index, reward)
            return state, reward.sum()

        return jax.lax.scan(iteration, state, jax.random.split(key, 100))

    calls = {"add": (buffer.add, (state, step), 0), "sample": (buffer.sample, (state, key), ())}
    if buffer.buffer.sampler.has_priorities:
        given = (state, batch.index, batch.probability)
        calls["update"] = (buffer.update_priorities, given, 0)
    calls["loop"] = (loop, (state, step, key), 0)
    return own, {
        name: jax.jit(function, donate_argnums=donated).lower(*given).compile()
        for name, (function, given, donated) in calls.items()
    }


@pytest.mark.parametrize("name", [f"v5e-{name}" for name in NAMES])
def test_shards_of_four_tpus(name):
    if reason := devices.why_not("v5e"):
        pytest.fail(reason)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=devices.TPUS["v5e"])
    mesh = Mesh(np.array(topology.devices), ("data",))
    case = CASES[name.removeprefix("v5e-")]
    whole = case.replay("tpu", BATCH_SIZE)
    buffer = jr.sharded(dataclasses.replace(whole, capacity=D * whole.capacity), mesh)
    own, programs = compiled(buffer, case)
    tenth = max(map(num_bytes, jax.tree.leaves(own.rows.steps))) // 10
    for one, program in programs.items():
        assert not copies(program.as_text(), tenth), one
        assert program.memory_analysis().temp_size_in_bytes < tenth, one
    shares, largest = ("all-gather", 12 * D), ("all-reduce", 4)
    assert sent(programs["add"].as_text()) == []
    assert sent(programs["sample"].as_text()) == [shares]
    if "update" in programs:
        assert sent(programs["update"].as_text()) == [largest]
    sums = ("all-reduce", 4 * 100)  # of the rewards, after the loop
    assert set(sent(programs["loop"].as_text())) <= {shares, largest, sums}
