"""Recent rows. Their probabilities are in `storage/test_oracle_streams.py`, the law of the draws in
`test_laws.py`."""

import jax
import numpy as np
import pytest

from jaxreplay.samplers.recent import Recent
from tests.support.sampling import fed, make_buffer, sample


@pytest.mark.parametrize("decay", [1e-30, 1 - 1e-9])
def test_extreme_decays_are_the_newest_row_and_uniform(decay):
    buffer, state = make_buffer(Recent(decay=decay), num_envs=2)
    batch = jax.device_get(sample(buffer, fed(buffer, state, range(6)), jax.random.key(0), 1000))
    assert batch.is_valid.all()
    newest, all_rows = {4, 12}, {*range(5), *range(8, 13)}
    assert set(batch.index.row.tolist()) == (newest if decay < 0.5 else all_rows)
    np.testing.assert_allclose(batch.probability, 0.5 if decay < 0.5 else 0.1, rtol=1e-5)
