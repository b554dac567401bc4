"""Actors in threads and in processes: their rows are an oracle's, whoever is killed; who is ahead
waits; and errors reach the learner."""

import contextlib
import itertools
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.actors.actor import Setup, heard
from jaxreplay.actors.actors import Offer
from jaxreplay.actors.block import ActorBlock, Line, News, joined
from jaxreplay.actors.outbox import Ask, Outbox
from jaxreplay.actors.threads import Threads
from jaxreplay.stateful.actor_host import ActorHost
from tests.conftest import ALL, SOAK, thorough
from tests.support import acting
from tests.support.interrupting import check_each_moment
from tests.support.refusals import check_table, refused

LONG = 1600.0 if SOAK else 400.0  # seconds, on a machine that has much else to do
ROOT = pathlib.Path(__file__).parent.parent.parent

on_ray = thorough("ray")


@pytest.fixture(scope="module")
def cluster():
    """Start Ray on this machine; return its address."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks, which Ray's threads do not mind
        ray = pytest.importorskip("ray")
        try:
            context = ray.init(
                num_cpus=8,
                include_dashboard=False,
                object_store_memory=200 * 2**20,
                log_to_driver=False,
                logging_level="ERROR",
            )
        except Exception as error:
            pytest.skip(f"Ray does not start on this machine: {error}")
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(params=["threads", on_ray])
def on(request):
    """Where the actors run."""
    if request.param == "ray":
        request.getfixturevalue("cluster")
        return jr.actors.ray(num_cpus=0.05)
    return {"threads": Threads, "local": None}[request.param]


def make(num_envs=4, length=8192, framework="numpy", example=None, limit=None, **options):
    given = {"batch_size": 64, "autoreset": "next_step", "allow_mask": True} | options
    kind = jr.items if given["autoreset"] is None else jr.uniform
    given = {name: value for name, value in given.items() if value is not None}
    buffer = kind(capacity=num_envs * length, num_envs=num_envs, **given)
    return jr.Replay(
        buffer, framework=framework, timeout=LONG, example=example, samples_per_insert=limit
    )


def until(is_so):
    end = time.monotonic() + LONG
    while not is_so():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("on", "length"),
    [
        ("threads", 64),
        ("local", 32768 if SOAK else 8192),
        thorough("local", 64),
        thorough("ray", 64),
        thorough("ray", 32768),
    ],
    indirect=["on"],
)
def test_rows_are_an_oracles_though_actors_are_killed(on, length):
    """In a ring that wraps, and in one that holds all rows."""
    num_actors, num_envs, steps = (64, 64, 1_000_000) if SOAK else (2, 4, 4_000)
    kills, is_whole = 200 if SOAK else 2 * num_actors if ALL else 2, length > 64
    act = acting.dying if on is Threads else acting.mortal
    if on is None and not ALL:
        num_actors = kills = 1  # a process takes seconds to start
    with make(num_envs, length=length, limit=0.025 if SOAK else 1.0) as replay:
        actors = replay.start(act, num_actors, block_length=8, max_restarts=4, on=on)
        until(replay.can_sample)
        while (
            actors.metrics()["steps"] < steps
            or actors.metrics()["lost"] < kills
            or (is_whole and acting.check_rows(replay, num_envs)[1] <= num_envs)
        ):
            acting.check_transitions(replay.sample())
            time.sleep(0 if SOAK else 0.01)
        figures = actors.metrics()
        assert figures["restarts"] == figures["lost"]
        assert figures["dropped_blocks"] == 0 or on is not None  # lost with the owner of an object
        actors.stop()
        num_rows, _ = acting.check_rows(replay, num_envs)
        assert not is_whole or num_rows == actors.metrics()["steps"]


def test_an_iteration_ends_when_the_actors_are_done(on):
    with make(limit=8.0) as replay:
        actors = replay.start(acting.few, 2, on=on, block_length=8)
        batches = list(replay)
        assert actors.metrics()["steps"] == 84
        assert actors.metrics()["alive"] == 0
        assert acting.check_rows(replay, 4) == (84, 4)
        assert abs(64 * len(batches) - 8 * 84) <= 8 * 4 * 8 + 64
        with refused("all actors are done: inserts lag behind", TimeoutError):
            replay.sample()
        with refused("call their stop", RuntimeError):
            replay.start(acting.few, 2)
        actors.stop()
        replay.start(acting.few, 2, on=on, block_length=8)  # it continues, after a cut
        for batch in replay:
            acting.check_transitions(batch)
        assert acting.check_rows(replay, 4) == (168, 8)


def with_demos(length):
    of = {"num_envs": 3, "batch_size": 64, "autoreset": "next_step", "allow_mask": True}
    demos, online = jr.uniform(capacity=3 * length, **of), jr.uniform(capacity=6144, **of)
    return jr.Replay(jr.mix(demos=(demos, 64), online=(online, 64)), framework="numpy")


@pytest.mark.parametrize("length", [16, 256])
def test_a_member_gets_the_steps_of_a_human_too(on, length):
    """Each once and in order, also in a ring that wraps; no window there goes over a step that it
    did not get. The last transition before that is given up."""
    with with_demos(length) as replay:
        actors = replay.start(acting.assisted, 3, on=on, member="online", block_length=8)
        until(lambda: actors.is_done)
        online = types.SimpleNamespace(state=replay.state["online"])
        assert acting.check_rows(online, 3) == (600, 3)
        taken = [(e, t) for e in range(3) for t in range(200) if acting.helped(e, t)]
        resets = {(e, t) for e, t in taken if t and acting.ends(e, t - 1)}
        # a step that only resets is none if the one before is missing
        its = [one for one in taken if one not in resets or (one[0], one[1] - 1) in taken]
        its = [of for e in range(3) for of in [one for one in its if one[0] == e][-length:]]
        rows, counters = replay.state["demos"].rows, replay.state["demos"].counters
        is_filled = np.arange(length) < np.asarray(counters.filled)[:, None]
        obs = np.asarray(rows.steps.obs).reshape(3, length, 3)[is_filled]
        assert sorted((int(e), int(t)) for e, _, t in obs) == its
        found = set()
        for _ in range(60):
            batch = replay.sample()
            acting.check_transitions(batch)
            found |= {(int(e), int(t)) for e, _, t in batch.experience.obs[batch.source == 0]}
    assert found == {(e, t) for e, t in its if (e, t + 1) in taken or acting.ends(e, t)} - resets


def test_a_member_with_actors_of_its_own_gets_no_steps_of_others(on):
    """They would be of the same envs."""
    with with_demos(256) as replay:
        replay.start(acting.endless, 3, on=on, member="demos", block_length=8)
        replay.start(acting.assisted, 3, on=on, member="online", block_length=8)
        with refused("members: 'demos' has actors of its own", RuntimeError):
            while True:
                replay.sample(timeout=LONG)


def test_no_window_of_a_member_goes_over_a_lost_block(on):
    with with_demos(1024) as replay:
        actors = replay.start(acting.careless, 3, on=on, member="online", block_length=8)
        until(lambda: actors.is_done)
        assert actors.metrics()["lost"] == 9
        for _ in range(40):
            acting.check_transitions(replay.sample())


def test_what_actors_log_is_counted(on):
    """Episodes, too: of the steps that were taken, without those that only reset."""
    lengths, returns = [], []
    for env in range(4):
        sums, resets = np.zeros(2), False
        for now in range(21):
            if env - env // 2 * 2 == now - now // 5 * 5:
                continue
            is_end = acting.ends(env, now)
            sums += 0 if resets else (1, now)
            if is_end and not resets:
                lengths.append(sums[0])
                returns.append(sums[1])
                sums = np.zeros(2)
            resets = is_end
    with make() as replay:
        actors = replay.start(acting.logging, 2, on=on, block_length=8)
        until(lambda: actors.is_done)
        log = actors.metrics()["log"]
        assert log["episode_return"] == {0: (np.mean(returns), len(returns))}
        assert log["episode_length"] == {0: (np.mean(lengths), len(lengths))}
        assert log["index"] == {0: (0.5, 42)}
        assert log["time"] == {0: (10, 42)}


def test_a_wrong_autoreset_is_noticed():
    """The warning is an error in tests, and reaches the learner as one."""
    with make() as replay:
        replay.start(acting.resetting, 2, on=Threads, block_length=8)
        with refused('actor.add: autoreset="next_step" looks wrong', RuntimeError):
            for _ in replay:
                pass


def test_a_failure_reaches_the_learner(on):
    with make() as replay:
        actors = replay.start(acting.failing, 2, on=on, max_restarts=1)
        with refused("the env of actor [01] broke, in incarnation 1", RuntimeError):
            for _ in replay:
                pass
        assert actors.metrics()["restarts"] >= 1
        with refused("publish: the actors are stopped", RuntimeError):
            actors.publish(1)
        with refused("actor [01] failed: Traceback", RuntimeError):
            replay.add(acting.step_of(_Envs(), 0))
    with refused("this Replay is closed", RuntimeError):
        replay.start(acting.few, 2, on=on)


@pytest.mark.no_xla
def test_actors_that_failed_are_stopped_or_replaced():
    replay = make()
    feed = jr.actors.Feed(replay.buffer, jr.Step(**acting.EXAMPLE))
    for start, read in ((replay.start, replay.sample), (feed.start, feed.take)):
        engines = [Engine(News(0, number, "lost", "it broke")) for number in range(3)]
        for number, engine in enumerate(engines):
            actors = start(acting.few, 2, on=engine.on, max_restarts=0)
            assert engine.incarnations == [number] * 2  # each with another seed
            assert [one.num_stops for one in engines[:number]] == [1] * number
            until(lambda actors=actors: actors.is_stopped)
            with refused("the actors have stopped: actor 0 failed: it broke", RuntimeError):
                read()
            assert actors.metrics()["lost"] == 1
        actors.stop()
    assert not feed.take()[1].any()
    replay.clear()
    with refused("no batch can be sampled yet", TimeoutError):
        replay.sample(timeout=0)


@pytest.mark.parametrize(
    "on",
    [
        "threads",
        on_ray,
    ],
    indirect=True,
)
def test_an_actor_reads_each_version_once(on, monkeypatch):
    monkeypatch.setattr(acting.Read, "num", 0)
    buffer = jr.items(capacity=64, num_envs=2, batch_size=4, allow_mask=True)
    with jr.Replay(buffer, framework="numpy", timeout=LONG) as replay:
        actors = replay.start(acting.counting, 1, params=acting.Read(), block_length=4, on=on)
        until(lambda: actors.is_done)
        assert set(replay.get(np.r_[:24]).experience["seen"]) == {1}


@pytest.mark.thorough
def test_a_learner_that_was_replaced_leaves_its_successors_actors(cluster):
    on = jr.actors.ray(name="successor", num_cpus=0.05)
    with make() as second:
        with make() as first:
            first.start(acting.endless, 2, block_length=8, on=on)
            until(first.can_sample)
            actors = second.start(acting.endless, 2, block_length=8, on=on)
            until(second.can_sample)
        with make() as third, refused("actors of the name 'successor' with other settings"):
            third.start(acting.endless, 2, block_length=16, on=on)
        steps = actors.metrics()["steps"]
        until(lambda: actors.is_stopped or actors.metrics()["steps"] > steps + 1_000)
        assert actors.error is None


@pytest.mark.no_xla
@pytest.mark.parametrize("max_staleness", [None, 1])
def test_an_actor_that_hangs_does_not_hold_up_the_others(monkeypatch, max_staleness):
    """Actor 1 sends nothing, though each look of the learner takes a second."""
    seconds, sent = itertools.count(), []
    clock = types.SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr(jr.actors.actors, "time", clock)

    class Host:
        lock = contextlib.nullcontext()
        lead = staticmethod(lambda steps: 3 * (steps == 16))
        progress = staticmethod(lambda: (0.0, 1.0, False))
        changed = staticmethod(lambda: None)

        @staticmethod
        def insert(offer, timeout):
            offer.cut()
            offer.note()
            return True

    class Hanging(Engine):
        num_ended = 0

        def ask(self, index, number, *_):
            if index == 0:
                sent.append(number)
                steps = np.zeros((8, 1)), np.ones((8, 1), bool), None
                self.found.append(ActorBlock(0, (0, number), steps))

        def end(self, index):
            self.num_ended += index

    setup = Setup(2, 1, 8, 0, None, None, True, None, None)
    engine = Hanging(News(0, 0, "ready"), News(1, 0, "ready"))
    actors = jr.actors.Actors(
        acting.few, setup, Host(), 8.0, on=engine.on, max_staleness=max_staleness
    )
    while next(seconds) < 20_000 and len(sent) < 200:
        if actors.metrics()["steps"] >= 8 * actors.version:  # each version takes a block
            actors.publish(0)
    actors.stop()
    assert len(sent) >= 200
    assert engine.num_ended == actors.metrics()["hung"] == 1


class _Envs:
    envs = range(4)
    incarnation = 0


def test_versions_are_stamped_and_bound_the_staleness(on):
    """The learner takes 16 steps for each version, and each block has 4."""
    buffer = jr.items(
        capacity=128,
        num_envs=2,
        batch_size=16,
        min_size=16,
        allow_mask=True,
        sampler=jr.Queue(),
    )
    for max_staleness, most in ((0, 0), (2, 3)):  # samples may be a batch ahead of inserts
        replay = jr.Replay(buffer, framework="numpy", samples_per_insert=1.0, timeout=LONG)
        with replay:
            actors = replay.start(
                acting.following,
                2,
                on=on,
                params=0,
                block_length=4,
                max_staleness=max_staleness,
                version_key="version",
            )
            for version in range(1, 30):
                item = replay.sample().experience
                assert (item["seen"] == item["version"]).all()
                assert (version - 1 - item["version"] <= most).all()
                assert actors.publish(version) == version
            assert actors.metrics()["largest_staleness"] <= most
            assert actors.metrics()["version"] == 29


@pytest.mark.no_xla
def test_as_many_blocks_are_under_way_as_two_versions_take():
    """Versions took 20 steps on average, 44 were added, and a block has four."""
    line = Line(0, is_alive=True)
    host = types.SimpleNamespace(progress=lambda: (0.0, missing, may_fill))
    inbox = types.SimpleNamespace(lines=[line])
    actors = types.SimpleNamespace(_block=4, _host=host, _inbox=inbox, _figures={"steps": 44})
    actors._base, actors._taken, actors._default, actors._max_staleness = 40.0, [0, 30, 40], 8.0, 1
    missing, may_fill = 50.0, False
    most = lambda is_idle: jr.actors.Actors._most_blocks(actors, is_idle)
    assert (most(False), most(True)) == (9, 13)
    line.asked, line.bases = 2, (10.0, 20.0, 30.0)
    assert most(False) == 4
    may_fill = True
    assert (most(False), most(True)) == (10, 13)
    actors._taken, missing, may_fill = [40], 0.0, False
    assert most(False) == -2
    actors._max_staleness = None
    assert most(True) == np.inf


@pytest.mark.parametrize("ratio", [0.25, 8.0])
def test_the_side_that_is_ahead_waits(ratio, on):
    with make(limit=ratio) as replay:
        actors = replay.start(acting.endless, 2, on=on, block_length=8)
        steps = lambda: actors.metrics()["steps"]
        until(replay.can_sample)
        start, num, end = steps(), 0, time.monotonic() + 60 * SOAK
        while num < (40 if ratio < 1 else 200) * 64 or time.monotonic() < end:
            replay.sample()
            num += 64

        def is_still():
            before = steps()
            time.sleep(0.2)
            return steps() == before

        until(is_still)  # the learner stops: so do the actors
        most = 0.02 * num * SOAK + 64 + ratio * 4 * 8 * 3
        assert abs(num - ratio * (steps() - start)) <= most


def test_the_others_are_taken_too(on):
    """One env, tensors, agents; and masks, priorities and versions of a mixture's member."""
    with make(1, framework="torch") as replay:
        actors = replay.start(acting.single, 1, on=on)
        until(lambda: actors.is_done)
        batch = replay.sample()
        assert batch.experience.obs.dtype.is_floating_point
        assert batch.experience.reward.max() == 13  # the next one resets
    online, offline = (
        jr.items(capacity=64, num_envs=2, batch_size=4, allow_mask=True, sampler=jr.Prioritized())
        for _ in range(2)
    )
    with jr.Replay(jr.mix(online=(online, 4), offline=(offline, 4)), framework="numpy") as replay:
        given = {"version_key": "version", "member": "online", "params": 3}
        actors = replay.start(acting.items, 1, on=on, block_length=2, **given)
        until(lambda: actors.is_done)
        times = [[t for t in range(24) if t % 4 != env or t // 6 % 2] for env in range(2)]
        rows = np.r_[: len(times[0]), 32 : 32 + len(times[1])]
        for member, priority in (("online", 2), ("offline", 1)):
            found = replay.get(rows, member=member).experience
            assert found["time"].tolist() == [*times[0], *times[1]]
            assert not found["version"].any()
            assert replay.metrics()[f"{member}/max_priority"] == priority
        assert actors.metrics()["steps"] == len(rows)
    flags = {name: np.zeros(2, bool) for name in ("terminated", "truncated")}
    feed = jr.actors.Feed(make(num_agents=2).buffer, acting.EXAMPLE | flags, block_length=8)
    actors = feed.start(acting.team, 1, on=on)
    for number in range(5):
        steps, mask, ends = feed.take(LONG)
        times = 8 * number + np.arange(8)[:, None]
        assert mask.all()
        assert (steps.reward == times).all()
        assert (steps.terminated == acting.ends_of_team(np.arange(4), times)).all()
        assert ends.tolist() == 4 * [number == 0]
    actors.stop()


class Granting(Outbox):
    """Grants a block to an actor that waits for it. Keeps number, times and `resets` of blocks,
    each of which was granted first."""

    def __init__(self, setup):
        super().__init__()
        self.blocks, self.setup = [], setup

    def begin(self, number):
        self.hear(Ask("", number, number))
        super().begin(number)

    def put(self, number, *of):
        assert number < self.asked
        block = heard(self.setup, 0, 0, "block", number, *of)
        times = block.steps[0].reward[:, 0].astype(int).tolist()
        self.blocks.append((number, times, block.resets))


def actor_of(setup, incarnation=0):
    outbox = Granting(setup)
    return jr.actors.Actor(0, incarnation, setup, outbox), outbox


@pytest.mark.no_xla
def test_an_env_resets_once_all_of_its_agents_have_ended():
    actor, link = actor_of(Setup(1, 2, 2, 0, "next_step", 2, True, None, None))
    for number in range(8):
        flags = acting.ends_of_team(np.arange(2), number)
        actor.add(acting.step_of(actor, number, terminated=flags, truncated=flags & False))
    resets = [one.tolist() for *_, one in link.blocks]
    assert resets == [[False, False]] * 3 + [[False, True]]


def test_an_actor_takes_arrays_of_any_kind():
    actor, _ = actor_of(Setup(1, 2, 3, 0, "next_step", None, True, None, None))
    for number, kind in enumerate((jnp.asarray, np.asarray, jnp.asarray)):
        actor.add(jax.tree.map(kind, acting.step_of(actor, number)))
    assert actor._steps.reward.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert actor._steps.obs[:, 1].tolist() == [[1, 0, number] for number in range(3)]


@pytest.mark.no_xla
def test_each_incarnation_has_a_seed_of_its_own():
    setups = [Setup(1, 1, 2, seed, "next_step", None, True, None, None) for seed in range(2)]
    seeds = {actor_of(*of)[0].seed for of in itertools.product(setups, range(3))}
    assert len(seeds) == 6


@pytest.mark.no_xla
def test_an_interrupt_of_an_actor_at_any_line_repeats_no_step():
    """The interrupted step is added or not; if its block is lost, that is a gap, and the next block
    still knows which envs are to reset."""
    setup = Setup(1, 2, 3, 0, "next_step", None, True, acting.EXAMPLE, None)

    def make_call():
        actor, link = actor_of(setup)
        add = lambda times: [actor.add(acting.step_of(actor, time)) for time in times]
        add(range(5))

        def check():
            add(range(7, 12))
            actor.flush()
            added = [time for _, times, _ in link.blocks for time in times]
            assert added == sorted({*added})
            assert {*range(3), *range(7, 12)} <= {*added}
            for (before, earlier, _), (number, _, resets) in itertools.pairwise(link.blocks):
                last = earlier[-1] if before == number - 1 else 5  # the lost one ended with it
                ended = acting.ends(np.arange(2), last)
                assert (np.zeros(2) if resets is None else resets).tolist() == ended.tolist()

        return lambda: add([5, 6]), check

    within = lambda frame: frame.f_code.co_filename == jr.actors.actor.__file__
    check_each_moment(make_call, least=50, every=1, counts=within)


def test_actors_go_on_after_a_load(tmp_path):
    """A load of rows that other actors have added, and one of their own."""
    with make(limit=4.0) as replay:
        replay.start(acting.endless, 2, on=Threads, block_length=8)
        for number, _ in enumerate(replay):
            if number == 20:
                break
        replay.save(tmp_path)
    with make(limit=4.0, example=acting.EXAMPLE) as replay:
        actors = replay.start(acting.endless, 2, on=Threads, block_length=8)
        replay.load(tmp_path)
        for number, batch in enumerate(replay):
            acting.check_transitions(batch)
            if number == 20:
                replay.save(tmp_path)
            if number == 40:
                replay.load(tmp_path)
            if number == 60:
                break
        assert actors.metrics()["dropped_blocks"] == 0


def test_a_buffer_is_filled_before_the_first_sample():
    """A block has more steps than the versions that are allowed, and nobody waits in `sample`."""
    with make() as replay:
        replay.start(acting.endless, 2, on=Threads, max_staleness=0)
        until(lambda: len(replay) > 600)
    with make(limit=1.0) as replay:
        replay.start(acting.endless, 2, on=Threads, max_staleness=0)
        for _ in range(10):
            until(replay.can_sample)
            replay.sample()


def test_an_iteration_ends_when_the_replay_is_closed():
    replay = make(limit=1.0)
    threading.Timer(0.2, replay.close).start()
    assert list(replay) == []


def test_an_interrupt_of_a_stop_leaves_nothing(monkeypatch):
    replay = make()
    actors = replay.start(acting.stubborn, 2)
    until(replay.can_sample)
    processes = [one.process.pid for _, one in actors._engine._of.values()]
    interrupts = iter([KeyboardInterrupt])

    def join(process, seconds=None):
        for error in interrupts:
            raise error
        process._popen.wait(seconds)

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "join", join)
    with pytest.raises(KeyboardInterrupt):
        replay.close()
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    replay.close()


BAD = {
    "start(lambda actor: None, 2)": "start: act cannot be sent to another process",
    "start(few, 3)": "4 envs cannot be divided among num_actors=3",
    "start(few, 0)": "num_actors must be",
    "start(few, 2, block_length=0)": "block_length must be",
    "start(few, 2, max_staleness=-1)": "max_staleness must be an int of at least 0",
    "start(few, 2, max_restarts=-1)": "max_restarts must be an int of at least 0",
    "start(few, 2, seed=-1)": "seed must be an int of at least 0",
    "start(few, 2, block_timeout=-1)": "block_timeout must be a number of seconds",
    "start(few, 2, member='x')": "member='x', but this Replay has one buffer",
    "start(ends, 2)": "act must accept the call",
    "start(few, 2, params=lambda: 0)": "start: the parameters cannot be pickled",
}


def test_wrong_arguments_and_steps_are_refused():
    example = acting.EXAMPLE
    with make(example=example) as replay:
        replay.start(acting.misshapen, 1, on=Threads, max_restarts=0)
        with refused(r"obs: got int32\[4, 4\], expected int32\[4, 3\]", RuntimeError):
            replay.sample()
    with make() as replay:
        check_table(BAD, {"start": replay.start, "few": acting.few, "ends": acting.ends})
        assert replay._actors == {}
        replay.start(acting.bad_extras, 1, on=Threads, max_restarts=0, version_key="version")
        with refused("version_key='version' needs extras that are a dict", RuntimeError):
            replay.sample()
    actor, _ = actor_of(Setup(1, 1, 2, 0, "next_step", None, True, None, None, ("demos",)))
    with refused("but these may get the steps: .'demos',"):
        actor.add(acting.step_of(actor, 0), members="demo")
    with make(allow_mask=False) as replay, refused("make the buffer with allow_mask=True"):
        replay.start(acting.few, 2)


def runs(pid):
    """Return whether a process runs, and is no zombie."""
    command = pathlib.Path("/proc", pid, "cmdline")
    return command.exists() and command.read_bytes() != b""


@pytest.mark.parametrize("on", ["local", on_ray], indirect=True)
def test_a_run_continues_though_its_learner_is_killed(tmp_path, on, request):
    """Actors of this machine begin again; those on Ray go on with the next learner. A process of an
    actor imports the file that was started, but not what that imports as the main one."""
    kills = 20 if SOAK else 1
    given = [] if on is None else [request.getfixturevalue("cluster")]
    command = [sys.executable, "-m", "tests.support.killed_learner", str(tmp_path)]
    for number in range(kills + 1):
        found = subprocess.run(
            [*command, str(number), str(kills), *given],
            capture_output=True,
            text=True,
            timeout=2 * LONG,
        )
        said = found.stdout + found.stderr
        assert found.returncode == (0 if number == kills else -9), said
        if on is None:
            pids = (tmp_path / "actors").read_text().split()
            until(lambda pids=pids: not any(map(runs, pids)))


@pytest.mark.thorough  # of four processes; a run that continues is tested above
def test_the_program_for_users_of_agentlace_runs_and_goes_on(tmp_path):
    """It is that of the docs, with what `serl_program.py` has in place of SERL."""
    page = (ROOT / "docs" / "migrating" / "agentlace.md").read_text()
    cells = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    own = [cell for cell in cells if "def act(" in cell or "def main(" in cell]
    assert len(own) == 2
    program = tmp_path / "program.py"
    around = (ROOT / "tests" / "support" / "serl_program.py").read_text()
    program.write_text("\n\n".join(["import os, jaxreplay as jr", around, *own]))
    command, last = [sys.executable, program, tmp_path / "run"], 0
    for _ in range(2):
        told = subprocess.run(command, capture_output=True, text=True, timeout=LONG, cwd=ROOT)
        assert told.returncode == 0, told.stderr
        first, last_before, last = int(told.stdout.split()[0]), last, int(told.stdout.split()[1])
        assert last_before - 5 <= first <= last_before < last


class Engine:
    """Gives blocks and news to the learner, one at a time."""

    run, num_stops, known = "one", 0, {}
    ask = share = wake = staticmethod(lambda *_: None)

    def __init__(self, *found):
        self.found, self.incarnations = list(found), []

    def on(self, act, setup):
        return self

    def begin(self, index, incarnation):
        self.incarnations.append(incarnation)

    def answers(self, seconds):
        found, self.found = self.found[:1], self.found[1:]
        return found

    def stop(self, seconds):
        self.num_stops += 1


EXAMPLE = jr.Step(**acting.EXAMPLE)


def block(number, mask, resets=False):
    """Return a block of two steps whose obs is ten times its number, and one more."""
    mask = np.array(mask, bool)
    steps = jax.tree.map(lambda leaf: np.zeros((*mask.shape, *leaf.shape), leaf.dtype), EXAMPLE)
    steps.obs[:] = 10 * number + np.arange(2)[:, None, None]
    return ActorBlock(0, (0, number), (steps, mask, None), resets=np.array(resets))


@pytest.mark.no_xla
def test_a_step_that_only_resets_is_no_first_step():
    """Blocks are lost; the step before one has ended an episode, and its env's next step comes in
    that block, or after it. A feed names the envs whose steps were lost, or are the first."""
    engine = Engine(
        block(0, [[1, 1, 1], [1, 1, 1]]),
        block(5, [[0, 1, 0], [1, 1, 0]], [True, False, True]),
        block(6, [[1, 1, 0], [1, 1, 1]], [False, False, True]),
        block(7, [[1, 1, 1], [1, 1, 1]], [True, True, True]),
    )
    feed = jr.actors.Feed(make(3).buffer, EXAMPLE, block_length=2)
    actors = feed.start(acting.few, 1, on=engine.on)
    for version in (1, 2):
        assert actors.publish("newer") == version
    found = [feed.take(LONG) for _ in range(4)]
    assert [(ends.tolist(), mask.tolist()) for _, mask, ends in found] == [
        ([True] * 3, [[True] * 3] * 2),
        ([True] * 3, [[False, True, False], [False, True, False]]),
        ([False] * 3, [[True, True, False], [True, True, False]]),
        ([False] * 3, [[True] * 3] * 2),
    ]
    assert [steps.obs[0, 0, 0] for steps, *_ in found] == [0, 50, 60, 70]
    assert actors.metrics()["staleness"] == actors.metrics()["largest_staleness"] == 2
    actors.stop()


def test_a_feed_fills_a_state_that_its_caller_has():
    buffer = make(length=64).buffer
    feed, buffer = jr.actors.Feed(buffer, EXAMPLE, block_length=8), jr.jit(buffer)
    state = buffer.init(EXAMPLE)
    with refused("take: start actors first", RuntimeError):
        feed.take()
    actors = feed.start(acting.dying, 2, on=Threads, max_restarts=4)
    while actors.metrics()["lost"] < 8 or actors.metrics()["steps"] < 4_000:
        steps, mask, ends = feed.take(LONG)
        state = buffer.extend(buffer.end_streams(state, ends), steps, mask)
    actors.stop()
    acting.check_rows(types.SimpleNamespace(state=state), 4)
    acting.check_transitions(jax.device_get(buffer.sample(state, jax.random.key(0))))


@pytest.mark.parametrize("device", [None, "cpu"])
def test_masked_steps_are_no_rows_on_any_device(device):
    """The first step after a gap only resets: it is left out, wherever the rows lie."""
    every = [[True], [True]]
    engine = Engine(block(1, every, [False]), block(3, every, [True]), block(4, every, [False]))
    with jr.Replay(make(1).buffer, framework="numpy", device=device) as replay:
        actors = replay.start(acting.few, 1, block_length=2, on=engine.on)
        until(lambda: actors.metrics()["steps"] == 5)
        obs = np.asarray(replay.state.rows.steps.obs)[:6, 0]
        assert obs.tolist() == [10, 11, 31, 40, 41, 0]


def test_fewer_blocks_are_asked_for_as_inserts_come_near_their_limit():
    """A sample that lets more be asked for wakes the thread that asks."""
    with make(1, limit=1.0, batch_size=4) as replay:
        for now in range(8):
            replay._limiter.num_inserts = 0
            replay.add(acting.step_of(types.SimpleNamespace(envs=range(1), incarnation=0), now))
        host, limiter, wakes = ActorHost(replay, replay._owner), replay._limiter, []
        assert replay.can_sample()
        for inserts, lead in ((1, 3), (2, 2), (3, 2), (4, 1), (5, 1), (6, 0)):
            limiter.num_inserts = inserts
            assert host.lead(2) == lead
        engine = types.SimpleNamespace(wake=lambda: wakes.append(before))
        actors = types.SimpleNamespace(_host=host, _engine=engine, _block_of_all=2)
        for samples, before in ((0, 0), (1, 0), (1, 1), (4, 1), (4, 2), (6, 3)):
            limiter.num_samples, actors._lead = samples, before
            jr.actors.Actors.look(actors)
        assert wakes == [0, 1]


@pytest.mark.no_xla
@pytest.mark.parametrize(("autoreset", "others"), [("next_step", 0), ("same_step_no_final_obs", 1)])
def test_figures_of_long_blocks_are_exact(autoreset, others):
    """Rewards of few bits are summed in many; one that is no number is of its episode alone."""
    actor, outbox = actor_of(Setup(1, 1, 4096, 0, autoreset, None, False, None, None))
    logged = []
    outbox.put = lambda number, about, memory: logged.append(about[-1])
    for now in range(8192):
        actor.version = now // 4000
        flags = np.full(1, now in (2999, 4050, 7050, 8000))
        reward = np.full(1, np.nan if now == 3500 else 1, np.float16)
        actor.add(acting.step_of(actor, now, terminated=flags, reward=reward))
    found = [{name: number for (_, name), number in one.items()} for one in logged]
    of_two = 2999 + 949 + 2 * others, 2
    assert found[1] == {"episode_return": of_two, "episode_length": of_two}
    assert found[0]["episode_length"] == (3000 + 1050 + others, 2)
    assert np.isnan(found[0]["episode_return"][0])


def test_masked_steps_are_no_lead_over_samples():
    """A block of two steps adds one of them."""
    with make(1, limit=1.0, batch_size=4) as replay:
        replay._limiter.num_inserts = 5
        one, notes = block(0, [[1], [0]]), []
        of, ends = joined([one], 1), np.zeros(1, bool)
        offer = Offer([one], *of, lambda: ends, lambda: notes.append(0))
        assert ActorHost(replay, replay._owner).insert(offer, 0.0)
        assert (replay._limiter.num_inserts, notes) == (6, [0])
