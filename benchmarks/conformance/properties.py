"""Properties that any replay can be held to. Each is a function of an adapter's class; it raises
AssertionError with the history that breaks it, or NotOffered.

`(owner/name#n)` names a public report of the fault."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
from replay import NotOffered, Options, Turn
from streams import STRIDE, Stream, action_of, reward_of

HERE = pathlib.Path(__file__).parent


def filled(make, turns, options, **stream):
    replay, envs = make(options), Stream(options, **stream)
    envs.fill(replay, turns)
    return replay, envs


def sampled(replay, envs, batches=60):
    """Check many batches. Return the numbers of all steps that were sampled."""
    places = envs.all_steps()
    return {int(n) for _ in range(batches) for n in envs.check(replay.sample(), places)}


def frequencies(replay, numbers, items=40_000):
    """Return how often each of these steps was sampled."""
    counts, total = dict.fromkeys(map(int, numbers), 0), 0
    while total < items:
        obs = np.asarray(replay.sample().obs)
        for number in obs.reshape(len(obs), -1)[:, 0].astype(int):
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
    """A full replay has the newest `capacity` steps, each with its own action, reward and next one.

    Wrap-around is where rings go wrong: pairs over the head join the newest step with the oldest.
    """
    for num_envs in (1, 3):
        options = Options(capacity=24 * num_envs, num_envs=num_envs, autoreset="same_step")
        replay, envs = filled(make, 70, options, lengths=(100, 100))
        for env in range(num_envs):
            seen = {number for number in sampled(replay, envs) if number // STRIDE == env}
            newest = [step.number for step in envs.steps[env][-25:]]
            assert {*newest[3:-1]} <= seen <= {*newest}, (
                f"env {env}: sampled {sorted(seen)}, newest {newest}"
            )


def _ends_at(make, autoreset, terminations=0.0):
    options = Options(capacity=400, num_envs=2, autoreset=autoreset)
    return filled(make, 60, options, terminations=terminations)


def true_final_observation_with_same_step(make):
    """Where a time limit cut an episode, `next_obs` is its true final observation, if the env
    resets in the same step.

    Its value is bootstrapped: the first observation of the next episode is another state, and a
    target from it is wrong without an error."""
    replay, envs = _ends_at(make, "same_step")
    _every_end_is_sampled(replay, envs)


def true_final_observation_with_next_step(make):
    """The same for envs that reset in the next step, whose action is ignored.

    That step is no transition: it must not be sampled. (vwxyzjn/cleanrl#499, pytorch/rl#2473)"""
    replay, envs = _ends_at(make, "next_step")
    _every_end_is_sampled(replay, envs)


def no_false_target_without_final_observation(make):
    """If the env loses the final observation, no target bootstraps from the next episode."""
    replay, envs = _ends_at(make, "lost")
    assert sampled(replay, envs)


def _every_end_is_sampled(replay, envs):
    seen = sampled(replay, envs)
    ends = {step.number for own in envs.steps for step in own[:-1] if step.ends}
    assert ends <= seen, (
        f"last steps of episodes that were never sampled: {sorted(ends - seen)[:5]}"
    )


def terminations_do_not_bootstrap(make):
    """After a termination the target is the reward alone; after a truncation it is not."""
    for autoreset in ("same_step", "next_step"):
        try:
            replay, envs = _ends_at(make, autoreset, terminations=0.5)
        except NotOffered:
            continue
        _every_end_is_sampled(replay, envs)
        return
    raise NotOffered


def n_step_windows_stop_at_ends(make):
    """An n-step target sums up rewards to the end of the episode, and bootstraps there with the
    discount of so many steps. Each step of an episode is sampled."""
    options = Options(capacity=400, num_envs=2, n_step=3, autoreset="same_step")
    replay, envs = filled(make, 60, options, terminations=0.5)
    seen = sampled(replay, envs)
    ended = {step.number for own in envs.steps for step in own[:-6]}
    assert ended <= seen, f"never sampled: {sorted(ended - seen)[:5]}; {envs.history()}"


def n_step_windows_stop_at_the_newest_step(make):
    """A step whose window is not complete waits, or bootstraps from the newest observation. It
    never reads old rows, at each place of the head in the ring."""
    options = Options(capacity=8, n_step=3, autoreset="same_step", batch_size=32)
    replay, envs = make(options), Stream(options, lengths=(100, 100))
    envs.fill(replay, 5)
    for _ in range(20):
        sampled(replay, envs, batches=4)
        envs.fill(replay, 1)


def masked_turns_are_no_steps(make):
    """Where an env took no step in a turn, its windows go from its last step to its next one."""
    options = Options(capacity=300, num_envs=3, n_step=2, autoreset="same_step")
    replay, envs = filled(make, 60, options, masks=0.4, terminations=0.3)
    assert len(sampled(replay, envs)) > 60


def uniform_law_when_full(make):
    """Each sampleable step has the same probability in a full replay. Chi-square over 40,000 items,
    failure probability 1e-7."""
    options = Options(capacity=40, autoreset="same_step")
    replay, envs = filled(make, 100, options, lengths=(1000, 1000))
    seen = sorted(sampled(replay, envs))
    share, total = frequencies(replay, seen)
    agrees(share, np.full(len(seen), 1 / len(seen)), total, f"{len(seen)} steps")


def uniform_law_when_partly_filled(make):
    """The same with 12 steps in a replay of 400: what was never written is not sampled."""
    options = Options(capacity=400, autoreset="same_step")
    replay, envs = filled(make, 12, options, lengths=(1000, 1000))
    seen = sorted(sampled(replay, envs))
    assert len(seen) >= 10
    share, total = frequencies(replay, seen)
    agrees(share, np.full(len(seen), 1 / len(seen)), total, f"{len(seen)} steps")


def _prioritized(make, turns=20, **changes):
    """Return a replay whose step number n has the priority 1 + n % 4, those steps, and their
    priorities."""
    options = Options(**{"capacity": 64, "kind": "prioritized", "autoreset": "same_step"} | changes)
    replay, _ = filled(make, turns, options, lengths=(1000, 1000))
    index = {}
    for _ in range(3_840 // options.batch_size):
        batch = replay.sample()
        numbers = np.asarray(batch.obs)[:, 0].astype(int)
        replay.update_priorities(batch.index, 1.0 + numbers % 4)
        index |= dict.fromkeys(numbers.tolist())
    seen = np.array(sorted(index))
    return replay, seen, 1.0 + seen % 4


def priorities_are_proportional(make):
    """A step is sampled with probability p**alpha over the sum of all, by enumeration.

    (Schaul et al. 2016, equation 1)"""
    for alpha in (1.0, 0.5):
        replay, seen, priority = _prioritized(make, alpha=alpha)
        law = priority**alpha / (priority**alpha).sum()
        share, total = frequencies(replay, seen)
        agrees(share, law, total, f"alpha={alpha}")
        probability = replay.sample().probability
        if probability is not None:
            batch = replay.sample()
            expected = dict(zip(seen.tolist(), law, strict=True))
            numbers = np.asarray(batch.obs)[:, 0].astype(int)
            got = np.asarray(batch.probability)
            np.testing.assert_allclose(got, [expected[n] for n in numbers], rtol=2e-3)


def importance_weights(make):
    """Weights are in proportion to P(i)**-beta, and at most 1.

    (Schaul et al. 2016, section 3.4)"""
    replay, _, _ = _prioritized(make, alpha=0.5, beta=0.7)
    batch = replay.sample()
    if batch.weight is None:
        raise NotOffered
    numbers, weight = np.asarray(batch.obs)[:, 0].astype(int), np.asarray(batch.weight, np.float64)
    law = (1.0 + numbers % 4) ** (-0.5 * 0.7)
    np.testing.assert_allclose(weight / weight.max(), law / law.max(), rtol=2e-3)
    assert weight.max() <= 1 + 1e-4


def beta_of_a_call(make):
    """Beta rises during a run: a sample takes its value."""
    replay, _, _ = _prioritized(make, alpha=1.0, beta=0.4)
    for beta in (0.0, 1.0):
        batch = replay.sample(beta=beta)
        numbers, weight = (
            np.asarray(batch.obs)[:, 0].astype(int),
            np.asarray(batch.weight, np.float64),
        )
        law = (1.0 + numbers % 4) ** -beta
        np.testing.assert_allclose(weight / weight.max(), law / law.max(), rtol=2e-3)


def new_steps_get_the_largest_priority(make):
    """A new step is sampled as often as the one with the largest priority so far.

    (Schaul et al. 2016, algorithm 1; instadeepai/flashbax rounds it down)"""
    options = Options(capacity=64, kind="prioritized", autoreset="same_step")
    replay, envs = filled(make, 20, options, lengths=(1000, 1000))
    for _ in range(40):
        batch = replay.sample()
        replay.update_priorities(batch.index, np.full(len(batch.reward), 1.9))
    old = {step.number for step in envs.steps[0]}
    envs.fill(replay, 10)
    everything = sorted(step.number for step in envs.steps[0])
    share, _ = frequencies(replay, everything)
    new = [s for s, number in zip(share, everything, strict=True) if number not in old][:-1]
    known = [s for s, number in zip(share, everything, strict=True) if number in old][:-1]
    ratio = np.mean(new) / np.mean(known)
    assert 0.93 < ratio < 1.07, (
        f"a new step is sampled {ratio:.2f} times as often as one of priority 1.9"
    )


def the_largest_priority_can_fall(make):
    """After one outlier, new steps need not rule all batches for ever."""
    options = Options(capacity=64, kind="prioritized", autoreset="same_step")
    replay, envs = filled(make, 20, options, lengths=(1000, 1000))
    batch = replay.sample()
    replay.update_priorities(batch.index, np.full(len(batch.reward), 1e6))
    for _ in range(40):
        batch = replay.sample()
        replay.update_priorities(batch.index, np.ones(len(batch.reward)))
    replay.reset_max_priority()
    envs.fill(replay, 5)
    numbers = np.asarray(replay.sample().obs)[:, 0].astype(int)
    assert (numbers < 15).any(), "only new steps are sampled"


def bad_priorities_do_no_lasting_harm(make):
    """A NaN or an infinite priority, which one diverged loss gives, must be refused, or be healed
    by the next updates.

    (a NaN in the root of a sum tree makes every later sample wrong)"""
    for bad in (np.nan, np.inf, -1.0):
        replay, seen, priority = _prioritized(make, batch_size=8)
        batch = replay.sample()
        numbers = np.asarray(batch.obs)[:, 0].astype(int)
        middle = np.unique(numbers)[len(np.unique(numbers)) // 2]
        given = np.where(numbers == middle, bad, 1.0)  # nothing in the batch heals it
        with contextlib.suppress(ValueError, RuntimeError, AssertionError, TypeError):  # refused
            replay.update_priorities(batch.index, given)
        for _ in range(480):
            batch = replay.sample()
            numbers = np.asarray(batch.obs)[:, 0].astype(int)
            assert {*numbers.tolist()} <= {*seen.tolist()}, f"after {bad}: {numbers[:8]} sampled"
            replay.update_priorities(batch.index, 1.0 + numbers % 4)
        share, total = frequencies(replay, seen)
        agrees(share, priority / priority.sum(), total, f"after {bad}")


def late_updates_change_no_other_step(make):
    """An update of steps that were overwritten since does not reach the steps in their places."""
    options = Options(capacity=16, kind="prioritized", autoreset="same_step", batch_size=4)
    replay, envs = filled(make, 16, options, lengths=(1000, 1000))
    late = replay.sample()
    envs.fill(replay, 32)
    seen = set()
    for _ in range(200):
        batch = replay.sample()
        replay.update_priorities(batch.index, np.ones(len(batch.reward)))
        seen |= {*np.asarray(batch.obs)[:, 0].astype(int).tolist()}
    replay.update_priorities(late.index, np.full(len(late.reward), 50.0))
    share, _ = frequencies(replay, sorted(seen), items=10_000)
    ratio = share.max() / share.min()
    assert ratio < 3, f"some steps are sampled {ratio:.0f} times as often as others"


def sums_do_not_drift(make):
    """After a million updates of priorities, only stored steps are sampled, and by their
    priorities. (instadeepai/flashbax#52)"""
    options = Options(capacity=1_000, kind="prioritized", autoreset="same_step", batch_size=256)
    replay, envs = filled(make, 700, options, lengths=(10_000, 10_000))
    random, last = np.random.default_rng(0), {}
    places = envs.all_steps()
    for _ in range(int(os.environ.get("CONFORMANCE_UPDATES", 1_000_000)) // 256):
        batch = replay.sample()
        numbers = np.asarray(batch.obs)[:, 0].astype(int)
        wrong = [n for n in numbers.tolist() if n not in places]
        assert not wrong, f"never written, and sampled: {wrong[:3]}"
        if batch.probability is not None:
            assert (np.asarray(batch.probability) > 0).all(), "a probability of 0 was sampled"
        of_number = np.exp(random.normal(size=700))  # equal items get equal priorities
        replay.update_priorities(batch.index, of_number[np.minimum(numbers, 699)])
        last |= {n: of_number[min(n, 699)] for n in numbers.tolist()}
    batch = replay.sample()
    if batch.probability is None:
        return
    # exact by enumeration: of steps that were all updated
    numbers, got = (
        np.asarray(batch.obs)[:, 0].astype(int),
        np.asarray(batch.probability, np.float64),
    )
    if len(last) == len(places) - 1 or len(last) == len(places):
        law = np.array([last[n] for n in numbers])
        np.testing.assert_allclose(got / got[0], law / law[0], rtol=5e-3)


def sequences_stay_in_episodes(make):
    """Steps of a sequence that count follow each other, or `is_first` says where one begins."""
    options = Options(capacity=300, kind="sequences", num_envs=2, autoreset="same_step")
    replay, envs = filled(make, 80, options, lengths=(3, 9), terminations=0.5)
    places, crossings = envs.all_steps(), 0
    for _ in range(60):
        batch = replay.sample()
        obs = np.asarray(batch.obs)[:, :, 0].astype(int)
        reward, action = np.asarray(batch.reward), np.asarray(batch.action)
        length = reward.shape[1]
        mask = np.ones(reward.shape, bool) if batch.mask is None else np.asarray(batch.mask)
        for row in range(len(reward)):
            for t in np.flatnonzero(mask[row]):
                number = int(obs[row, t])
                assert number in places, f"{number} is no step: {obs[row]}, {mask[row]}"
                assert reward[row, t] == reward_of(number)
                assert action[row, t] == action_of(number)
                if t and mask[row, t - 1] and obs[row, t] != obs[row, t - 1] + 1:
                    crossings += 1
                    said = batch.is_first is not None and batch.is_first[row, t]
                    assert said, f"an episode begins within {obs[row]}, and nothing says so"
                if obs.shape[1] > length and t == length - 1:
                    assert obs[row, t + 1] == number + 1, f"after {number} comes {obs[row, t + 1]}"


def recurrent_states_belong_to_the_first_step(make):
    """The state that comes with a sequence was stored with its first step."""
    options = Options(capacity=300, kind="sequences", num_envs=2, burn_in=2)
    replay, envs = filled(make, 80, options, lengths=(5, 9))
    batch = replay.sample()
    if batch.state is None:
        raise NotOffered
    for _ in range(20):
        batch = replay.sample()
        first = np.asarray(batch.obs)[:, 0, 0].astype(int)
        is_step = np.array([number in envs.all_steps() for number in first.tolist()])
        starts = np.asarray(batch.mask)[:, 0] | (first > 0) if batch.mask is not None else is_step
        chosen = is_step & starts
        np.testing.assert_array_equal(
            np.asarray(batch.state).reshape(len(first), -1)[chosen, 0], first[chosen]
        )


def goals_are_of_the_same_episode(make):
    """A hindsight goal was achieved later in the item's own episode, and the reward is that of the
    goal."""
    options = Options(capacity=400, kind="goals", num_envs=1)
    replay, envs = filled(make, 120, options, lengths=(4, 9))
    places, relabelled = envs.all_steps(), 0
    for _ in range(40):
        batch = replay.sample()
        numbers = np.asarray(batch.obs).reshape(len(batch.reward), -1)[:, 0].astype(int)
        goals = np.asarray(batch.goal).reshape(len(numbers), -1)[:, 0].astype(int)
        for number, goal, reward in zip(
            numbers.tolist(), goals.tolist(), batch.reward, strict=True
        ):
            env, n = places[number]
            episode = [s.number for s in envs.steps[env] if s.episode == envs.steps[env][n].episode]
            if goal < 0:  # the goal that the env had
                continue
            relabelled += 1
            assert number < goal <= episode[-1] + 1, (
                f"goal {goal} of step {number}, whose episode is {episode}"
            )
            assert reward == (0.0 if goal == number + 1 else -1.0), (
                f"reward {reward} for goal {goal} at {number}"
            )
    assert relabelled > 100


def observations_keep_their_dtypes(make):
    """A dict of an image uint8, a vector float32 and a number int32 comes back with its dtypes and
    bits. (google/brax: one dtype for all, four times the bytes)"""
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
    options = Options(capacity=100, num_envs=2, obs=obs)
    replay = make(options)
    random, rows = np.random.default_rng(0), []

    def some():
        return {
            name: np.asarray(
                random.integers(0, 2 if leaf.dtype == bool else 200, (2, *leaf.shape))
            ).astype(leaf.dtype)
            for name, leaf in ((name, np.asarray(leaf)) for name, leaf in obs.items())
        }

    before, no = some(), np.zeros(2, bool)
    for t in range(30):
        after = some()
        number = np.int32([2 * t, 2 * t + 1])
        replay.add(Turn(before, number, number.astype(np.float32), no, no, after, after, no))
        rows += [
            ({k: v[e] for k, v in before.items()}, {k: v[e] for k, v in after.items()})
            for e in (0, 1)
        ]
        before = after
    batch = replay.sample()
    for item, action in enumerate(np.asarray(batch.action).reshape(-1).astype(int)):
        for got, expected in zip((batch.obs, batch.next_obs), rows[action], strict=True):
            for name in expected:
                leaf = np.asarray(got[name][item])
                assert leaf.dtype == expected[name].dtype, (
                    f"{name}: {leaf.dtype}, stored {expected[name].dtype}"
                )
                np.testing.assert_array_equal(leaf.reshape(expected[name].shape), expected[name])


def observations_are_stored_once(make):
    """A row of 10,000 bytes takes less than 15,000: `next_obs` is the next row's observation, and
    still the true final one at an end."""
    options = Options(capacity=1_000, num_envs=1, obs=np.zeros(10_000, np.uint8))
    replay = make(options)
    Stream(options).fill(replay, 3)
    each = replay.nbytes() / options.capacity
    assert each < 15_000, f"{each:,.0f} bytes a row of 10,000"


def an_add_costs_no_copy(make):
    """The time of an add does not grow with the capacity: 1 million rows take at most 10 times that
    of a thousand. A copy of all rows takes hundreds of times.

    (instadeepai/flashbax#6, instadeepai/flashbax#17)"""

    def seconds(capacity):
        options = Options(capacity=capacity, obs=np.zeros(32, np.float32))
        replay, envs = filled(make, 70, options, lengths=(50, 50))
        turns = [envs.turn() for _ in range(100)]
        replay.sample()
        before = time.process_time()
        for turn in turns:
            replay.add(turn)
        replay.sample()
        return time.process_time() - before

    ratio = min(seconds(1_000_000) for _ in range(3)) / min(seconds(1_000) for _ in range(3))
    assert ratio < 10, f"{ratio:.0f} times"


def _saved(make, folder, **changes):
    options = Options(**{"capacity": 60, "num_envs": 2, "autoreset": "same_step"} | changes)
    replay, envs = filled(make, 50, options, lengths=(3, 9), terminations=0.5)
    replay.save(str(folder / "save"))
    return replay, envs, options


def a_resume_is_identical(make):
    """After a load, the same steps and the same seed give the same batches to the last bit, as
    without the interruption: contents, episodes that go on, priorities and the largest one.

    (instadeepai/flashbax#46; google/dopamine: the largest priority is lost)"""
    for kind in ("uniform", "prioritized"):
        with tempfile.TemporaryDirectory() as folder:
            try:
                replay, envs, options = _saved(make, pathlib.Path(folder), kind=kind)
                if kind == "prioritized":
                    batch = replay.sample()
                    replay.update_priorities(batch.index, 2.0 + np.arange(len(batch.reward)) % 5)
                    replay.save(str(pathlib.Path(folder) / "save"))
            except NotOffered:
                if kind == "uniform":
                    raise
                return
            other = make(options)
            other.load(str(pathlib.Path(folder) / "save"))
            more = [envs.turn() for _ in range(20)]
            found = []
            for one in (replay, other):
                for turn in more:
                    one.add(turn)
                with contextlib.suppress(NotOffered):  # the seed of `Options` does it
                    one.seed(7)
                found.append([one.sample() for _ in range(3)])
            for a, b in zip(*found, strict=True):
                for name in ("obs", "action", "reward", "discount", "next_obs", "weight"):
                    mine, his = getattr(a, name), getattr(b, name)
                    assert (mine is None) == (his is None)
                    if mine is not None:
                        np.testing.assert_array_equal(
                            np.asarray(mine), np.asarray(his), f"{kind}: {name}"
                        )
            envs.check(found[1][0])


def a_save_restores_to_another_size(make):
    """A save loads into a replay of more capacity, or of other n-step targets; the rows are the
    same, and further steps follow them."""
    for changes in ({"capacity": 200}, {"n_step": 3}):
        with tempfile.TemporaryDirectory() as folder:
            _, envs, options = _saved(make, pathlib.Path(folder))
            envs.options = options = dataclasses.replace(options, **changes)
            other = make(options)
            try:
                other.load(str(pathlib.Path(folder) / "save"))
            except Exception as error:  # any refusal says that this is not offered
                raise NotOffered(str(error)) from error
            before = sampled(other, envs)
            assert len(before) > 30, f"{changes}: {len(before)} steps of about 50 are left"
            envs.fill(other, 20)
            assert sampled(other, envs) - before, f"{changes}: new steps are not sampled"


def _finished(child, timeout):
    """Return what a child printed; it is killed if it hangs."""
    try:
        return child.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        child.kill()
        raise


def _child(make, action, path, **more):
    source = sys.modules[make.__module__].__file__
    command = [sys.executable, str(HERE / "child.py"), source, make.__name__, action, str(path)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **more
    )


def a_save_needs_little_memory(make):
    """A save of 400 MB takes less than 200 MB on top: runs die where it doubles what they hold.

    (google/orbax#1640)"""
    with tempfile.TemporaryDirectory() as folder, _child(make, "memory", folder) as child:
        out = _finished(child, 300)
        if child.returncode == 3:
            raise NotOffered
        assert child.returncode == 0, f"exit status {child.returncode}"
        held, more = map(float, out.split()[-2:])
        assert more < held / 2, f"{more:.0f} MB more, to save {held:.0f} MB"


def a_kill_in_a_save_leaves_one(make):
    """Killed at any moment of a save, a run resumes from this save or from the one before."""
    for attempt in range(12):
        with tempfile.TemporaryDirectory() as folder:
            with _child(make, "saves", folder) as child:
                if child.stdout.readline().strip() != "first":  # one save is complete
                    _finished(child, 120)
                    raise NotOffered if child.returncode == 3 else AssertionError("no first save")
                time.sleep(0.01 + 0.04 * attempt)
                child.send_signal(signal.SIGKILL)
                child.communicate()
            with _child(make, "loads", folder) as child:
                said = _finished(child, 120).split()
                when = f"killed {0.01 + 0.04 * attempt:.2f} s after the first save"
                assert child.returncode == 0, f"{when}: what is loaded is wrong, or nothing loads"
                assert said[-1:] == ["right"], f"{when}: loaded {said[-1:]}"


def adds_and_samples_of_two_threads(make):
    """One thread adds while another samples: no item is torn."""
    if not make.is_threadsafe:
        raise NotOffered
    options = Options(capacity=64, num_envs=2, autoreset="same_step")
    replay, envs = filled(make, 40, options, lengths=(3, 9))
    turns = [envs.turn() for _ in range(400)]
    failures = []

    def add():
        try:
            for turn in turns:
                replay.add(turn)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=add)
    thread.start()
    places, batches = envs.all_steps(), []
    while thread.is_alive():
        batches.append(replay.sample())
    thread.join()
    assert not failures, failures
    # an item's steps had all been added when it was sampled, so that whole windows are known now
    for batch in batches[:200]:
        envs.check(batch, places)


ALL = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and not name.startswith("_")
    and value.__code__.co_varnames[:1] == ("make",)
    and value.__code__.co_argcount == 1
}
