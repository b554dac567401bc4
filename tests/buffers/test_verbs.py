"""The table of methods: each form of a buffer has them, or says what to do instead."""

import inspect
import re

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import datasets
from jaxreplay._util import xla
from jaxreplay.buffers.verbs import VERBS
from tests.support.refusals import refused

BUFFER = jr.prioritized(
    capacity=16,
    num_envs=2,
    batch_size=4,
    autoreset="same_step_no_final_obs",
    allow_mask=True,
    allow_write=True,
    track_episodes=True,
)
NUMBERS, FLAGS = np.zeros(2, np.float32), np.zeros(2, bool)
STEP = jr.Step(NUMBERS, NUMBERS, NUMBERS, terminated=FLAGS, truncated=FLAGS)
BLOCK, EXAMPLE = (jax.tree.map(take, STEP) for take in (lambda x: x[None], lambda x: x[0]))
INDEX = jr.types.Index(np.arange(4, dtype=np.int32), np.zeros(4, np.uint32))
EPISODE = datasets.Episode(np.zeros(3, np.float32), NUMBERS, NUMBERS, FLAGS, FLAGS)
ARRAYS = {"observations": NUMBERS, "actions": NUMBERS, "rewards": NUMBERS, "terminals": ~FLAGS}
FOUR = np.ones(4, np.float32)
KINDS = jr.ReplayBuffer, jr.Mixture, jr.Groups
# What is given to each method after the state. "state" stands for that of another buffer.
GIVEN = {
    "add": (STEP,),
    "extend": (BLOCK,),
    "sample": (jax.random.key(0),),
    "pop": (jax.random.key(0),),
    "get": (INDEX,),
    "update_priorities": (INDEX, FOUR),
    "write": (INDEX, {"reward": FOUR}),
    "map_rows": (lambda step, next_obs: {"reward": step.reward},),
    "age": (INDEX,),
    "end_streams": (~FLAGS,),
    "drop": (~FLAGS,),
    "merge": ("state",),
}

# All that takes a buffer, called with one, a state, and a path. What comes back shows the buffer.
TAKERS = {
    "jit": lambda buffer, *_: jr.jit(buffer).buffer,
    "frame_stack": lambda buffer, *_: jr.frame_stack(buffer, 2),
    "hindsight": lambda buffer, *_: jr.hindsight(buffer, sum_of, strategy="random"),
    "relabel": lambda buffer, *_: jr.relabel(buffer, sum_of),
    "transform": lambda buffer, *_: jr.transform(buffer, sum_of),
    "mix": lambda buffer, *_: jr.mix(one=(buffer, 2)),
    "tiered": lambda buffer, *_: jr.tiered(buffer).buffer,
    "plan": lambda buffer, *_: jr.plan(buffer, EXAMPLE).memory,
    "inspect": lambda buffer, state, _: jr.inspect(buffer, state).streams,
    "Replay": lambda buffer, *_: jr.Replay(buffer).buffer,
    "Replay, on the host": lambda buffer, *_: jr.Replay(buffer, rows="host").buffer,
    "Replay, mixed": lambda buffer, *_: jr.Replay(jr.mix(one=(buffer, 2)), rows="host").buffer,
    "Feed": lambda buffer, *_: jr.actors.Feed(buffer, EXAMPLE)._buffer,
    "from_episodes": lambda buffer, *_: datasets.from_episodes([EPISODE], buffer).layout,
    "from_arrays": lambda buffer, *_: datasets.from_arrays(ARRAYS, buffer).layout,
    "to_episodes": lambda buffer, state, _: len([*datasets.to_episodes(buffer, state)]),
    "sharded": lambda buffer, *_: sharded(buffer).buffer,
    "Checkpointer": lambda buffer, _, path: saved(path, buffer),
    "Checkpointer, mixed": lambda buffer, _, path: saved(path, jr.mix(one=(buffer, 2))),
    "Checkpointer of several": lambda buffer, _, path: saved(path, {"one": buffer}),
    "open": lambda buffer, _, path: jr.open(path, buffer).buffer.layout(),
}
ALL = [name for name in VERBS if name != "close"]  # which is a `Groups`' own
NO_QUEUE = dict.fromkeys(("pop", "can_add"), "Prioritized samples with replacement")
OUTSIDE = "call it outside of jit, since it moves rows on the host"
# The errors of those that a form does not take, in a program.
IN_EACH = "a sharded buffer has no episode_table; inside of a jax.shard_map, each shard has it"
REFUSED = {
    "plain": NO_QUEUE,
    "jitted": NO_QUEUE,
    "sharded": NO_QUEUE | {"episode_table": IN_EACH},
    "jitted, sharded": NO_QUEUE | {"episode_table": IN_EACH},
    "tiered": NO_QUEUE
    | {name: OUTSIDE for name in ALL if VERBS[name].changes == "state" and name != "pop"}
    | {"sample": OUTSIDE, "adopt": OUTSIDE},
}
INSTEAD = {name: verb.of_replay for name, verb in VERBS.items() if verb.of_replay}


def sum_of(*given):
    return jax.numpy.float32(len(given))


def saved(path, buffer):
    checkpointer = pytest.importorskip("jaxreplay.checkpoint").Checkpointer(path, buffer)
    return {name: saver.buffer for name, saver in checkpointer._savers.items()}


def sharded(buffer=BUFFER):
    if xla.shard_map is None:
        pytest.skip("this JAX has no jax.shard_map")
    return jr.sharded(buffer, jax.make_mesh((1,), ("data",)))


