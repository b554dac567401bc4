"""Recent rows: probabilities are geometric in a row's age, and exact over streams of any fill."""

import jax
import numpy as np
import pytest

from jaxreplay.samplers.recent import Recent
from tests.conftest import ALL
from tests.samplers.test_laws import check as check_law
from tests.support.sampling import (
    BATCH_SIZE,
    Model,
    add,
    check_histories,
    configs_of,
    fed,
    make_buffer,
    sample,
    step_of,
)


class RecentModel(Model):
    """Geometric probabilities in the order of time."""

    def probabilities(self):
        found, decay = self.candidates(), self.config.sampler.decay
        mass = {
            self.number(env, index): decay ** sum(e == env and i > index for e, i in found)
            for env, index in found
        }
        return {row: m / sum(mass.values()) for row, m in mass.items()}

    def take(self, seen):
        expected, batch = self.probabilities(), seen["batch"]
        assert batch.is_valid.tolist() == [bool(expected)] * BATCH_SIZE
        if expected:
            right = [expected[row] for row in batch.index.row.tolist()]
            np.testing.assert_allclose(batch.probability, right, rtol=1e-5)

    def after(self, operation):
        pass


CONFIGS = configs_of(Recent(decay=0.9), Recent(decay=0.3), Recent(decay=0.5), Recent(decay=1.0))


@pytest.mark.parametrize("config", CONFIGS if ALL else [CONFIGS[0], CONFIGS[2]])
def test_probabilities_agree_with_a_model_of_lists(config):
    check_histories(config, RecentModel)


def test_a_population_of_buffers_agrees_with_its_models():
    check_histories(CONFIGS[5], RecentModel, together=True)


@pytest.mark.parametrize("decay", [0.2, 0.95] if ALL else [0.95])
def test_draws_follow_the_law(decay):
    """Draw from streams of 0, 3 and 19 rows."""
    buffer, state = make_buffer(Recent(decay=decay), num_envs=3, length=20, allow_mask=True)
    for time in range(33):
        state = add(buffer, state, step_of([1.0] * 3), np.array([False, time < 4, True]))
    flat = np.zeros(60)
    for rows in (list(range(20, 23)), [40 + (13 + k) % 20 for k in range(19)]):
        flat[rows] = decay ** np.arange(len(rows))[::-1]
    flat /= flat.sum()
    batch = jax.device_get(sample(buffer, state, jax.random.key(2), 200_000))
    check_law(np.bincount(batch.index.row, minlength=60), flat)
    np.testing.assert_allclose(batch.probability, flat[batch.index.row], rtol=1e-5)


@pytest.mark.parametrize("decay", [1e-30, 1 - 1e-9])
def test_extreme_decays_are_the_newest_row_and_uniform(decay):
    buffer, state = make_buffer(Recent(decay=decay), num_envs=2)
    batch = jax.device_get(sample(buffer, fed(buffer, state, range(6)), jax.random.key(0), 1000))
    assert batch.is_valid.all()
    newest, all_rows = {4, 12}, {*range(5), *range(8, 13)}
    assert set(batch.index.row.tolist()) == (newest if decay < 0.5 else all_rows)
    np.testing.assert_allclose(batch.probability, 0.5 if decay < 0.5 else 0.1, rtol=1e-5)
