"""The likely mistakes of a newcomer, as tables: what is typed, and what the error says.

An error names what is wrong, what was expected and, where there is one, the cure as code. Input is
checked while tracing, so that no mistake is compiled.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.buffers import jitted
from tests.support.refusals import check_table
from tests.support.steps import nth, plain_step, stacked

SIZES = {"capacity": 8, "num_envs": 2, "batch_size": 4}
FORMS = {"lost": "same_step_no_final_obs", "late": "next_step", "kept": "same_step"}
LOST, NEXT, FINAL = ({"autoreset": form} for form in FORMS.values())

ALL_FORMS = """, but it must say what your env does when an episode ends
    "next_step"
    Gymnasium >= 1.0
    "same_step"
    many pure-JAX wrappers
    "same_step_no_final_obs"
    gymnax
    Brax
    jr.autoreset.of(envs)"""
MAKING = {
    "jr.uniform(**SIZES)": "autoreset=None" + ALL_FORMS,
    "jr.Rollout(length=4, num_envs=1)": "Rollout: autoreset=None" + ALL_FORMS,
    **{
        make % wrong: f"autoreset={wrong}" + ALL_FORMS
        for make in ("jr.uniform(**SIZES, autoreset=%s)", "rollout_of(%s)")
        for wrong in ("True", "1", "'same'", "'same-step'", "'SAME_STEP'")
    },
    **{
        f"jr.uniform(**{{**SIZES, **NEXT, {name!r}: {wrong}}})": (
            f"{name} must be an int of at least 1, got {wrong}"
        )
        for name in ("capacity", "num_envs", "batch_size", "min_size", "n_step")
        for wrong in ("0", "-2", "8.0", "True", "'2'")
    },
    "jr.autoreset.of({})": "a dict has no metadata['autoreset_mode']",
    "jr.items(capacity=9, num_envs=2, batch_size=4)": """
        capacity=9 rows do not divide into num_envs=2 equal streams
        the nearest that do: 8 and 10""",
    "jr.items(capacity=7, num_envs=2, batch_size=4)": "the nearest that do: 6 and 8",
    "jr.items(capacity=1, num_envs=2, batch_size=4)": "the nearest that do: 2",
    "jr.items(capacity=2**30 + 1, batch_size=4)": "must be at most 1073741824",
    "jr.Rollout(length=2**30, num_envs=2, autoreset='next_step')": """
        length * num_envs = 2147483648 is too large: it must be at most 1073741824""",
    "jr.items(capacity=8, batch_size=4, min_size=9)": "min_size=9 exceeds capacity=8",
    "jr.uniform(**SIZES, **NEXT, n_step=5)": "one window needs 6; the smallest capacity is 12",
    # A final row may follow each step.
    "jr.uniform(**SIZES, **FINAL, n_step=3)": "one window needs 5; the smallest capacity is 10",
    "jr.uniform(**SIZES, **NEXT, gamma=99)": "gamma must be in [0, 1], got 99",
    "jr.prioritized(**SIZES, **NEXT, alpha=-1.0)": """
        alpha must be a finite number of at least 0, got -1.0""",
    "jr.Prioritized(alpha=float('inf'))": "alpha must be a finite number of at least 0, got inf",
    "jr.Prioritized(alpha=float('nan'))": "alpha must be a finite number of at least 0, got nan",
    "jr.Prioritized(new_priority=-1.0)": "new_priority must be a finite number of at least 0",
    "jr.Newest(num_rows=0)": "Newest: num_rows must be an int of at least 1",
    "jr.prioritized(**SIZES, **NEXT, alpha=jnp.float32(0.6))": """
        alpha is an array float32[], but a configuration holds plain Python values
        write alpha=float(x) or int(x)""",
    "jr.uniform(**SIZES, **NEXT, gamma=np.array(0.9))": """
        gamma is an array float64[], but a configuration holds plain Python values""",
    "jr.Recent(decay=0.0)": "Recent: decay must be in (0, 1], got 0.0",
    "jr.Recent(decay=-0.5)": "Recent: decay must be in (0, 1], got -0.5",
    "jr.Recent(decay=1.5)": "Recent: decay must be in (0, 1], got 1.5",
    "jr.Recent(decay=float('nan'))": "Recent: decay must be in (0, 1], got nan",
    "jr.items(**SIZES, platform='TPU')": "platform must be one of",
    "jr.items(**SIZES, platform='metal')": "platform must be one of",
    "jr.items(**SIZES, platform=3)": "platform must be one of",
    "jr.items(capacity=8, batch_size=jnp.int32(4))": "batch_size is an array int32[]",
    "jr.items(capacity=8, batch_size=np.array(4))": "batch_size is an array int64[]",
    "jr.ReplayBuffer(**SIZES, **NEXT, sampler=jr.Uniform(), view=jr.views.Item())": """
        stores items, which have no episodes""",
    "jr.ReplayBuffer(**SIZES, view=jr.views.Item(), sampler=jr.Uniform(), track_episodes=True)": """
        stores items, which have no episodes""",
    "jr.uniform(**SIZES, **FINAL, min_size=7)": "min_size=7 exceeds the 6 rows that can be sampled",
    "jr.transitions(**SIZES, **NEXT, sampler=jr.Queue)": """
        sampler must be an instance of a jaxreplay.samplers.Sampler, such as jaxreplay.Uniform()
        got <class""",
    "jr.ReplayBuffer(**SIZES, sampler=jr.Uniform(), view='item')": """
        view must be an instance of a jaxreplay.views.View, such as jaxreplay.views.Item()
        got 'item'""",
    "jr.jit(STEP)": "jit: takes a buffer,\nto compile a function use jax.jit",
    "jr.jit(jr.tiered(items))": "jit: takes a buffer,\nCall the methods of\na tiered",
    "jr.jit(jr.Replay(items))": "jit: takes a buffer,\nCall the methods of a Replay",
    "jr.jit(jr.Uniform())": "jit: takes a buffer, such as jaxreplay.uniform(...), got Uniform()",
    "jr.Replay(rollout)": "Replay: takes a ReplayBuffer, such as\ngot a Rollout",
    "jr.frame_stack(jr.items(capacity=8, batch_size=2), 4)": """
        has no observations; give a view of steps""",
    "jr.frame_stack(rollout, 2)": "frame_stack: takes a ReplayBuffer, such as\ngot a Rollout",
    "jr.frame_stack(jr.transform(jr.hindsight(uniform, minus_one, strategy='random'), keep), 2)": (
        """
        FrameStack: inner reads random rows
        put the stack inside: jaxreplay.hindsight(jaxreplay.frame_stack"""
    ),
    "jr.hindsight(uniform, None)": """
        Hindsight: reward_fn must be a function, called as reward_fn(achieved, goal, step), got None
        """,
    "jr.hindsight(uniform, lambda achieved, goal: 0.0)": """
        reward_fn must accept the call reward_fn(achieved, goal, step): too many""",
    "jr.hindsight(uniform, minus_one, terminated_fn=True)": """
        Hindsight: terminated_fn must be a function,
        got True""",
    "jr.hindsight(uniform, minus_one, achieved_key='x', desired_key='x')": """
        Hindsight: achieved_key and desired_key are both 'x'""",
    "jr.transform(uniform, None)": """
        Transformed: transform must be a function, called as transform(item, key), got None""",
    "jr.transform(uniform, lambda item, key, more: item)": """
        transform must accept the call transform(item, key): missing a required argument: 'more'""",
    "jr.transform(mixture, keep)": """
        transform: takes a ReplayBuffer,
        got a Mixture; change how each member is read before""",
    "jr.mix()": "no member was given",
    "jr.mix(offline=uniform, online=uniform)": """
        offline must be (buffer, number of items), such as (buffer, 128), got ReplayBuffer(""",
    "jr.mix(offline=(uniform, 0))": "Mixture: offline must be an int of at least 1, got 0",
    "jr.mix(one=(queue, 2))": "Mixture: one: Queue consumes rows, which a mixture cannot",
    # Groups of completions.
    "jr.Groups(**GROUPS | {'group_size': 0})": "group_size must be an int of at least 1, got 0",
    "jr.Groups(**GROUPS, strategy='best')": "strategy must be one of\n'variance'\n, got 'best'",
    # Rows on the host.
    "jr.tiered(items, rows='gpu')": """
        rows must be "host", or the path of a folder
        got 'gpu'""",
    "jr.tiered(mixture)": "takes a ReplayBuffer, such as",
    "jr.tiered(jr.uniform(**SIZES, **FINAL, num_agents=2))": "several agents need another",
    "jr.Replay(items, rows='host', device='cpu')": "rows='host' takes no device=",
    "jr.tiered(items, continue_streams=True)": "continue_streams=True is for rows in files",
    "jr.Replay(items, continue_streams=True)": "continue_streams=True needs rows in files",
    # Members of a mixture, in places of their own.
    "jr.Replay(mixture, rows={'three': 'host'})": """
        rows has the members 'three', but this Replay has 'one', 'two'""",
    "jr.Replay(uniform, rows={'one': 'host'})": """
        rows has the members 'one', but this Replay has one buffer""",
    "jr.Replay(mixture, rows={'one': 'host'}, device='cpu')": "takes no device=",
    "jr.Replay(mixture, rows={'one': 'hots'})": 'rows must be "host", or the path of a folder',
    "jr.Replay(mixture, state={'three': None})": "state: member='three', but this Replay has 'one'",
    "jr.Replay(uniform).add(STEP, member='one')": "member='one', but this Replay has one buffer",
    **{
        f"jr.Replay(mixture).{name}(STEP)": f"{name}: member=None, but\n'one', 'two'"
        for name in ("add", "get", "age", "merge", "add_episodes")
    },
    # Waits and batches ahead of a replay.
    **{
        f"{call}timeout={wrong})": f"{name}: timeout must be a number of seconds, at least 0, got"
        for wrong in ("float('nan')", "-1", "'1'", "True")
        for name, call in (
            ("Replay", "jr.Replay(uniform, "),
            ("add", "jr.Replay(uniform, samples_per_insert=1.0).add(STEP, "),
            ("sample", "jr.Replay(uniform, samples_per_insert=1.0).sample("),
        )
    },
    **{
        f"jr.Replay(uniform, samples_per_insert={wrong})": """
            samples_per_insert must be a positive number"""
        for wrong in ("0", "-1", "float('inf')", "float('nan')")
    },
    "jr.Replay(uniform, prefetch=-1)": "prefetch must be an int of at least 0, got -1",
    # Steps that a replay is given.
    "jr.Replay(items).add()": "give a step, or its fields",
    "jr.Replay(items).add({'a': 1}, b=2)": "give a step, or its fields",
    "jr.Replay(items).add({'a.b': np.ones(2), 'a': {'b': np.ones(2)}})": """
        two leaves are named
        a.b""",
    # A replay without rows.
    "jr.Replay(uniform).save('folder')": "save: nothing was added yet",
    "jr.Replay(uniform).get([0])": "get: nothing was added yet",
    "jr.Replay(uniform).write({'row': [0], 'lap': [0]}, {})": "write: nothing was added yet",
    "jr.Replay(uniform).update_priorities({'row': [0], 'lap': [0]}, [1.0])": """
        update_priorities: nothing was added yet""",
    "jr.Replay(uniform, framework='tf')": "Replay: framework must be one of",
    # Several agents.
    "jr.uniform(**SIZES, **NEXT, num_agents=0)": "num_agents must be an int of at least 1",
    "jr.rollout(length=4, num_envs=1, **NEXT, num_agents=3).from_trajectories(None, [])": """
        needs a rollout of one env
        no num_agents""",
    # Plans.
    "jr.plan(uniform, EXAMPLE, 3)": "plan: num_envs=2 cannot be divided among 3 devices",
    "jr.plan(uniform, EXAMPLE, 0)": "devices must be an int of at least 1, got 0",
    "jr.plan(rollout, EXAMPLE)": "got a Rollout; for a rollout, use",
    # Trees of samplers.
    "jr.samplers.SumTree(capacity=0)": "capacity must be at least 1, got 0",
    "jr.samplers.SumTree(capacity=4, fan_out=1)": "fan_out must be at least 2, got 1",
}

NAMES = {
    "jr.uniform(max_length=64, batch_size=8)": "takes no max_length; did you mean capacity?",
    "jr.uniform(size=64, batch_size=8)": "takes no size; did you mean capacity?",
    "jr.uniform(**SIZES, discount=0.99)": "takes no discount; did you mean gamma?",
    "jr.uniform(**SIZES, n_steps=3)": "takes no n_steps; did you mean n_step?",
    "jr.items(**SIZES, batch_siz=2)": "takes no batch_siz; did you mean batch_size?",
    "jr.Prioritized(exponent=1.0)": "Prioritized takes no exponent; did you mean alpha?",
    "jr.Uniform(x=1)": "Uniform takes no x; it takes no arguments",
    "buffer.sample(8)": """
        needs a state and a key: buffer.sample(state, jax.random.key(0))
        jaxreplay.Replay(buffer) keeps both""",
    "uniform.sample(uniform_state, 0)": """
        expected a random key, such as jax.random.key(0), got an int""",
    "uniform.sample(uniform_state, jax.random.split(key))": "expected one random key, got 2 of",
    "jr.jit(buffer).sample(8)": "needs a state and a key: buffer.sample(state, jax.random.key(0))",
    "jr.jit(buffer).capcity": "a ReplayBuffer has no capcity; did you mean capacity?",
    "buffer.push": "a ReplayBuffer has no push; did you mean add?",
    "jr.jit(buffer).set_priorities": "did you mean update_priorities?",
    "state.add": "a ReplayState has no add; methods are the buffer's: buffer.add(state, ...)",
    "mixture.add": "a Mixture has no add; a member is filled by its own buffer",
    "mixture.smaple": "a Mixture has no smaple; did you mean sample?",
    "state.sampelr": "a ReplayState has no sampelr; did you mean sampler?",
    "jr.Replay(buffer).push": "a Replay has no push; did you mean add?",
    "jr.uniform(**SIZES, alpha=1.0)": "uniform takes no alpha; jaxreplay.prioritized takes it",
    "jr.uniform(**SIZES, sequence_length=4)": "jaxreplay.sequences takes length",
    "jr.items(**SIZES, track_episodes=True)": "items takes no track_episodes; a buffer of steps",
    "jr.items(**SIZES, autoreset='next_step')": "items takes no autoreset; a buffer of steps, as",
    "batch[0]": "a Sample has fields, and no items: write batch.experience.obs",
    "[*batch.experience]": "a Transition has fields, and no items",
    "jr.Replay(buffer).extend(STEP)": "a Replay has no extend; it has replay.add(steps)",
    "jr.Replay(buffer).size()": "a Replay has no size; it has len(replay)",
    "batch.items": "did you mean batch.experience?",
    "batch.obs": "did you mean batch.experience.obs?",
    "batch.num_steps": "did you mean batch.experience.num_steps?",
    "batch.experience.done": "has no done; did you mean discount, which is 0 where an episode",
    "batch.experience.rewards": "a Transition has no rewards; did you mean reward?",
    "batch.experience.dtype": "a Transition has no dtype",
    "batch.indices": "did you mean batch.index?",
    "batch.probabilities": "did you mean batch.probability?",
    "batch.weights": "did you mean batch.weight?",
    "batch.mask": "did you mean batch.is_valid?",
    "batch.nothing": "a Sample has no nothing",
    "jr.nothing": "jaxreplay has no nothing",
    "setattr(rollout, 'length', 3)": "cannot assign to field 'length'",
    "jr.tiered(items).frobnicate": "has no frobnicate",
    "uniform.get(uniform_state, np.arange(2), fractions={'a': 1})": """
        fractions is for another buffer: with Uniform and TransitionView a call may give beta,
        gamma, n_step""",
    # Sequences have a mask of their own.
    "batch_of_sequences.mask": "did you mean batch.experience.mask?",
    "batch_of_sequences.experience.done": "a SequenceBatch has no done",
    "batch_of_sequences.rewards": "did you mean batch.experience.reward?",
}

INIT = {
    # The first step of all envs in place of one env's is the commonest mistake.
    "buffer.init(STEP)": """
        init:
        terminated: got bool[2], expected bool[]
        an example is one env's step, without the env axis: write jax.tree.map(lambda x: x[0], step)
        """,
    "buffer.init(STEP.replace(truncated=ZEROS))": """
        truncated: got float32[2], expected bool[]
        an example is one env's step
        x.astype(bool)""",
    "rollout.init(STEP)": "an example is one env's step",
    "buffer.init(EXAMPLE.replace(terminated=0.0))": """
        terminated: got float32[], expected bool[]
        x.astype(bool)""",
    "buffer.init({key: FIELDS[key] for key in ('obs', 'action', 'reward')} | {'done': False})": """
        init: the step's keys are wrong: missing terminated, truncated; unknown done
        done is two flags here: terminated, if the task itself ended, so that the value""",
    "rollout.init({'obs': 0.0, 'action': 0, 'reward': 0.0})": """
        init: the step's keys are wrong: missing terminated, truncated""",
    "buffer.init(FIELDS | {'next_obs': 0})": """
        unknown next_obs
        leave out the next observation: it is the obs of the next row""",
    "buffer.init(FIELDS | {'observations': 0})": "the observation is called obs",
    "buffer.init(FIELDS | {'mask': 0})": "mask and priority are arguments of add and extend",
    "buffer.init([1, 2])": """
        must be a jaxreplay.Step, or a mapping, dataclass or NamedTuple with its fields, got list
        """,
    "items.init({'a': {'key': key}})": "init: a.key: \njax.random.key_data",
    "items.init({'a': 'text'})": "init: a: a str cannot be stored, only numbers",
    "items.init({})": "init: the example has no leaves",
    "groups.init({})": "the example has no leaves: there is nothing to store",
    "jr.Groups(**GROUPS, strategy='variance').init({'x': ZEROS})": """
        needs its reward, a leaf 'reward' with the shape []; it has x [2]""",
    "jr.frame_stack(uniform, 2, key='image').init(EXAMPLE)": """
        FrameStack: obs has no leaf 'image'; it has a, b""",
    "jr.frame_stack(uniform, 2, key='image').init(EXAMPLE.replace(obs=ZEROS))": """
        FrameStack: obs has no leaf 'image'; it is one array: leave out key""",
    "jr.frame_stack(uniform, 2, axis=5).init(EXAMPLE.replace(obs=np.zeros((2, 3))))": """
        axis=5 is not in the stacks of obs, whose frames are (2, 3): it must be in -3 .. 2""",
    "recurrent.init(EXAMPLE)": """
        recurrent_state_key='h' is no key of the step's extras: they are not a mapping; store it""",
    "recurrent.init(EXAMPLE.replace(extras={'flag': ZEROS}))": """
        extras: they have flag; store it with each step, as extras={'h': ...}""",
    "jr.hindsight(uniform, minus_one).init(EXAMPLE.replace(obs=ZEROS))": "got no mapping",
    # Several agents.
    "late.init(OF_THREE)": """
        terminated: got bool[3], expected bool[]
        need a buffer with num_agents""",
    "jr.uniform(**SIZES, **NEXT, num_agents=2).init(OF_THREE)": """
        terminated: got bool[3], expected bool[2]""",
    "jr.uniform(**SIZES, **NEXT, num_agents=3, discount_key='d').init("
    "OF_THREE.replace(extras={'d': VALUES[:3, 0]}))": """
        discount_key='d' has the shape [3], expected []""",
}

# A buffer and a rollout say the same.
STEPS = {
    "kept.init(EXAMPLE)": """
        init: autoreset="same_step" needs the final_obs of every step
        gymnax >= 1.0: info["final_observation"]
        info["final_obs"]
        extras["next_obs"]
        use autoreset="same_step_no_final_obs\"""",
    "kept.add(kept_state, STEP)": 'add: autoreset="same_step" needs the final_obs of every step',
    "kept.extend(kept_state, BLOCK)": 'extend: autoreset="same_step" needs the final_obs',
    "kept.add(kept_state, STEP.replace(final_obs={'a': ZEROS}))": "final_obs.b: missing",
    "kept.init(EXAMPLE.replace(final_obs=ZEROS))": """
        final_obs.a: missing
        final_obs is an observation: the same leaves as obs""",
    # A given final_obs most likely means that the form is wrong: the next episode's first
    # observation would be taken for the final one.
    "lost.init(EXAMPLE.replace(final_obs=EXAMPLE.obs))": """
        init: final_obs was given
        returns the final observation separately, use autoreset="same_step\"""",
    "lost.add(lost_state, STEP.replace(final_obs=STEP.obs))": "add: final_obs was given",
    "late.init(EXAMPLE.replace(final_obs=EXAMPLE.obs))": """
        init: final_obs was given
        returns the final observation separately, use autoreset="same_step\"""",
    "late.add(late_state, STEP.replace(final_obs=STEP.obs))": "add: final_obs was given",
    "lost.add(lost_state, EXAMPLE)": """
        obs.a: got float32[], expected float32[2]
        add takes one step of every env, leaves [num_envs, ...], here [2]""",
    # Nothing is broadcast, and every bad leaf is named at once.
    "lost.add(lost_state, STEP.replace(reward=0.0))": "reward: got float32[], expected float32[2]",
    "lost.add(lost_state, STEP.replace(reward=ZEROS[:1]))": """
        reward: got float32[1], expected float32[2]""",
    "lost.add(lost_state, STEP.replace(truncated=np.zeros(2, np.int32)))": """
        truncated: got int32[2], expected bool[2]""",
    "lost.add(lost_state, STEP.replace(obs={'a': ZEROS[None], 'c': ZEROS}, reward=FLAGS))": """
        add:
        obs.a: got float32[1, 2], expected float32[2]
        obs.b: missing, expected float32[2, 3]
        obs.c: unexpected, got float32[2]
        reward: got bool[2], expected float32[2]""",
    "lost.extend(lost_state, BLOCK.replace(action=ZEROS))": """
        extend:
        action: got float32[2], expected float32[3, 2]
        extend takes a block of steps, leaves [time, num_envs, ...], here [3, 2]""",
    "lost.add(lost_state, (1, 2, 3))": """
        must be a jaxreplay.Step, or a mapping, dataclass or NamedTuple with its fields, got tuple
        """,
    "lost.add(lost_state, FIELDS | {'done': FLAGS, 'foo': FLAGS})": """
        unknown done, foo
        done is two flags here""",
}

INSPECTED = """
    inspect: this state is not of this buffer: it was made with another configuration"""
OTHER_TEAM = "its steps have num_agents=3, but the buffer has num_agents=None"
USING = {
    "buffer.add(STEP, state)": """
        the state must be a ReplayState, as init and add return it, got a Step
        the state comes first""",
    "rollout.add(STEP, rollout_state)": """
        add: the state must be a RolloutState, as init and add return it, got a Step""",
    "uniform.sample(state, key)": """
        this state is not of this buffer
        sampler: the state's is Prioritized(), this buffer's None""",
    "buffer.add(state, STEP.replace(terminated=ZEROS))": """
        add:
        terminated: got float32[2], expected bool[2]
        write done flags as bool: x.astype(bool)""",
    "buffer.add(state, STEP.replace(terminated=[False, True]))": """
        terminated: got 2 leaves of a list: write np.array(terminated)""",
    "buffer.add(state, STEP.replace(truncated=ZEROS))": """
        truncated: got float32[2], expected bool[2]
        write done flags as bool: x.astype(bool)""",
    "buffer.add(state, STEP, mask=FLAGS)": """
        a mask was given, but this buffer was made without allow_mask=True""",
    "masked.add(masked_state, STEP, ZEROS)": "mask: got float32[2], expected bool[2]",
    "masked.add(masked_state, STEP, FLAGS[:1])": "mask: got bool[1], expected bool[2]",
    "items.add(items.init({'image': ZEROS}), {'image': OBS['b'][0]})": """
        add:
        image: got float32[3], expected float32[2, 2]""",
    "items.extend(items.init({'image': np.uint8(0)}), {'image': np.zeros((3, 2), 'i2')})": """
        image: got int16[3, 2], expected uint8[3, 2]""",
    # Steps of some envs.
    "uniform.add(uniform_state, STEP, envs=np.int32([0, 1]))": """
        add: envs= writes to some envs, but all envs of this buffer share one write position
        make the buffer with allow_mask=True""",
    "masked.add(masked_state, STEP, envs=np.int32([1, 1]))": """
        add: envs has 1 twice
        write one step of an env in a call, or a block of steps by extend""",
    "masked.extend(masked_state, BLOCK, envs=np.array([0.0, 1.0]))": """
        extend: envs must be int32[e], numbers of envs, got an array float64[2]""",
    "masked.add(masked_state, STEP, envs=1)": "envs must be int32[e], numbers of envs, got an int",
    "masked.add(masked_state, STEP, envs=np.int32([1]))": """
        reward: got float32[2], expected float32[1]""",
    "uniform.add(uniform_state, STEP, priority=ZEROS)": """
        add: the sampler Uniform has no priorities; use jaxreplay.prioritized""",
    "buffer.add(state, STEP, priority=1.0)": "priority: got float32[], expected float32[2]",
    "uniform.update_priorities(uniform_state, batch.index, np.ones(4))": """
        update_priorities: the sampler Uniform has no priorities; use jaxreplay.prioritized""",
    "buffer.update_priorities(state, batch.index, np.ones((4, 1)))": """
        update_priorities: priority: got float32[4, 1], expected float32[4], one for each row""",
    "buffer.update_priorities(state, batch.index.row, np.ones(4))": """
        index must be the batch.index of a sample, got an array int32[4]
        cannot tell whether the row was overwritten""",
    "buffer.age(state, np.arange(4))": "age: index must be the batch.index of a sample, got an ar",
    "buffer.get(state, np.ones(3, np.float32))": """
        index must be a jaxreplay.types.Index or integer rows, got an array float32[3]""",
    "buffer.sample(state, key, 0)": "batch_size must be an int of at least 1, got 0",
    "queue.sample(queue.init(0.0), key)": """
        Queue consumes rows: state, batch = buffer.pop(state, key)""",
    "buffer.episode_table(state)": "make it with track_episodes=True",
    "jr.inspect(buffer)": "inspect: the state must be a ReplayState,\ngot a NoneType",
    "jr.inspect(items, jr.items(capacity=4, batch_size=2).init(0.0))": INSPECTED,
    "jr.inspect(items, state)": INSPECTED,
    "items.can_sample(state)": "can_sample: this state is not of this buffer",
    "buffer.can_sample(items.init(0.0))": "can_sample: this state is not of this buffer",
    "items.size(jax.tree.map(lambda leaf: leaf[None].repeat(2, 0), items.init(0.0)))": """
        its stored steps have 2 rows, but the buffer has capacity=8; it is 2 states, as `vmap`
        take one, jax.tree.map(lambda leaf: leaf[0], state), or map""",
    # Ends of streams.
    "items.end_streams(items.init(0))": "end_streams: items have no episodes",
    "buffer.end_streams(state, np.ones(3, bool))": """
        end_streams:
        mask: got bool[3], expected bool[2]""",
    "buffer.end_streams(state, ZEROS)": "mask: got float32[2], expected bool[2]",
    "items.drop(items.init(0), np.ones(2, bool))": "drop: items have no episodes",
    "buffer.drop(state, np.ones(3, bool))": """
        drop:
        mask: got bool[3], expected bool[2]""",
    # Samplers of samplers, and parameters of a call.
    "jr.uniform(**SIZES, **LOST, discount_key='d').init(EXAMPLE)": """
        init: discount_key='d' is no key of the step's extras: they are not a mapping; store it""",
    "jr.blend()": "fractions must be numbers of at least 0, one of them positive; got []",
    "jr.blend(uniform=jr.Uniform())": "uniform must be (sampler, fraction)",
    "jr.blend(a=(jr.Uniform(), -1), b=(jr.Uniform(), 2))": "of at least 0, one of them positive",
    "jr.blend(a=(jr.Uniform, 1))": "Blend: a must be an instance of a jaxreplay.samplers.Sampler",
    "jr.blend(a=(jr.Queue(), 1))": "Blend: a: Queue consumes rows",
    "jr.blend(a=(jr.Uniform(), 'x'))": "one of them positive; got ['x']",
    "jr.blend(a=(jr.Uniform(), 1), beta=-1.0)": """
        Blend: beta must be a finite number of at least 0, got -1.0""",
    "jr.transitions(**SIZES, **LOST, sampler=jr.blend(a=(jr.Prioritized(), 1), "
    "b=(jr.UniformEpisodes(), 1)))": "priorities need a window of fixed length",
    "jr.OnlineQueue(beta=float('nan'))": "OnlineQueue: beta must be a finite number of at least 0",
    "jr.blend(**{'a.b': (jr.Uniform(), 1)})": "Blend: a.b: a name must have no dot",
    "jr.samplers.Blend(members=(('a', jr.Uniform(), 1), ('a', jr.Recent(decay=0.9), 1)))": """
        Blend: two samplers have one name: ['a']""",
    "blended.sample(blended_state, key, fractions={'a': -1})": """
        sample: fractions must be at least 0, and one of them positive; got {'a': -1}""",
    "jr.jit(blended).sample(blended_state, key, fractions={'a': 0})": """
        sample: fractions must be at least 0, and one of them positive; got {'a': 0}""",
    "blended.sample(blended_state, key, fractions={'a.b': 1})": """
        Blend: fractions must be a mapping with a number for each of a; got a.b""",
    "uniform.sample(uniform_state, key, gamma=1.5)": "sample: gamma must be in [0, 1], got 1.5",
    "uniform.get(uniform_state, np.arange(2), gamma=np.array([0, np.nan]))": """
        get: gamma must be in [0, 1], got [ 0. nan]""",
    "uniform.get(uniform_state, np.arange(2), gamma=MINUS)": "gamma must be in [0, 1], got -1",
    "uniform.get(uniform_state, np.arange(2), n_step=np.ones(3, np.int32))": """
        n_step must be one number, or one for each of 2 items""",
    "jr.tiered(uniform).sample(None, None, gamma=-1)": "gamma must be in [0, 1], got -1",
    "jr.jit(uniform).sample(uniform_state, key, gamma=float('nan'))": """
        sample: gamma must be in [0, 1], got nan""",
    "jr.tiered(uniform).draw(None, key, gamma=2)": "sample: gamma must be in [0, 1], got 2",
    "jr.Replay(uniform).sample(gamma=2)": "sample: gamma must be in [0, 1], got 2",
    "jr.Replay(mixture).sample(gamma=2)": "sample: gamma must be in [0, 1], got 2",
    "jr.jit(mixture).sample(None, key, fractions={'one': 1, 'two': -1})": """
        sample: fractions must be at least 0, and one of them positive; got {'one': 1, 'two': -1""",
    "buffer.sample(state, key, beta=-0.5)": "sample: beta must be finite and at least 0, got -0.5",
    "buffer.sample(state, key, n_step=1.5)": "n_step must be of integers, got float32",
    "jr.OnlineQueue(sampler=jr.Queue())": "OnlineQueue: sampler: Queue consumes rows itself",
    "blended.sample(blended_state, key, fractions={'b': 1})": """
        Blend: fractions must be a mapping with a number for each of a; got b""",
    "blended.sample(blended_state, key, fractions={'a': np.ones(2)})": """
        Blend: each fraction must be one number, got (2,)""",
    "blended.update_priorities(blended_state, batch.index, np.ones(4))": """
        update_priorities: the sampler Blend has no priorities""",
    # Functions that need values, at init, and new rewards that the stored dtype cannot hold.
    "relabel(ZEROS[0], lambda *goals: -np.linalg.norm(goals[0] - goals[1]))": """
        Hindsight: reward_fn needs the values of its arguments
        jax.numpy in place of numpy, and with jnp.where in place of if; or use jaxreplay.sb3.Her""",
    "relabel(ZEROS[0], minus_one, terminated_fn=lambda a, g, step: (a == g).all() and True)": """
        Hindsight: terminated_fn needs the values""",
    "init_of(jr.transform(uniform, lambda item, key: np.asarray(item.reward)))": """
        Transformed: transform needs the values""",
    "init_of(jr.relabel(uniform, lambda step, after: float(after['a'])))": """
        Relabelled: reward_fn needs the values""",
    "init_of(jr.relabel(uniform, lambda step, after: step.obs['b']))": """
        Relabelled: <lambda> gave float32[3] for one step, but stored is float32[]""",
    "init_of(jr.relabel(uniform, lambda step, after: {'a': 0.0}))": """
        Relabelled: <lambda> gave PyTreeDef({'a': *}), but stored is PyTreeDef(*)""",
    "jr.relabel(jr.items(**SIZES), lambda step, after: 0.0)": "inner must be a view of steps",
    "relabel(np.int32(0), minus_one)": """
        Hindsight: minus_one gave float32[] for one step, but stored is int32[]
        which cannot hold it""",
    "relabel(np.uint8(0), minus_one)": "gave float32[] for one step, but stored is uint8[]",
    "relabel(np.bool_(0), minus_one)": "gave float32[] for one step, but stored is bool[]",
    "relabel(np.uint8(0), lambda *_: -1)": "gave int32[] for one step, but stored is uint8[]",
    "relabel(np.float32(0), functools.partial(lambda x, *_: jnp.full(x, 0.0), 3))": """
        partial
        gave float32[3] for one step, but stored is float32[]""",
    "relabel(np.float32(0), minus_one, terminated_fn=minus_one)": """
        gave float32[] for one step, but stored is bool[]""",
    # Writes.
    "uniform.write(uniform_state, batch.index, {'reward': np.ones(4)})": """
        write: make the buffer with allow_write=True""",
    "writable.write(writable_state, np.int32([1]), {'reward': np.ones(1)})": """
        write: index must be the batch.index of a sample, got an array int32[1]
        a bare row number cannot tell whether the row was overwritten since it was sampled""",
    "writable.write(writable_state, batch.index, {'reward': np.ones(5)})": """
        write:
        reward: got float32[5], expected float32[4]""",
    "writable.write(writable_state, batch.index, {'terminated': np.ones(4, bool)})": """
        write: no leaf of a row is named terminated
        there are obs.a, obs.b, action, reward""",
    "uniform.map_rows(uniform_state, lambda step, after: {'reward': step.reward})": """
        map_rows: make the buffer with allow_write=True""",
    "writable.map_rows(writable_state, lambda step, after: {'rewards': step.reward})": """
        map_rows: no leaf of a row is named rewards""",
    "writable.map_rows(writable_state, lambda step, after: {'reward': step.obs['a'][None]})": """
        map_rows:
        reward: got float32[8, 1], expected float32[8]
        map_rows takes values [8, ...]""",
    "writable.map_rows(writable_state, lambda step, after: {}, block=0)": """
        map_rows: block must be an int of at least 1, got 0""",
    "writing.write(writing.init(OF_THREE), batch.index, {'terminated': NEVER[:4]})": """
        no leaf of a row is named terminated""",
    "team.add(team_state, STEP)": "terminated: got bool[2], expected bool[2, 3]",
    # States of other buffers. What they store may be alike: the mass of rows does not reveal alpha.
    "sample_of(n_step=3)": "rows after one (n_step, length): the state's is 3, this buffer's 1",
    "sample_of(**LOST)": """
        this state is not of this buffer
        autoreset: the state's is 'same_step_no_final_obs', this buffer's 'next_step'""",
    "sample_of(capacity=12, num_envs=4)": "num_envs: the state's is 4, this buffer's 2",
    "sample_of(allow_mask=True)": "allow_mask: the state's is True, this buffer's False",
    "sample_of(sampler=jr.Uniform())": "sampler: the state's is None, this buffer's Prioritized()",
    "sample_of(sampler=jr.Prioritized(alpha=4.0))": """
        alpha: the state's is 4.0, this buffer's 0.6""",
    "sample_of(sampler=jr.Prioritized(fan_out=4))": "fan_out: the state's is 4, this buffer's 0",
    "uniform.sample((uniform_state, 0), key)": """
        sample: the state must be a
        got a tuple of 2; the state comes first""",
    "uniform.sample(None, key)": "got a NoneType; the state comes first",
    "uniform.sample({'replay': uniform_state}, key)": "got a dict of 1; the state comes first",
    "uniform.sample(with_rows(uniform_state, flags=jnp.zeros(8, jnp.int32)), key)": """
        rows.flags: got int32[8], expected uint8[8]""",
    "uniform.sample(with_reward(uniform_state, VALUES[:4, 0]), key)": """
        its stored steps have 4 and 8 rows""",
    "uniform.sample(with_reward(uniform_state, ZEROS[0]), key)": """
        its stored steps have none and 8 rows""",
    # Libraries that restore a smaller state keep its arrays, and the layout of the larger one.
    "uniform.sample(with_rows(uniform_state, steps=nth(uniform_state.rows.steps, HALF)), key)": """
        its stored steps have 4 rows, but the buffer has capacity=8""",
    "rollout_of('next_step').steps(longer_state)": """
        this state is not of this buffer
        action: got float32[8, 2], expected float32[6, 2]
        A restored state needs a buffer with the same configuration""",
    "rollout.clear(longer_state)": "this state is not of this buffer",
    "rollout.add(longer_state, STEP)": "this state is not of this buffer",
    "rollout.extend(longer_state, BLOCK)": "this state is not of this buffer",
    "keeping.add(rollout_state, WITH_FINALS)": "last: unexpected",
    # Rows of other buffers.
    "late.adopt(uniform_state)": """
        adopt: autoreset: the state's is 'same_step_no_final_obs', this buffer's""",
    "items.adopt(uniform_state)": """
        adopt: autoreset: the state's is 'same_step_no_final_obs', this buffer's""",
    "late.adopt(team_state)": OTHER_TEAM,
    "late.size(team_state)": OTHER_TEAM,
    "late.merge(team_state, team_state)": OTHER_TEAM,
    "team.adopt(late.init(EXAMPLE))": """
        its steps have num_agents=None, but the buffer has num_agents=3""",
    "items.adopt(7)": "adopt: takes the state of a ReplayBuffer, got",
    "pairs_of_items.adopt(jr.items(capacity=8, batch_size=4).init(0.0))": """
        adopt: num_envs: the state's is 1, this buffer's 2, but items have no""",
    "jr.frame_stack(uniform, 2, key='none').adopt(uniform_state)": "adopt: \nnone",
    "items.merge(items.init(0.0), items.init({'x': 0.0}))": """
        merge:
        steps: missing
        steps.x: unexpected""",
    # Groups of completions.
    "groups.add(groups_state, TOKENS, 0, 0)": """
        group must be int32[N] and version
        got int32[] and int32[]""",
    "groups.add(groups_state, TOKENS, np.int32([0, 0]), np.zeros(3, int))": """
        got int32[2] and int32[3]""",
    "groups.add(groups_state, TOKENS, ZEROS, 0)": "got float32[2] and int32[]",
    "groups.add(groups_state, TOKENS, np.zeros(3, int), 0)": "x: got float32[2], expected float",
    "groups.close(groups_state, 3)": "close: group must be int32[N], got int32[]",
    "groups.pop(groups_state, key, max_staleness=1)": "max_staleness needs version=",
    "groups.pop(groups_state, key, 5)": "batch_size=5 exceeds capacity=4",
    "groups.size({})": "must be a GroupsState, as init and add return it, got a dict",
    "jr.Groups(**GROUPS | {'group_size': 3}).size(groups_state)": """
        size: this state is not of this buffer: items.x: got float32[8], expected float32[12]
        """,
    # Rows on the host.
    "jr.tiered(items).add(None, ZEROS)": "add: there are no rows; make a state with init first",
    # Mixtures.
    "mixture.can_sample({'one': 0})": """
        states must be a dict with the members' names, one, two; got one""",
    "jr.mix(one=(uniform, 1), two=(items, 1)).sample({'one': uniform_state, 'two': items.init(0.0)}"
    ", key)": """
        sample: two:
        obs.a: missing, expected float32""",
    "mixture.update_priorities(states, mixture.sample(states, key).index, np.ones(50))": """
        update_priorities: priority: got float32[50], expected float32[5], one for each row""",
    "mixture.update_priorities(states, mixture.sample(states, key), np.ones(5))": """
        update_priorities: index must be the batch.index of a mixture's sample, of [5]
        got a Sample""",
    "mixture.update_priorities(states, batch.index, np.ones(5))": """
        of a mixture's sample, of [5], got an Index of [4]""",
    # Rollouts.
    "rollout.minibatches(key, num_epochs=1, num_minibatches=5)": """
        length * num_envs = 12 does not divide into num_minibatches=5 equal ones
        the nearest that do: 4 and 6""",
    "rollout.minibatches(key, num_epochs=1, num_minibatches=3, chunk_length=6)": """
        minibatches: chunks = 2 does not divide into num_minibatches=3 equal ones
        the nearest that do: 2""",
    "rollout.minibatches(key, num_epochs=1, num_minibatches=2, chunk_length=4)": """
        minibatches: length = 6 does not divide into chunk_length=4 equal ones
        the nearest that do: 3 and 6""",
    "rollout.minibatches(key, num_epochs=0, num_minibatches=1)": """
        num_epochs must be an int of at least 1, got 0""",
    "rollout.minibatch({'obs': np.zeros((2, 6))}, np.arange(2))": """
        minibatch:
        obs: got float32[2, 6], expected float32[6, 2]
        leaves must begin with [time, num_envs]""",
    "rollout.bootstrap(rollout_state, VALUES, ZEROS, VALUES)": """
        with autoreset="next_step" final observations are rows like any other
        leave out final_value""",
    "rollout.bootstrap(rollout_state, VALUES[..., None], ZEROS)": """
        bootstrap: value: got [6, 2, 1], expected [6, 2], one value for each step""",
    "rollout.bootstrap(rollout_state, VALUES, VALUES)": """
        bootstrap: last_value: got [6, 2], expected [2]""",
    "rollout.bootstrap(rollout_state, VALUES.astype(int), ZEROS)": """
        bootstrap: value: got int32, expected floating values""",
    "keeping.bootstrap(keeping_state, VALUES, ZEROS)": """
        this rollout keeps final_obs
        pass final_value=critic(rollout.steps(state).final_obs)""",
    "keeping.from_trajectories(keeping_state, [])": """
        needs a rollout of one env, got num_envs=2, autoreset='same_step'; make it with num_envs=1
        """,
    "single.from_trajectories(single_state, FIELDS)": """
        takes a list of trajectories, got one dict; write [trajectory]""",
    "single.from_trajectories(single_state, [FIELDS | {'final_obs': OBS}])": """
        trajectory 0: has a final_obs; append it to obs instead""",
    **{
        f"single.from_trajectories(one_state, [trajectory(2), {wrong}])": f"trajectory 1{said}"
        for wrong, said in {
            "trajectory(3, reward=np.zeros((3, 1)))": """:
                reward: got float32[3, 1], expected float32[3]
                as many rows as terminated""",
            "trajectory(3, action=ZEROS)": ":\naction: got float32[2], expected float32[3]",
            "trajectory(3, obs=np.ma.array(VALUES[:3, 0], mask=True))": """
                obs: a masked array would lose its mask""",
            "trajectory(3, obs=VALUES[:5, 0])": ":\nobs: got float32[5], expected float32[3]",
            "trajectory(3, obs={'y': ZEROS})": ":\nobs: missing\nobs.y: unexpected",
            "trajectory(3, truncated=np.zeros(3))": """:
                truncated: got float32[3], expected bool[3]""",
            "trajectory(3, reward=0.0)": ":\nreward: got float32[]",
            "trajectory(3, extras=None)": ":\nextras: missing",
            "trajectory(3, terminated=np.arange(3) == 1)": """
                : terminated is set at step 1, but there are 3 steps""",
            "{'obs': 0}": ": the step's keys are wrong: missing action, reward",
            "trajectory(5)": """
                : does not fit: with it there are 7 rows, final observations included
                length=6""",
        }.items()
    },
    "single.from_trajectories(single_state, [STEP])": "call it outside of jit",
    "single.from_trajectories(single_state, [], chunk_bytes=0)": """
        chunk_bytes must be an int of at least 1, got 0""",
    # Targets.
    "jr.gae(VALUES[..., None], VALUES, VALUES, terminated=FLAGS, truncated=NEVER, gamma=1)": """
        gae: reward: got [6, 2, 1]; terminated: got [2], expected [6, 2]
        squeeze""",
    "jr.gae(VALUES, VALUES, VALUES, terminated=VALUES, truncated=NEVER, gamma=1)": """
        gae: terminated must be bool, got float32; write x.astype(bool)""",
    "jr.vtrace(ZEROS, VALUES, VALUES, VALUES, terminated=NEVER, truncated=NEVER, gamma=1)": """
        vtrace: log_ratio: got [2], expected [6, 2]""",
    "jr.targets.next_values(VALUES, VALUES)": "next_values: last_value: got [6, 2], expected [2]",
    "jr.targets.next_values(VALUES, ZEROS, NEVER)": "truncated and final_value belong together",
    "jr.targets.next_values(VALUES, ZEROS, None, VALUES)": """
        truncated and final_value belong together""",
    "jr.targets.normalize(VALUES, FLAGS)": "normalize: mask: got [2]",
    "jr.targets.masked_mean(VALUES, FLAGS)": "masked_mean: mask must be bool[6, 2]",
    "jr.targets.masked_mean(VALUES, VALUES)": "masked_mean: mask must be bool[6, 2]",
    "jr.targets.importance_weights({}, 0.4)": "got a dict; pass batch, not batch.experience",
    "jr.targets.importance_weights(batch, ZEROS)": """
        beta must be one number, got an array of shape [2]""",
}

ZEROS, FLAGS, VALUES = np.zeros(2, np.float32), np.zeros(2, bool), np.zeros((6, 2), np.float32)
NEVER = VALUES > 0
OBS = {"a": ZEROS, "b": np.zeros((2, 3), np.float32)}
STEP = plain_step(ZEROS, obs=OBS)
FIELDS = {name: getattr(STEP, name) for name in STEP.__dataclass_fields__}
EXAMPLE, BLOCK = nth(STEP, 0), stacked([STEP] * 3)
WITH_FINAL = EXAMPLE.replace(final_obs=EXAMPLE.obs)
OF_THREE = EXAMPLE.replace(terminated=NEVER[:3, 0], truncated=NEVER[:3, 0])
MINUS = jnp.asarray(np.float32(-1))


def minus_one(achieved, goal, step):
    return jnp.float32(-1)


def keep(item, key):
    return item


def relabel(reward, reward_fn, **options):
    """Return a sample with new goals, from steps whose rewards have the dtype of `reward`."""
    uniform = jr.uniform(**SIZES, **NEXT)
    buffer = jr.hindsight(uniform, reward_fn, relabel_fraction=1.0, **options)
    goals = {"achieved_goal": ZEROS, "desired_goal": ZEROS}
    state = buffer.init(EXAMPLE.replace(obs=goals, reward=reward))
    return buffer.sample(state, jax.random.key(0))


def init_of(buffer):
    return buffer.init(EXAMPLE)


def rollout_of(autoreset):
    return jr.rollout(length=6, num_envs=2, autoreset=autoreset)


GROUPS = {"group_size": 2, "capacity": 4, "batch_size": 2}
TOKENS, HALF = {"x": ZEROS}, slice(4)
WITH_FINALS = STEP.replace(final_obs=STEP.obs)


def sample_of(**changes):
    """Sample from the state of another buffer."""
    options = {**SIZES, **NEXT, "capacity": 12, "sampler": jr.Prioritized()}
    state = jr.transitions(**options | changes).init(EXAMPLE)
    return jr.transitions(**options).sample(state, jax.random.key(0))


def with_rows(state, **changes):
    return state.replace(rows=state.rows.replace(**changes))


def with_reward(state, reward):
    return with_rows(state, steps=state.rows.steps.replace(reward=reward))


def trajectory(num_steps, **fields):
    number = np.zeros(num_steps, np.float32)
    step = plain_step(number, **{"extras": number} | fields)
    return {name: getattr(step, name) for name in FIELDS if name != "final_obs"}


class Pairs(jr.views.View):
    """Two items of a stream."""

    window = jr.views.Window(after=1)
    needs_steps = False

    def read(self, reader):
        return reader.item(jnp.arange(2))


BUFFERS = {
    "buffer": jr.prioritized(**SIZES, **LOST),
    "uniform": jr.uniform(**SIZES, **LOST),
    "masked": jr.uniform(**SIZES, **LOST, allow_mask=True),
    "writable": jr.uniform(**SIZES, **LOST, allow_write=True),
    "blended": jr.transitions(**SIZES, **LOST, sampler=jr.blend(a=(jr.Uniform(), 1))),
    "pairs": jr.future_pairs(**SIZES, **NEXT),
    "sequences": jr.sequences(**SIZES, **NEXT, length=2),
    "rollout": rollout_of("next_step"),
    "keeping": rollout_of("same_step"),
    "longer": jr.rollout(length=8, num_envs=2, autoreset="next_step"),
    "single": jr.rollout(length=6, num_envs=1, autoreset="next_step"),
}
OTHERS = {
    "late": jr.uniform(**SIZES, **NEXT),
    "pairs_of_items": jr.ReplayBuffer(**SIZES, sampler=jr.Uniform(), view=Pairs()),
    "groups": jr.Groups(**GROUPS),
    "team": jr.uniform(**SIZES, **NEXT, num_agents=3),
    "writing": jr.uniform(**SIZES, **NEXT, num_agents=3, allow_write=True),
    "items": jr.items(**SIZES),
    "queue": jr.items(**SIZES, sampler=jr.Queue()),
    "recurrent": jr.sequences(**SIZES, **NEXT, length=2, recurrent_state_key="h"),
    "mixture": jr.mix(one=(BUFFERS["uniform"], 2), two=(BUFFERS["buffer"], 3)),
}


def states_of(buffers):
    return {
        f"{name}_state": jax.eval_shape(
            buffer.init, WITH_FINAL if buffer.autoreset == "same_step" else EXAMPLE
        )
        for name, buffer in buffers.items()
    }


@pytest.fixture(scope="module")
def arrays():
    """Return shapes and dtypes of states, batches and a key."""
    jitted.options_here()  # compiles a program, the first time in a process
    key = jax.eval_shape(lambda: jax.random.key(0))
    states = states_of(BUFFERS)
    batch, sequences = (
        jax.eval_shape(BUFFERS[name].sample, states[f"{name}_state"], key)
        for name in ("buffer", "sequences")
    )
    members = {"one": states["uniform_state"], "two": states["buffer_state"]}
    given = {"state": states["buffer_state"], "states": members, "key": key}
    given["groups_state"] = jax.eval_shape(lambda: OTHERS["groups"].init(nth(TOKENS, 0)))
    given["team_state"] = jax.eval_shape(OTHERS["team"].init, OF_THREE)
    given["one_state"] = jax.eval_shape(BUFFERS["single"].init, nth(trajectory(2), 0))
    return {**states, **given, "batch": batch, "batch_of_sequences": sequences}


def check(table, arrays, error=ValueError, **buffers):
    check_table(table, {**globals(), **BUFFERS, **OTHERS, **buffers}, error, arrays)


@pytest.mark.parametrize("table", [MAKING, INIT, USING], ids=["making", "init", "using"])
@pytest.mark.no_xla
def test_a_mistake_is_answered(table, arrays):
    check(table, arrays)


@pytest.mark.no_xla
def test_a_name_of_another_library_is_answered(arrays):
    check(NAMES, arrays, (TypeError, AttributeError))


@pytest.mark.parametrize("kind", ["buffer", "rollout"])
@pytest.mark.no_xla
def test_a_wrong_step_is_answered_by_buffers_and_rollouts(kind):
    make = rollout_of if kind == "rollout" else functools.partial(jr.uniform, **SIZES)
    buffers = {name: make(autoreset=form) for name, form in FORMS.items()}
    check(STEPS, states_of(buffers), **buffers)


@pytest.mark.no_xla
def test_a_new_reward_of_the_stored_dtype_is_taken():
    for reward_fn in (minus_one, lambda *_: -1):
        batch = jax.eval_shape(functools.partial(relabel, reward_fn=reward_fn), ZEROS[0])
        assert batch.experience.reward.dtype == jnp.float32


def test_a_replay_without_rows_is_answered():
    with pytest.raises(
        TimeoutError, match="sample: no batch can be sampled yet, 0 rows of at least 1"
    ):
        jr.Replay(OTHERS["items"]).sample()


def test_a_batch_larger_than_the_buffer_warns():
    with pytest.warns(UserWarning, match="batch_size=10 exceeds capacity=4.*were the two swapped"):
        jr.items(capacity=4, batch_size=10)
