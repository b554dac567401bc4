"""Programs that take and return states can be exported for several platforms at once, serialized
and deserialized."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jaxreplay as jr
from jaxreplay._util import struct
from jaxreplay.samplers import ConsumingSampler, PrioritySampler
from tests.conftest import SOAK
from tests.support.buffers import CATALOG, KINDS, bits

ALL = ("cpu", "cuda", "tpu")


def methods(case, buffer):
    """Return name -> (method, its arguments after the state)."""
    block = (case.step(3, time=5), *case.mask(buffer, 3, 5))
    found = {
        "add": (buffer.add, (case.step(), *case.mask(buffer, 0))),
        "extend": (buffer.extend, block),
        "get": (buffer.get, (jnp.arange(8), jax.random.key(0))),
        "size": (buffer.size, ()),
        "clear": (buffer.clear, ()),
    }
    if isinstance(buffer.sampler, ConsumingSampler):
        return found | {"pop": (buffer.pop, (jax.random.key(0),)), "can_add": (buffer.can_add, ())}
    found["sample"] = (buffer.sample, (jax.random.key(0),))
    if isinstance(buffer.sampler, PrioritySampler):
        index = jax.jit(buffer.sample)(case.filled(buffer), jax.random.key(0)).index
        found["update_priorities"] = (buffer.update_priorities, (index, jnp.ones(8)))
    if hasattr(buffer.sampler, "rerank"):
        found["rerank"] = (buffer.rerank, ())
    return found


# One kind a platform is tested with all operations, the other kinds only with those that take the
# entire state and return it or a batch.
_WHOLE = {
    "uniform masked, episodes": "gpu",
    "prioritized same_step, 3 steps": "tpu",
    "transitions queue": "cpu",
}


@pytest.mark.parametrize(
    ("case", "platform"),
    [(case, platform) for case in CATALOG for platform in ("cpu", "gpu", "tpu") if SOAK]
    or [(case, _WHOLE.get(case.name, "cpu")) for case in KINDS],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_operation_is_exported_for_all_platforms_and_serialized(case, platform):
    buffer = dataclasses.replace(case.replay(), platform=platform)
    state = case.filled(buffer)
    for name, (method, arguments) in methods(case, buffer).items():
        if not SOAK and case.name not in _WHOLE and name not in ("add", "sample", "pop"):
            continue
        exported = export.export(jax.jit(method), platforms=ALL)(state, *arguments)
        assert exported.platforms == ALL, name
        again = export.deserialize(exported.serialize())
        assert again.in_tree == jax.tree.structure(((state, *arguments), {})), name
        if SOAK or name in ("sample", "add"):
            assert bits(again.call(state, *arguments)) == bits(
                jax.jit(method)(state, *arguments)
            ), name


def test_rollouts_and_mixtures_are_exported():
    zeros = jnp.zeros(2)
    step = jr.Step(obs=zeros, action=zeros, reward=zeros, terminated=zeros > 0, truncated=zeros > 0)
    rollout = jr.rollout(length=4, num_envs=2, autoreset="next_step")
    state = rollout.init(jax.tree.map(lambda x: x[0], step))
    assert (
        export.deserialize(
            export.export(jax.jit(rollout.add), platforms=ALL)(state, step).serialize()
        ).platforms
        == ALL
    )
    buffer = jr.uniform(capacity=16, num_envs=2, batch_size=2, autoreset="same_step_no_final_obs")
    mixture = jr.mix(a=(buffer, 2), b=(buffer, 3))
    state = buffer.init(jax.tree.map(lambda x: x[0], step))
    exported = export.export(jax.jit(mixture.sample))({"a": state, "b": state}, jax.random.key(0))
    assert export.deserialize(exported.serialize()).out_tree == exported.out_tree
    delta = jnp.ones((5, 2))
    exported = export.export(
        jax.jit(
            lambda x: jr.gae(x, x, x, terminated=x > 2, truncated=x > 2, gamma=0.9, lambda_=0.9)
        ),
        platforms=ALL,
    )(delta)
    assert export.deserialize(exported.serialize()).platforms == ALL


def test_no_kind_of_state_is_forgotten():
    """Every pytree class of the library is a `Node` or `Static`, which `jax.export` knows."""
    package = pathlib.Path(jr.__file__).parent
    register = re.compile(r"register_(dataclass|static|pytree_node(_class)?|pytree_with_keys)\b")
    files = {
        path.relative_to(package)
        for path in package.rglob("*.py")
        if register.search(path.read_text())
    }
    assert files == {pathlib.Path("_util/struct.py")}


class Layout(jr.views.View):
    """A user's class with the name of a class of the library."""


def test_a_user_s_class_of_the_same_name_is_another_one():
    buffer = jr.items(capacity=4, batch_size=1)
    exported = export.export(jax.jit(buffer.size))(buffer.init(jnp.float32(0)))
    ((state,), _) = jax.tree.unflatten(
        export.deserialize(exported.serialize()).in_tree, [0] * exported.in_tree.num_leaves
    )
    assert state.layout == buffer.init(jnp.float32(0)).layout


def test_a_node_may_be_defined_again():
    """A notebook cell may run twice: programs of both classes are serialized and deserialized."""

    def define():
        class Again(struct.Node):
            x: jax.Array

        return Again

    for kind in (define(), define()):
        exported = export.export(jax.jit(lambda node: node.x + 1))(kind(jnp.float32(1)))
        assert export.deserialize(exported.serialize()).call(kind(jnp.float32(1))) == 2
