"""Properties that any replay can be held to. Each is a function of an adapter's class; it raises
AssertionError with the history that breaks it, or NotOffered.

`owner/name#n` names a public report of the fault."""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
from replay import NotOffered, Options, Replay, Turn
from streams import STRIDE, Noise, Stream, action_of, reward_of

HERE = pathlib.Path(__file__).parent
KINDS = ("uniform", "prioritized")


def filled(make, turns, options, **stream):
    """Return a replay after some turns, and its envs; one env if it isn't made for several."""
    for num_envs in dict.fromkeys((options.num_envs, 1)):
        capacity = options.capacity * num_envs // options.num_envs
        own = dataclasses.replace(options, num_envs=num_envs, capacity=capacity)
        envs = Stream(own, **stream)
        try:
            replay = make(own)
            envs.fill(replay, turns)
        except NotOffered:
            if num_envs == 1:
                raise
        else:
            return replay, envs


def each(holds, *cases):
    """Call a function with each case. Those that are not offered are left out, unless all are."""
    missing = []
    for case in cases:
        try:
            holds(*case)
        except NotOffered as error:
            missing.append(error)
    if len(missing) == len(cases):
        raise missing[0]


def numbers_of(tree):
    """Return the number of each item's observation."""
    leaf = np.asarray(tree)
    return leaf.reshape(len(leaf), -1)[:, 0].astype(int)


def sampled(replay, envs, batches=60, **compared):
    """Check many batches. Return the numbers of all steps that were sampled. Of priorities, each
    batch gets new ones, of 1 to 4."""
    places, seen = envs.all_steps(), set()
    for _ in range(batches):
        batch = replay.sample()
        numbers = envs.check(batch, places, **compared)
        seen |= {*numbers.tolist()}
        if envs.options.kind == "prioritized":
            replay.update_priorities(batch.index, priority_of(numbers))
    return seen


def priority_of(numbers):
    return 1.0 + np.asarray(numbers) % 4


def frequencies(replay, numbers, items=40_000):
    """Return how often each of these steps was sampled."""
    counts, total = dict.fromkeys(map(int, numbers), 0), 0
    while total < items:
        for number in numbers_of(replay.sample().obs).tolist():
            assert number in counts, f"{number} was sampled, of {min(counts)} to {max(counts)}"
            counts[number] += 1
            total += 1
    return np.array([*counts.values()]) / total, total


def agrees(share, law, total, what):
    """Chi-square, failure probability about 1e-7; cells of 20 expected items and more."""
    expected = law * total
    assert (expected > 20).all()
    chi2, cells = float((((share - law) * total) ** 2 / expected).sum()), len(law) - 1
    bound = cells * (1 - 2 / (9 * cells) + 5.2 * np.sqrt(2 / (9 * cells))) ** 3
    assert chi2 < bound, f"{what}: chi-square {chi2:.0f} of {cells} cells, bound {bound:.0f}"


