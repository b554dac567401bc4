"""The table of methods: each form of a buffer has them, or says what to do instead."""

import inspect

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.buffers.verbs import VERBS
from tests.support.refusals import refused

BUFFER = jr.prioritized(
    capacity=16,
    num_envs=2,
    batch_size=4,
    autoreset="same_step_no_final_obs",
    allow_write=True,
    track_episodes=True,
)
NUMBERS, FLAGS = np.zeros(2, np.float32), np.zeros(2, bool)
STEP = jr.Step(NUMBERS, NUMBERS, NUMBERS, terminated=FLAGS, truncated=FLAGS)
BLOCK, EXAMPLE = (jax.tree.map(take, STEP) for take in (lambda x: x[None], lambda x: x[0]))
INDEX = jr.types.Index(np.arange(4, dtype=np.int32), np.zeros(4, np.uint32))
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
ALL = [name for name in VERBS if name != "close"]  # which is a `Groups`' own
NO_QUEUE = dict.fromkeys(("pop", "can_add"), "Prioritized samples with replacement")
OUTSIDE = "call it outside of jit"
# The errors of those that a form does not take, in a program.
REFUSED = {
    "plain": NO_QUEUE,
    "jitted": NO_QUEUE,
    "tiered": NO_QUEUE
    | {name: OUTSIDE for name in ALL if VERBS[name].changes == "state" and name != "pop"}
    | {"sample": OUTSIDE, "adopt": OUTSIDE},
}
INSTEAD = {
    "extend": "replay.add(steps)",
    "pop": "replay.sample()",
    "size": "len(replay)",
    "can_add": "replay.buffer.can_add(replay.state)",
    "adopt": "Replay(buffer, state=state)",
}


def form_of(name):
    return {"plain": BUFFER, "jitted": jr.jit(BUFFER), "tiered": jr.tiered(BUFFER)}[name]


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


@pytest.mark.no_xla
@pytest.mark.parametrize("form", REFUSED)
@pytest.mark.parametrize("name", ALL)
def test_each_form_takes_a_method_or_says_why_not(form, name):
    buffer = form_of(form)
    state = jax.eval_shape(lambda: (buffer.index if form == "tiered" else buffer).init(EXAMPLE))

    def call(state):
        found = getattr(buffer, name)(state, *given_to(name, state))
        return found.state if name == "episode_table" else found

    if name in REFUSED[form]:
        with refused(f"{name}: .*{REFUSED[form][name]}"):
            jax.eval_shape(call, state)
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
    else:
        assert callable(getattr(replay, name))


def test_an_opened_replay_refuses_what_would_change_rows(tmp_path):
    pytest.importorskip("jaxreplay.checkpoint", reason="an extra is not installed")
    replay = jr.Replay(BUFFER)
    replay.add(BLOCK)
    replay.save(tmp_path)
    opened, state = jr.open(tmp_path, BUFFER), replay.state
    for name in ALL:
        if VERBS[name].changes == "state" and name not in INSTEAD:
            with refused("are opened to be read; Replay.load copies them"):
                getattr(opened, name)(*given_to(name, state))


def test_a_jitted_buffer_shows_the_methods_of_the_buffer():
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


def test_a_jitted_buffer_compiles_map_rows_once_for_each_function():
    buffer, num = jr.jit(BUFFER), 0

    def add(step, next_obs, number):
        nonlocal num
        num += 1
        return {"reward": step.reward + number}

    state = buffer.add(buffer.init(EXAMPLE), STEP)
    for number in np.float32([1, 2]):
        before, state = state, buffer.map_rows(state, add, number, block=16)
        assert before.rows.steps.reward.is_deleted()
        traced, num = num, 0
    assert traced == 0
    assert np.asarray(state.rows.steps.reward)[[0, 8]].tolist() == [3.0, 3.0]
