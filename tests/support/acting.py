"""What the actors of tests do, and an oracle of their rows: a step says who took it, and when."""

import contextlib
import itertools
import os
import signal
import sys
import threading

import numpy as np

EXAMPLE = {
    "obs": np.zeros(3, np.int32),
    "action": np.int32(0),
    "reward": np.float32(0),
    "terminated": np.False_,
    "truncated": np.False_,
}
PERIOD = 7  # each env's episodes end in every seventh step, the first one sooner


def ends(envs, time):
    return (time + envs + 1) % PERIOD == 0


def ends_of_team(envs, time):
    """Return the ends of two agents [..., 2], of which the second one ends two steps sooner."""
    left = -(time + envs + 1) % PERIOD
    return np.stack([left == 0, left < 3], -1)


def step_of(actor, time, **others):
    """Return a step in which obs is [env, incarnation, number of the step]."""
    envs = np.asarray(actor.envs)
    flags = ends(envs, time)
    return {
        "obs": np.stack([envs, np.full_like(envs, actor.incarnation), 0 * envs + time], 1),
        "action": envs,
        "reward": np.full(len(envs), time, np.float32),
        "terminated": flags,
        "truncated": np.zeros_like(flags),
        **others,
    }


def endless(actor):
    """Take steps until the learner has enough."""
    time = 0
    while actor.running:
        actor.add(step_of(actor, time))
        time += 1


def alone(other, actor):
    """As `endless`, in a process that does not import what the learner alone needs."""
    assert other not in sys.modules
    endless(actor)


def mortal(actor):
    """As `endless`, but be killed at any moment, four times."""
    if actor.incarnation < 4:
        seconds = np.random.default_rng(actor.seed).uniform(0.02, 0.4)
        killer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
    endless(actor)


def dying(actor):
    """As `endless`, but raise an error after any number of steps, four times."""
    for time in itertools.count():
        if actor.incarnation < 4 and time == actor.seed % 300:
            raise KeyError("a step that failed")
        actor.add(step_of(actor, time))


def few(actor):
    """Take 21 steps, which are no whole number of blocks."""
    for time in range(21):
        actor.add(step_of(actor, time))


def helped(env, time):
    """Return whether a human takes a step for an env."""
    return (time + 3 * env) // 5 % 3 == 0


def assisted(actor):
    """As `few`, but longer, with one env; another member gets the steps of a human, too."""
    for time in range(200):
        is_human = helped(actor.envs[0], time)
        actor.add(step_of(actor, time), members="demos" if is_human else ())


def careless(actor):
    """As `assisted`, but raise an error after any number of steps, three times."""
    for time in range(200):
        if actor.incarnation < 3 and time == actor.seed % 150:
            raise KeyError("a step that failed")
        actor.add(step_of(actor, time), members=["demos"] * int(helped(actor.envs[0], time)))


def logging(actor):
    """As `few`, with masked steps, and two numbers that are logged for each step."""
    for time in range(21):
        actor.log(index=actor.index, time=time)
        actor.add(step_of(actor, time), mask=np.arange(2) != time % 5)


def failing(actor):
    """Raise an error after a few steps."""
    few(actor)
    raise KeyError(f"the env of actor {actor.index} broke, in incarnation {actor.incarnation}")


def stubborn(actor):
    """Take no notice of errors, and of the end."""
    while True:
        with contextlib.suppress(Exception):
            actor.add(step_of(actor, 0))


def bad_extras(actor):
    """Add a step with extras that have no names."""
    actor.add(step_of(actor, 0, extras=np.zeros(actor.num_envs)))


def following(actor):
    """Act with the newest parameters, which are their version."""
    while True:  # `add` does not return once the actor is stopped
        params = actor.params()
        assert params == actor.version
        actor.add({"seen": np.full(actor.num_envs, params)})


class Read:
    """Parameters that become the number of times that a process has read them."""

    num = 0

    def __reduce__(self):
        return _read, ()


def _read():
    Read.num += 1
    return Read.num


def counting(actor):
    """Add how often the parameters were read."""
    for _ in range(24):
        actor.add({"seen": np.full(actor.num_envs, actor.params())})


def team(actor):
    """Add steps of two agents."""
    for time in range(40):
        flags = ends_of_team(np.asarray(actor.envs), time)
        actor.add(step_of(actor, time, terminated=flags, truncated=np.zeros_like(flags)))


def single(actor):
    """Add steps of one env without its axis, in Python's own numbers."""
    for time in range(16):
        end = bool(ends(actor.envs[0], time))
        actor.add(
            obs=np.array([actor.envs[0], 0.0, time]),
            action=1,
            reward=time,
            terminated=end,
            truncated=False,
        )


def items(actor):
    """Add items with priorities of the actor's own, every other six of them of some envs, and know
    the version of the parameters."""
    envs = np.asarray(actor.envs)
    for time in range(24):
        actor.params()
        took = envs != time % 4 if time // 6 % 2 == 0 else None
        item = {"who": envs, "time": np.full(actor.num_envs, time)}
        actor.add(item, mask=took, priority=1.0 + envs, members=("offline",))


def resetting(actor):
    """Add steps of envs that reset within the step that ends an episode."""
    noise = np.random.default_rng(actor.seed)
    for time in range(400):
        place = time % 10
        flags = np.full(actor.num_envs, place == 9)
        obs = place + noise.uniform(0, 0.1, (actor.num_envs, 3))
        actor.add(step_of(actor, time, obs=obs, terminated=flags))


def misshapen(actor):
    """Add a step whose observations have another shape than the example's."""
    actor.add(step_of(actor, 0, obs=np.zeros((actor.num_envs, 4), np.int32)))


def check_rows(replay, num_envs, gaps=None):
    """Check that the rows of each env are those that its actor sent: each once, in their order, and
    with no more gaps in an incarnation, by default none. Return the number of rows, and of
    incarnations over all envs that are stored."""
    state = replay.state
    obs = np.asarray(state.rows.steps.obs).reshape(num_envs, -1, 3)
    reward = np.asarray(state.rows.steps.reward).reshape(num_envs, -1)
    length, num_incarnations, num_gaps = obs.shape[1], 0, 0
    position, filled = np.asarray(state.counters.position), np.asarray(state.counters.filled)
    for env in range(num_envs):
        order = np.arange(position[env] - filled[env], position[env]) & (length - 1)
        envs, incarnation, time = obs[env, order].T
        begins = np.diff(incarnation)
        assert (envs == env).all()
        assert (time == reward[env, order]).all()
        assert (begins >= 0).all()
        assert ((time[1:] == 0) == (begins > 0)).all()
        is_whole = filled[env] in (0, length) or time[0] == 0
        steps = np.diff(time)[begins == 0]
        assert (steps >= 1).all()
        num_gaps += int((steps > 1).sum()) + (not is_whole)
        num_incarnations += len(set(incarnation.tolist()))
    assert num_gaps <= (gaps or 0)
    return int(filled.sum()), num_incarnations


def check_transitions(batch):
    """Check each sampled transition of one step, with `autoreset="next_step"`."""
    t = batch.experience
    env, incarnation, time = np.asarray(t.obs).T
    assert batch.is_valid.all()
    assert (t.action == env).all()
    assert (t.reward == time).all()
    assert ((t.discount == 0) == ends(env, time)).all()
    assert not (ends(env, time - 1) & (time > 0)).any()  # the step that resets
    following = np.stack([env, incarnation, time + 1], 1)
    assert (t.next_obs == following)[~ends(env, time)].all()