def keeps_the_newest_steps(make):
    """A full replay has the newest steps, each with its own action, reward and next observation,
    wherever the head of the ring is.

    Wrap-around is where rings go wrong: pairs over the head join the newest step with the oldest.
    (instadeepai/flashbax#51, pytorch/rl#1969)"""

    def holds(kind, num_envs):
        options = Options(48 * num_envs, kind, num_envs)
        replay, envs = filled(make, 63, options, lengths=(3, 6))
        for _ in range(5):
            envs.fill(replay, 7)
            batches = 60 * num_envs
            seen = sampled(replay, envs, batches, at_ends="none", at_newest=True)
            for own in envs.steps:
                newest = [step.number for step in own[-75:]]  # without ends 48 rows have so many
                mine = {number for number in seen if number // STRIDE == newest[0] // STRIDE}
                expected = {step.number for step in own[-30:-1] if not step.ends}
                assert expected <= mine <= {*newest}, (
                    f"{kind}: sampled {sorted(mine)} of 48 rows, newest {newest}"
                )

    each(holds, *itertools.product(KINDS, (1, 3)))


def _ends(
    make, autoreset, terminations=0.0, has_kind=lambda step: step.ends, n_step=1, at_ends="all"
):
    """Check windows at ends, in a large ring and in one that wraps around. Steps of a kind are
    sampled."""

    def holds(kind, capacity, newest):
        options = Options(capacity, kind, 2, n_step=n_step, autoreset=autoreset)
        replay, envs = filled(make, 60, options, terminations=terminations)
        seen = sampled(replay, envs, at_ends=at_ends)
        steps = [step for own in envs.steps for step in own[-newest:-1] if has_kind(step)]
        for step in steps:
            assert step.number in seen, f"never sampled: {envs.history(step.number)}"

    each(holds, *((kind, *ring) for kind in KINDS for ring in ((400, 60), (40, 9))))


def true_final_observation_with_same_step(make):
    """Where a time limit cut an episode, `next_obs` is its true final observation, if the env
    resets in the same step.

    Its value is bootstrapped: the first observation of the next episode is another state, and a
    target from it is wrong without an error. (takuseno/d3rlpy#18)"""
    _ends(make, "same_step")


def true_final_observation_with_next_step(make):
    """The same for envs that reset in the next step, whose action is ignored.

    That step is no transition: it must not be sampled. (vwxyzjn/cleanrl#499, automl/Mighty#108)"""
    _ends(make, "next_step")


def no_false_target_without_final_observation(make):
    """If the env loses the final observation, no target bootstraps from the next episode."""
    _ends(make, "lost", has_kind=lambda step: False)


def terminations_do_not_bootstrap(make):
    """After a termination the target is the reward alone; after a truncation it is not."""

    def holds(autoreset):
        _ends(make, autoreset, 0.5, lambda step: step.terminated, at_ends="discount")

    each(holds, ("same_step",), ("next_step",))


def n_step_windows_stop_at_ends(make):
    """An n-step target sums up rewards to the end of the episode, and bootstraps there, with the
    discount of so many steps.

    (tensorflow/agents#939, chainer/chainerrl#442)"""
    _ends(make, "same_step", 0.5, lambda step: False, n_step=3)


def n_step_targets_of_the_last_steps(make):
    """The last steps of an episode have targets too, of fewer steps: without them a reward at its
    end is learned from one step alone."""

    def holds(kind):
        replay, envs = filled(make, 60, Options(400, kind, 2, n_step=3))
        seen = sampled(replay, envs, at_ends="none")
        for step in (step for own in envs.steps for step in own[:-6]):
            assert step.number in seen, f"never sampled: {envs.history(step.number)}"

    each(holds, *zip(KINDS, strict=True))


def n_step_windows_stop_at_the_newest_step(make):
    """A step whose window is not complete waits, or bootstraps from the newest observation. It
    never reads old rows, at each place of the head in the ring. (thu-ml/tianshou#135)"""

    def holds(kind):
        options = Options(15, kind, n_step=3, batch_size=32)
        replay, envs = filled(make, 8, options, lengths=(6, 7))
        for _ in range(32):
            sampled(replay, envs, batches=4, at_ends="none", at_newest=True)
            envs.fill(replay, 1)

    each(holds, *zip(KINDS, strict=True))


def masked_turns_are_no_steps(make):
    """Where an env took no step in a turn, its windows go from its last step to its next one."""

    def holds(kind, autoreset):
        options = Options(300, kind, 3, n_step=2, autoreset=autoreset)
        replay, envs = filled(make, 60, options, masks=0.4)
        assert len(sampled(replay, envs, at_ends="none")) > 12 * envs.options.num_envs

    each(holds, *itertools.product(KINDS, ("same_step", "next_step")))


def _uniform_law(make, turns, capacity):
    replay, envs = filled(make, turns, Options(capacity), lengths=(3, 9))
    seen = sorted(sampled(replay, envs, at_ends="none"))
    share, total = frequencies(replay, seen)
    agrees(share, np.full(len(seen), 1 / len(seen)), total, f"{len(seen)} steps")
    return len(seen)


def uniform_law_when_full(make):
    """Each sampleable step has the same probability in a full replay. Chi-square over 40,000 items,
    failure probability 1e-7."""
    assert _uniform_law(make, 100, 40) >= 25


def uniform_law_when_partly_filled(make):
    """The same with 12 steps in a replay of 400: what was never written is not sampled."""
    assert 8 <= _uniform_law(make, 12, 400) <= 12


def _prioritized(make, turns=20, lengths=(1000, 1000), **changes):
    """Return a replay whose step number n has the priority 1 + n % 4, its envs, and those steps."""
    options = Options(**{"capacity": 64, "kind": "prioritized"} | changes)
    replay, envs = filled(make, turns, options, lengths=lengths)
    return replay, envs, _prioritize(replay, 3_840 // options.batch_size)


def _prioritize(replay, batches):
    """Give all steps the priority 1 + n % 4. Return their numbers."""
    seen = set()
    for _ in range(batches):
        batch = replay.sample()
        numbers = numbers_of(batch.obs)
        replay.update_priorities(batch.index, priority_of(numbers))
        seen |= {*numbers.tolist()}
    return np.array(sorted(seen))


def priorities_are_proportional(make):
    """A step is sampled with probability p**alpha over the sum of all, by enumeration: in a partly
    filled ring, and in full ones of a power of two and of another size.

    (Schaul et al. 2016, equation 1; vwxyzjn/cleanrl#546)"""

    def holds(alpha, capacity, turns):
        replay, _, seen = _prioritized(
            make, turns, (5, 7), alpha=alpha, capacity=capacity, batch_size=16
        )
        law = priority_of(seen) ** alpha / (priority_of(seen) ** alpha).sum()
        share, total = frequencies(replay, seen)
        agrees(share, law, total, f"alpha={alpha}, {capacity} rows")
        batch = replay.sample()
        if batch.probability is not None:
            expected = dict(zip(seen.tolist(), law, strict=True))
            expected = [expected[n] for n in numbers_of(batch.obs).tolist()]
            np.testing.assert_allclose(np.asarray(batch.probability), expected, rtol=2e-3)

    each(holds, (1.0, 64, 20), (0.5, 64, 20), (1.0, 16, 60), (1.0, 23, 60))


def _check_weights(batch, exponent):
    """Weights are in proportion to P(i)**-beta, and at most 1."""
    if batch.weight is None:
        raise NotOffered
    weight = np.asarray(batch.weight, np.float64)
    law = priority_of(numbers_of(batch.obs)) ** -exponent
    np.testing.assert_allclose(
        weight / weight.max(), law / law.max(), rtol=2e-3, err_msg=f"p**-{exponent}"
    )
    assert weight.max() <= 1 + 1e-4


def importance_weights(make):
    """Weights are in proportion to P(i)**-beta, and at most 1.

    (Schaul et al. 2016, section 3.4)"""
    replay, _, _ = _prioritized(make, alpha=0.5, beta=0.7)
    _check_weights(replay.sample(), 0.5 * 0.7)


def beta_of_a_call(make):
    """Beta rises during a run: a sample takes its value."""
    replay, _, _ = _prioritized(make, beta=0.4)
    for beta in (0.0, 1.0):
        _check_weights(replay.sample(beta=beta), beta)


def new_steps_get_the_largest_priority(make):
    """A new step is sampled as often as the one with the largest priority so far.

    (Schaul et al. 2016, algorithm 1; instadeepai/flashbax#58)"""

    def holds(alpha):
        options = Options(64, "prioritized", alpha=alpha)
        replay, envs = filled(make, 20, options, lengths=(1000, 1000))
        for _ in range(40):
            batch = replay.sample()
            replay.update_priorities(batch.index, np.full(len(batch.reward), 1.9))
        envs.fill(replay, 10)
        share, _ = frequencies(replay, [step.number for step in envs.steps[0]])
        ratio = np.mean(share[20:29]) / np.mean(share[:19])  # the newest of each may wait
        assert 0.93 < ratio < 1.07, (
            f"alpha={alpha}: a new step is sampled {ratio:.2f} times as often as one of priority "
            "1.9, which all old ones have"
        )

    each(holds, (1.0,), (0.5,))


def the_largest_priority_can_fall(make):
    """After one outlier, new steps need not rule all batches for ever."""
    replay, envs = filled(make, 20, Options(64, "prioritized"), lengths=(1000, 1000))
    batch = replay.sample()
    replay.update_priorities(batch.index, np.full(len(batch.reward), 1e6))
    for _ in range(40):
        batch = replay.sample()
        replay.update_priorities(batch.index, np.ones(len(batch.reward)))
    replay.reset_max_priority()
    envs.fill(replay, 5)
    old = numbers_of(replay.sample().obs) < STRIDE + 15
    assert old.any(), "only new steps are sampled"


def bad_priorities_do_no_lasting_harm(make):
    """A NaN or an infinite priority, which one diverged loss gives, must be refused, or be healed
    by the next updates, in steps that are added later too.

    (werner-duvaud/muzero-general#111)"""

    def holds(bad):
        replay, envs, _ = _prioritized(make, batch_size=8)
        batch = replay.sample()
        numbers = numbers_of(batch.obs)
        middle = np.unique(numbers)[len(np.unique(numbers)) // 2]
        given = np.where(numbers == middle, bad, 1.0)  # nothing in the batch heals it
        with contextlib.suppress(ValueError, RuntimeError, AssertionError, TypeError):  # refused
            replay.update_priorities(batch.index, given)
        envs.fill(replay, 3)
        try:
            seen = _prioritize(replay, 480)
            assert {*seen.tolist()} <= {*envs.all_steps()}, f"{seen} sampled"
            assert len(seen) >= 22, f"{len(seen)} of 23 steps are sampled"
            share, total = frequencies(replay, seen)
            agrees(share, priority_of(seen) / priority_of(seen).sum(), total, "then")
        except Exception as error:
            raise AssertionError(f"after a priority of {bad}: {error!r}") from error

    each(holds, (np.nan,), (np.inf,), (-1.0,))


def late_updates_change_no_other_step(make):
    """An update of steps that were overwritten since does not reach the steps in their places: at
    once, and after other batches were sampled, as a learner has it that samples ahead."""

    def holds(batches):
        options = Options(15, "prioritized", batch_size=4)
        replay, envs = filled(make, 16, options, lengths=(1000, 1000))
        late = replay.sample()
        envs.fill(replay, 32)
        for _ in range(batches):
            batch = replay.sample()
            replay.update_priorities(batch.index, np.ones(len(batch.reward)))
        with contextlib.suppress(ValueError, RuntimeError, IndexError, KeyError):  # refused
            replay.update_priorities(late.index, np.full(len(late.reward), 50.0))
        seen = {number for _ in range(300) for number in numbers_of(replay.sample().obs).tolist()}
        share, _ = frequencies(replay, seen, items=10_000)
        ratio = share.max() / share.min()
        assert ratio < 3, (
            f"{batches} batches later, some steps are sampled {ratio:.0f} times as often as others"
        )

    each(holds, (0,), (200,))


def late_updates_leave_windows_whole(make):
    """After updates of any steps that were overwritten, what is sampled has its own next step: none
    joins the newest step with the oldest."""
    options = Options(15, "prioritized", batch_size=4)
    replay, envs = filled(make, 16, options, lengths=(1000, 1000))
    late = [replay.sample().index for _ in range(60)]
    envs.fill(replay, 20)
    replay.sample()
    for index in late:
        with contextlib.suppress(ValueError, RuntimeError, IndexError, KeyError):  # refused
            replay.update_priorities(index, np.ones(4))
    sampled(replay, envs, at_newest=True)


def sums_do_not_drift(make):
    """In a million updates of priorities, over three seeds, only stored steps are sampled, and at
    the end by their priorities. (instadeepai/flashbax#52)"""
    updates = int(os.environ.get("CONFORMANCE_UPDATES", 1_000_000))
    for seed in range(3):
        _does_not_drift(make, seed, updates // 256 // 3)


def _does_not_drift(make, seed, batches):
    options = Options(999, "prioritized", batch_size=256, seed=seed)
    replay, envs = filled(make, 700, options, lengths=(10_000, 10_000))
    random, last, places = np.random.default_rng(seed), {}, envs.all_steps()
    for n in range(batches):
        batch = replay.sample()
        numbers = numbers_of(batch.obs)
        wrong = [number for number in numbers.tolist() if number not in places]
        assert not wrong, f"seed {seed}, batch {n}: never written, and sampled: {wrong[:3]}"
        if batch.probability is not None:
            assert (np.asarray(batch.probability) > 0).all(), (
                f"seed {seed}, batch {n}: a step with a probability of 0 was sampled"
            )
        of_number = np.exp(random.normal(size=700))  # equal items get equal priorities
        replay.update_priorities(batch.index, of_number[numbers - STRIDE])
        last |= dict(zip(numbers.tolist(), of_number[numbers - STRIDE], strict=True))
    batch = replay.sample()
    if batch.probability is None or len(last) < len(places) - 1:
        return
    law = np.array([last[n] for n in numbers_of(batch.obs).tolist()])
    got = np.asarray(batch.probability, np.float64)
    np.testing.assert_allclose(got / got[0], law / law[0], rtol=5e-3)


def sequences_stay_in_episodes(make):
    """Steps of a sequence that count follow each other, or `is_first` says where one begins.

    (pytorch/rl#2208)"""
    options = Options(300, "sequences", 2)
    replay, envs = filled(make, 220, options, lengths=(3, 9), terminations=0.5)
    places, longest = envs.all_steps(), 0
    for _ in range(60):
        batch = replay.sample()
        obs = np.asarray(batch.obs)[:, :, 0].astype(int)
        reward, action = np.asarray(batch.reward), np.asarray(batch.action)
        length = reward.shape[1]
        mask = np.ones(reward.shape, bool) if batch.mask is None else np.asarray(batch.mask)
        longest = max(longest, mask.sum(axis=1).max())
        for row, t in np.argwhere(mask).tolist():
            number = int(obs[row, t])
            what = f"{obs[row]}, of which {mask[row].tolist()} count"
            assert number in places, f"{number} is no step: {what}"
            assert reward[row, t] == reward_of(number), f"reward at {number}: {what}"
            assert action[row, t] == action_of(number), f"action at {number}: {what}"
            if t and mask[row, t - 1] and obs[row, t] != obs[row, t - 1] + 1:
                said = batch.is_first is not None and batch.is_first[row, t]
                assert said, f"an episode begins within, and nothing says so: {what}"
            if obs.shape[1] > length and t == length - 1:
                assert obs[row, t + 1] == number + 1, f"the observation after {number}: {what}"
    assert longest > 1


def recurrent_states_belong_to_the_first_step(make):
    """The state that comes with a sequence was stored with its first step."""
    options = Options(300, "sequences", 2, burn_in=2)
    replay, envs = filled(make, 220, options, lengths=(5, 9))
    for _ in range(20):
        batch = replay.sample()
        if batch.state is None:
            raise NotOffered
        first = np.asarray(batch.obs)[:, 0, 0].astype(int)
        is_step = np.isin(first, [*envs.all_steps()])  # others are padding
        state = np.asarray(batch.state).reshape(len(first), -1)[:, 0]
        assert is_step.any()
        np.testing.assert_array_equal(state[is_step], first[is_step])


def goals_are_of_the_same_episode(make):
    """A hindsight goal was achieved later in the item's own episode, and the reward is that of the
    goal. (thu-ml/tianshou#811)"""

    def holds(capacity):
        replay, envs = filled(make, 120, Options(capacity, "goals"), lengths=(4, 9))
        places, relabelled = envs.all_steps(), 0
        for _ in range(40):
            batch = replay.sample()
            items = zip(numbers_of(batch.obs), numbers_of(batch.goal), batch.reward, strict=True)
            for number, goal, reward in items:
                env, n = places[int(number)]
                own = envs.steps[env]
                last = [step.number for step in own if step.episode == own[n].episode][-1]
                if goal < 0:  # the goal that the env had
                    continue
                relabelled += 1
                assert number < goal <= last + 1, (
                    f"goal {goal} of step {number}, whose episode ends with {last}"
                )
                assert reward == (0.0 if goal == number + 1 else -1.0), (
                    f"reward {reward} for goal {goal} at {number}"
                )
        assert relabelled > 100

    each(holds, (400,), (60,))


def observations_keep_their_dtypes(make):
    """A dict of an image uint8, a vector float32 and a number int32 comes back with its dtypes and
    bits. Where one dtype is that of all, an image takes four times its bytes."""
    _tree(
        make,
        {
            "image": np.zeros((4, 4), np.uint8),
            "vector": np.zeros(3, np.float32),
            "count": np.int32(0),
        },
    )


def narrow_dtypes_are_kept(make):
    """bfloat16, which NumPy alone does not have, and scalars of an env (0-d leaves)."""
    import ml_dtypes

    _tree(make, {"vector": np.zeros(3, ml_dtypes.bfloat16), "flag": np.bool_(False)})


def _tree(make, obs):
    try:
        _tree_of(make, obs, 2)
    except NotOffered:
        _tree_of(make, obs, 1)


def _tree_of(make, obs, num_envs):
    replay = make(Options(100, num_envs=num_envs, obs=obs))
    random, rows = np.random.default_rng(0), []

    def some():
        def leaf_of(like):
            shape = (num_envs, *like.shape)
            values = random.integers(0, 2 if like.dtype == bool else 200, shape)
            # of large integers, float32 keeps 24 bits
            return (values + (2**30 if like.dtype == np.int32 else 0)).astype(like.dtype)

        return {name: leaf_of(np.asarray(leaf)) for name, leaf in obs.items()}

    before, no = some(), np.zeros(num_envs, bool)
    for t in range(30):
        after = some()
        number = num_envs * t + np.arange(num_envs, dtype=np.int32)
        replay.add(Turn(before, number, number.astype(np.float32), no, no, after, after, no))
        rows += [
            [{name: leaf[env] for name, leaf in tree.items()} for tree in (before, after)]
            for env in range(num_envs)
        ]
        before = after
    batch = replay.sample()
    for item, action in enumerate(np.asarray(batch.action).reshape(-1).astype(int)):
        for got, expected in zip((batch.obs, batch.next_obs), rows[action], strict=True):
            for name in expected:
                leaf, stored = np.asarray(got[name][item]), expected[name]
                assert leaf.dtype == stored.dtype, f"{name}: {leaf.dtype}, stored {stored.dtype}"
                np.testing.assert_array_equal(leaf.reshape(stored.shape), stored, name)


def observations_are_stored_once(make):
    """A row of 10,000 bytes takes less than 15,000 in a full replay: `next_obs` is the next row's
    observation. (rail-berkeley/softlearning#65)"""
    options = Options(500, obs=np.zeros(2_500, np.float32))
    replay = make(options)
    Noise(options, lengths=(50, 50)).fill(replay, 600)
    each = replay.nbytes() / options.capacity
    assert each < 15_000, f"{each:,.0f} bytes a row of 10,000"


def an_add_costs_no_copy(make):
    """The time of an add to a full replay does not grow with the capacity: 100,000 rows take at
    most 5 times that of 1,000. A copy of all rows takes tens of times.

    (instadeepai/flashbax#6, instadeepai/flashbax#17)"""

    def seconds(capacity, num_envs):
        sizes = {"num_envs": num_envs, "batch_size": 200, "obs": np.zeros(128, np.float32)}
        options = Options(capacity, **sizes)
        replay, envs = make(options), Stream(options, lengths=(50, 50))
        envs.fill(replay, capacity // num_envs + 70)
        turns, times = [envs.turn() for _ in range(60)], []
        for turn in turns:
            before = time.process_time()
            replay.add(turn)
            replay.sample()
            times.append(time.process_time() - before)
        return np.median(times)

    def holds(num_envs):
        ratio = min(seconds(100_000, num_envs) / seconds(1_000, num_envs) for _ in range(2))
        assert ratio < 5, f"{ratio:.0f} times"

    try:
        holds(100)
    except NotOffered:
        holds(1)


def jit_scan_and_vmap_agree(make):
    """One program for each call, a `lax.scan` of all adds, and a `vmap` of three replays give the
    same batch to the last bit."""
    options = Options(24, num_envs=2)
    envs = Stream(options)
    turns = [envs.turn() for _ in range(30)]
    state, row, add, sample = make(options).pure(turns[0])
    import jax

    rows, key = [row(turn) for turn in turns], jax.random.key(0)
    stack = lambda trees: jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    def scanned(state, rows):
        return jax.lax.scan(lambda state, row: (add(state, row), None), state, rows)[0]

    one = functools.reduce(jax.jit(add), rows, state)
    batch = jax.jit(sample)(one, key)
    of_scan = jax.jit(sample)(jax.jit(scanned)(state, stack(rows)), key)
    several = jax.jit(jax.vmap(scanned, (None, 0)))(state, stack([stack(rows)] * 3))
    of_vmap = jax.jit(jax.vmap(sample, (0, None)))(several, key)
    for how, other in (("scan", of_scan), ("vmap", jax.tree.map(lambda leaf: leaf[1], of_vmap))):
        for expected, got in zip(jax.tree.leaves(batch), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(expected), how)


def _saved(make, folder, **changes):
    """Save a full replay; episodes terminate, so that the property of truncations is another."""
    options = Options(**{"capacity": 60, "num_envs": 2} | changes)
    replay, envs = filled(make, 50, options, lengths=(3, 9))
    if options.kind == "prioritized":
        for _ in range(3):
            batch = replay.sample()
            replay.update_priorities(batch.index, 2.0 + np.arange(len(batch.reward)) % 5)
    replay.save(f"{folder}/save")
    return replay, envs


def a_resume_is_identical(make):
    """After a load, the same steps and the same seed give the same batches to the last bit, as
    without the interruption: contents, episodes that go on, priorities and the largest one.

    (instadeepai/flashbax#46, ray-project/ray#8151)"""

    def holds(kind, n_step):
        with tempfile.TemporaryDirectory() as folder:
            replay, envs = _saved(make, folder, kind=kind, n_step=n_step)
            other = make(envs.options)
            other.load(f"{folder}/save")
        more, found = [envs.turn() for _ in range(20)], [[], []]
        has_seed = type(replay).seed is not Replay.seed
        for one, own in zip((replay, other), found, strict=True):
            for turn in more:
                one.add(turn)
                if has_seed:
                    one.seed(7)
                    own.append(_items(one.sample()))
            own += [_items(one.sample()) for _ in range(0 if has_seed else 100)]
        if not has_seed:  # the contents are compared
            found = [
                [{"items": np.unique(np.concatenate([*map(_rows, own)]), axis=0)}] for own in found
            ]
        for before, after in zip(*found, strict=True):
            assert before.keys() == after.keys()
            for name, leaf in before.items():
                same = np.array_equal(leaf, after[name])
                assert same, f"{kind}, n_step={n_step}: {name} is another one after the load"

    each(holds, *itertools.product(KINDS, (1, 3)), ("goals", 1))


def _rows(items):
    """Return a row for each item; without what a random goal changes."""
    names = ("obs",) if "goal" in items else ("obs", "reward", "discount", "next_obs")
    return np.stack([items[name].reshape(len(items["obs"]), -1)[:, 0] for name in names], axis=1)


def _items(batch):
    """Return the fields of a batch, by name."""
    names = ("obs", "action", "reward", "discount", "next_obs", "weight", "goal")
    return {n: np.asarray(getattr(batch, n)) for n in names if getattr(batch, n) is not None}


def _restores(make, **changes):
    """A save loads into a replay with other options. The rows are the same, and further steps
    follow them."""
    with tempfile.TemporaryDirectory() as folder:
        _, envs = _saved(make, folder)
        envs.options = dataclasses.replace(envs.options, **changes)
        other = make(envs.options)
        try:
            other.load(f"{folder}/save")
        except Exception as error:  # any refusal says that this is not offered
            raise NotOffered(str(error)) from error
    before, expected = sampled(other, envs, at_ends="none"), 15 * envs.options.num_envs
    assert len(before) >= expected, f"{len(before)} steps are left, of {expected} and more"
    envs.fill(other, 20)
    assert sampled(other, envs, at_ends="none") - before, "new steps are not sampled"


def a_save_restores_to_another_capacity(make):
    """A save loads into a larger replay: the rows are the same, and further steps follow them.

    (instadeepai/flashbax#15)"""
    _restores(make, capacity=200)


def a_save_restores_to_another_n_step(make):
    """A save of 1-step targets loads into a replay of 3-step targets."""
    _restores(make, n_step=3)


@contextlib.contextmanager
def _child(make, action, folder):
    """Run child.py; kill it at the end."""
    source = sys.modules[make.__module__].__file__
    command = [sys.executable, str(HERE / "child.py"), source, make.__name__, action, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as child:
        watch = threading.Timer(600, child.kill)
        watch.start()
        try:
            yield child
        finally:
            watch.cancel()
            child.kill()


def _says(child, word):
    """Read what a child prints up to a line, or to its end; libraries print lines of their own."""
    return any(line.strip() == word for line in child.stdout)


def _wait_for(child, word):
    if not _says(child, word):
        _ended(child, word)


def _ended(child, word):
    if child.wait() == 3:
        raise NotOffered
    raise AssertionError(f"it ended before '{word}', with exit status {child.returncode}")


def _held(pid):
    """Return the MB that a process holds, without pages of files, which the system may drop."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024


def a_save_needs_little_memory(make):
    """A save of 400 MB takes less than half of that on top: runs die where it doubles what they
    hold. (google/orbax#1640, thu-ml/tianshou#260)"""

    def goes_on():
        child.stdin.write("\n")
        child.stdin.flush()

    with tempfile.TemporaryDirectory() as folder, _child(make, "memory", folder) as child:
        _wait_for(child, "made")
        before = _held(child.pid)
        goes_on()
        _wait_for(child, "filled")
        most = filled = _held(child.pid)
        said = []
        saving = threading.Thread(target=lambda: said.append(_says(child, "saved")))
        goes_on()
        saving.start()
        while saving.is_alive():
            with contextlib.suppress(OSError, KeyError):  # it has ended
                most = max(most, _held(child.pid))
            time.sleep(0.002)
        if said == [False]:
            _ended(child, "saved")
    more, held = most - filled, filled - before
    assert more < held / 2, f"{more:.0f} MB more, to save {held:.0f} MB"


def a_kill_in_a_save_leaves_one(make):
    """Killed at any moment of a save, a run resumes from this save or from the one before."""
    for attempt in range(12):
        with tempfile.TemporaryDirectory() as folder:
            seconds = 0.01 + 0.04 * attempt
            with _child(make, "saves", folder) as child:
                _wait_for(child, "first")  # one save is complete
                time.sleep(seconds)
                child.send_signal(signal.SIGKILL)
            when = f"killed {seconds:.2f} s after the first save"
            with _child(make, "loads", folder) as child:
                said = child.stdout.read().split()
            assert "loaded" in said, f"{when}: nothing loads"
            assert "right" in said, f"{when}: what is loaded is wrong"


def adds_and_samples_of_two_threads(make):
    """One thread adds while another samples: no item is torn."""
    if not make.is_threadsafe:
        raise NotOffered
    replay, envs = filled(make, 40, Options(64, num_envs=2), lengths=(3, 9))
    turns, failures = [envs.turn() for _ in range(400)], []

    def add():
        try:
            for turn in turns:
                replay.add(turn)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=add)
    thread.start()
    batches = []
    while thread.is_alive():
        batches.append(replay.sample())
    thread.join()
    assert not failures, failures
    for batch in batches[:200]:
        envs.check(batch)


ALL = {
    name: value
    for name, value in list(globals().items())
    if not name.startswith("_")
    and getattr(value, "__module__", "") == __name__
    and value.__code__.co_varnames[: value.__code__.co_argcount] == ("make",)
}
