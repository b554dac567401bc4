"""Rows whose priority is old: probabilities in proportion to the time since it was set."""

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.samplers import Stale
from jaxreplay.types import Index
from tests.conftest import ALL
from tests.samplers.test_laws import check as check_law
from tests.support.refusals import refused
from tests.support.sampling import (
    ADD,
    BATCH_SIZE,
    CLEAR,
    Model,
    check_histories,
    configs_of,
    fed,
    make_buffer,
    sample,
    update,
)


class StaleModel(Model):
    """The time at which each row was written."""

    def __init__(self, config, start):
        super().__init__(config, start)
        self.now, self.since = 0, {}

    def probabilities(self):
        time = {one: self.now - self.since[one] for one in self.candidates()}
        if not any(time.values()):
            time = dict.fromkeys(time, 1)
        return {self.number(*one): t / sum(time.values()) for one, t in time.items()}

    def take(self, seen):
        rows = {row for row, p in self.probabilities().items() if p > 0}
        assert seen["batch"].is_valid.tolist() == [bool(rows)] * BATCH_SIZE
        assert not rows or rows.issuperset(seen["batch"].index.row.tolist())

    def check(self, seen):
        expected = self.probabilities()
        assert (seen["size"], seen["can_sample"]) == (len(expected), bool(expected))
        found = seen["probability"][list(expected)]
        np.testing.assert_allclose(found, list(expected.values()), rtol=1e-5)

    def after(self, operation):
        if operation == CLEAR:
            self.since = {}
        if operation != ADD:
            return
        rows_of_step, num_envs = 1 + (self.config.autoreset == "same_step"), self.config.num_envs
        for env, stream in enumerate(self.oracle.streams):
            new = [index for index in range(len(stream)) if (env, index) not in self.since]
            for kth, index in enumerate(new):
                self.since[env, index] = self.now + 1 + kth * num_envs + env
        self.now += rows_of_step * num_envs


CONFIGS = configs_of(Stale())[:5]


@pytest.mark.parametrize("config", CONFIGS if ALL else [CONFIGS[0], CONFIGS[2], CONFIGS[4]])
def test_probabilities_agree_with_a_model_of_lists(config):
    check_histories(config, StaleModel)


def test_updates_begin_the_time_anew_and_draws_follow_the_law():
    buffer, state = make_buffer(Stale(), num_envs=2, length=10, batch_size=40_000)
    state = fed(buffer, state, range(8))  # rows 0 to 7 and 10 to 17, of which two wait
    batch = jax.device_get(sample(buffer, state, jax.random.key(0)))
    row = np.array([3, 11, 3, 4, 5, 9], np.int32)  # 9 is not written
    index = Index(row=row, lap=np.array([0, 0, 0, 7, 0, 0], np.uint32))
    priority = np.array([1, 0, 2, 1, np.nan, 1], np.float32)
    updated = update(buffer, state, index, priority)
    for seen, now, changed in ((batch, 16, {}), (None, 22, {3: 19, 11: 18})):
        if seen is None:
            seen = jax.device_get(sample(buffer, updated, jax.random.key(1)))
        time = np.zeros(20)
        for env in range(2):
            for nth in range(7):
                number = 10 * env + nth
                time[number] = now - changed.get(number, 2 * nth + env + 1)
        law = time / time.sum()
        np.testing.assert_allclose(seen.probability, law[seen.index.row], rtol=1e-5)
        check_law(np.bincount(seen.index.row, minlength=20), law)
        assert (seen.weight == 1).all()


@pytest.mark.no_xla
def test_windows_without_an_end_are_refused():
    with refused("Stale: needs a view with a window of fixed length"):
        configs_of(Stale())[5].buffer  # noqa: B018


def test_times_go_to_other_buffers():
    buffer = jr.items(capacity=8, batch_size=1, sampler=Stale())
    wide = jr.items(capacity=16, batch_size=1, sampler=jr.blend(stale=(Stale(), 1)))

    @jax.jit
    def probabilities():
        empty = buffer.init(np.float32(0))
        few = buffer.extend(empty, np.zeros((3, 1), np.float32))  # times 2, 1, 0
        many = buffer.extend(empty, np.zeros((40, 1), np.float32))  # times 7 to 0
        rows = np.arange(16)
        both = wide.merge(wide.adopt(few), many), wide.merge(wide.adopt(many), few)
        return [wide.get(state, rows).probability for state in both]

    for found, times in zip(
        probabilities(),
        ([2, 1, 0, *range(7, -1, -1)], [*range(7, -1, -1), 2, 1, 0]),
        strict=True,
    ):
        np.testing.assert_allclose(found[:11], np.array(times) / 31, rtol=1e-6)