FORMS = {
    "plain": lambda: BUFFER,
    "jitted": lambda: jr.jit(BUFFER),
    "sharded": sharded,
    "jitted, sharded": lambda: jr.jit(sharded()),
    "tiered": lambda: jr.tiered(BUFFER),
}


def given_to(name, state):
    return [state if isinstance(one, str) else one for one in GIVEN.get(name, ())]


def test_the_table_has_the_methods_that_take_a_state():
    names = {
        name
        for kind in KINDS
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if name[0] != "_" and {"state", "states"} & {*inspect.signature(method).parameters}
    }
    assert names == set(VERBS)
    assert {verb.axis for verb in VERBS.values()} == {None, 0, 1}  # counted from the first


@pytest.mark.no_xla
@pytest.mark.parametrize("form", REFUSED)
@pytest.mark.parametrize("name", ALL)
def test_each_form_takes_a_method_or_says_why_not(form, name):
    buffer = FORMS[form]()
    state = jax.eval_shape(lambda: (buffer.index if form == "tiered" else buffer).init(EXAMPLE))

    def call(state):
        found = getattr(buffer, name)(state, *given_to(name, state))
        return found.state if name == "episode_table" else found

    if name in REFUSED[form]:
        with refused(REFUSED[form][name], (ValueError, AttributeError)) as error:
            jax.eval_shape(call, state)
        assert name in str(error.value)
    else:
        found = jax.eval_shape(call, state)
        is_state = jax.tree.structure(found) == jax.tree.structure(state)
        assert is_state == (VERBS[name].changes is not None or name in ("adopt", "episode_table"))


@pytest.mark.no_xla
@pytest.mark.parametrize("name", ALL)
def test_a_replay_has_a_method_or_names_its_own(name):
    replay = jr.Replay(BUFFER)
    if name in INSTEAD:
        with pytest.raises(AttributeError) as error:
            getattr(replay, name)
        assert str(error.value) == f"a Replay has no {name}; it has {INSTEAD[name]}"
        assert {*re.findall(r"replay\.(\w+)", INSTEAD[name])} <= {*dir(replay)}
    else:
        assert callable(getattr(replay, name))


def test_an_opened_replay_refuses_what_would_change_rows(tmp_path):
    pytest.importorskip("jaxreplay.checkpoint", reason="an extra is not installed")
    replay = jr.Replay(BUFFER, state=jr.jit(BUFFER).extend(BUFFER.init(EXAMPLE), BLOCK))
    replay.save(tmp_path)
    opened, state = jr.open(tmp_path, BUFFER), replay.state
    for name in ALL:
        if VERBS[name].changes == "state" and name not in INSTEAD:
            with refused("are opened to be read; Replay.load copies them"):
                getattr(opened, name)(*given_to(name, state))


def test_a_form_shows_the_methods_of_the_buffer():
    assert {*ALL} < {*dir(jr.tiered(BUFFER))}
    buffer = jr.jit(BUFFER)
    public = {name for name in dir(BUFFER) if name[0] != "_"}
    assert public < {*dir(buffer)}
    assert len(dir(buffer)) == len({*dir(buffer)})
    assert buffer.__doc__ == BUFFER.__doc__
    for name in VERBS.keys() & public:
        own, method = getattr(buffer, name), getattr(BUFFER, name)
        assert inspect.signature(own) == inspect.signature(method)
        assert own.__doc__ == method.__doc__
    assert buffer.memory(EXAMPLE) == BUFFER.memory(EXAMPLE)


@pytest.mark.parametrize("name", TAKERS)
def test_what_takes_a_buffer_takes_a_jitted_one(name, tmp_path):
    buffer, state = jr.jit(BUFFER), BUFFER.init(EXAMPLE)
    state = buffer.extend(state, BLOCK)
    if name == "open":
        checkpoint = pytest.importorskip("jaxreplay.checkpoint")
        checkpoint.save(tmp_path, buffer, state)
    found, expected = (TAKERS[name](one, state, tmp_path) for one in (buffer, BUFFER))
    assert found == expected


def test_a_jitted_sharded_buffer_is_taken():
    buffer = sharded()
    assert jr.plan(jr.jit(buffer), EXAMPLE).memory == jr.plan(buffer, EXAMPLE).memory
    assert set(VERBS) - {"close"} < {*dir(buffer)}
    assert inspect.signature(buffer.add) == inspect.signature(BUFFER.add)
    assert (buffer.add.__doc__, buffer.add) == (BUFFER.add.__doc__, buffer.add)
    assert (buffer.capacity, buffer.memory(EXAMPLE)) == (BUFFER.capacity, BUFFER.memory(EXAMPLE))


def test_a_jitted_mixture_and_rollout_are_taken(tmp_path):
    mixture = jr.mix(one=(BUFFER, 2))
    assert jr.Replay(jr.jit(mixture)).buffer == mixture
    rollout = jr.rollout(length=4, num_envs=2, autoreset="next_step")
    for one in (mixture, rollout):
        assert saved(tmp_path, jr.jit(one)) == saved(tmp_path, one)


class OfNumbers(jr.Queue):
    """A queue that looks at the number of rows, as a program may not."""

    def can_add(self, state, sampleable, num_rows):
        assert num_rows in (2, 3)
        return super().can_add(state, sampleable, num_rows)


def test_a_number_of_steps_is_known_while_a_program_is_traced():
    buffer = jr.jit(jr.items(capacity=4, batch_size=2, sampler=OfNumbers()))
    state = buffer.init(np.float32(0))
    assert buffer.can_add(state, 2)
    assert buffer.can_add(state, num_steps=3)
