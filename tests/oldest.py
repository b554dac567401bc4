"""The oldest JAX and NumPy that the package runs with: the README's first program, a `Replay` with
rows on the device, on the host and in files, a save and a restore. What it lacks is said.

`make test` runs it in an environment of `constraints-oldest.txt`. Warnings are errors.
"""

import itertools
import pathlib
import re
import tempfile

import jax
import numpy as np
import pytest

import jaxreplay as jr
import jaxreplay.checkpoint

ROOT = pathlib.Path(__file__).parents[1]


def program_of_the_readme():
    text = (ROOT / "README.md").read_text()
    names = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], names)
    assert names["batch"].experience.obs.shape == (32, 3)


def steps():
    """Return the fields of steps of two envs: the number of the step, an episode's end at each
    fifth."""
    for t in itertools.count():
        ends = {"terminated": np.full(2, t % 5 == 4), "truncated": np.zeros(2, bool)}
        number = np.full(2, t, np.float32)
        yield {"obs": np.stack([number] * 3, axis=1), "action": number, "reward": number, **ends}


def check(batch):
    """Check targets over two steps, which end where an episode does."""
    first, found = batch.experience.obs[:, 0], batch.experience
    last = np.minimum(first + 2, first // 5 * 5 + 5)  # the row after an episode is its final one
    expected = np.where(last - first > 1, first + 0.5 * (first + 1), first)
    np.testing.assert_allclose(found.reward, expected)
    np.testing.assert_allclose(found.discount, np.where(last % 5 == 0, 0, 0.25))
    assert batch.is_valid.all()


def runs(buffer, rows, folder):
    make = lambda name: jr.Replay(
        buffer, rows=rows or str(folder / name), framework="numpy", seed=0, example=EXAMPLE
    )
    with make("first") as replay:
        for _, step in zip(range(14), steps(), strict=False):
            replay.add(**step)
        replay.save(folder / "saved", copy=True)
        batch = replay.sample()
        check(batch)
        replay.update_priorities(batch.index, np.ones(len(batch.weight), np.float32))
    with make("second") as other:
        other.load(folder / "saved")
        np.testing.assert_array_equal(other.sample().experience.obs, batch.experience.obs)


EXAMPLE = jr.Step(np.zeros(3, "f"), np.float32(0), np.float32(0), terminated=False, truncated=False)
if __name__ == "__main__":
    program_of_the_readme()
    buffer = jr.prioritized(
        capacity=32,
        num_envs=2,
        batch_size=16,
        n_step=2,
        gamma=0.5,
        autoreset="same_step_no_final_obs",
    )
    for rows in ("device", "host", None):
        with tempfile.TemporaryDirectory() as folder:
            runs(buffer, rows, pathlib.Path(folder))
    with pytest.raises(ImportError, match=r"needs tensorstore 0\.1\.81 or newer"):
        jaxreplay.checkpoint.Checkpointer("memory://replay", buffer)
    print(f"jax {jax.__version__} and NumPy {np.__version__}: all as it should be")
