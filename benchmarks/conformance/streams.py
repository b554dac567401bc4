"""Scripted envs whose observations are numbers, so that each item tells what it should be.

Env e counts its observations from 100,000 * (e + 1): 0 is memory that was never written. A final
observation is one more than the last one, and the first one of the next episode is one more than
the final one. So `obs + 1` follows `obs`, and `obs + 2` is the next episode's.
"""

import dataclasses

import numpy as np
from replay import Batch, Options, Turn

STRIDE = 100_000


def action_of(number):
    return np.asarray(number, np.int64) % 5


def reward_of(number):
    return 1 + np.asarray(number, np.int64) % 7


@dataclasses.dataclass
class Step:
    number: int
    ends: bool = False
    terminated: bool = False
    episode: int = 0


class Stream:
    """Envs, and the list of the steps that each took.

    Args:
      lengths: Smallest and largest number of steps of an episode.
      terminations: Share of the episodes that terminate; the others are truncated, which only the
        properties that are about it ask for.
      masks: Share of an env's turns without a step.
    """

    def __init__(self, options: Options, lengths=(1, 6), terminations=1.0, masks=0.0, seed=0):
        self.options, self.lengths = options, lengths
        self.terminations, self.masks = terminations, masks
        self.random = np.random.default_rng(seed)
        num_envs = options.num_envs
        self.number = (1 + np.arange(num_envs)) * STRIDE
        self.left = self.random.integers(lengths[0], lengths[1] + 1, num_envs)
        self.waits = np.zeros(num_envs, bool)  # for the step that resets
        self.steps = [[] for _ in range(num_envs)]
        self.episode = np.zeros(num_envs, int)

    def turn(self) -> Turn:
        """Step all envs."""
        num_envs, how = self.options.num_envs, self.options.autoreset
        number, is_reset = self.number.copy(), self.waits.copy()
        mask = self.random.random(num_envs) >= self.masks
        self.left -= mask & ~is_reset
        done = mask & ~is_reset & (self.left == 0)
        terminated = done & (self.random.random(num_envs) < self.terminations)
        after = number + 1
        returned = after + (done if how != "next_step" else 0)
        for env in np.flatnonzero(mask & ~is_reset):
            step = Step(int(number[env]), bool(done[env]), bool(terminated[env]))
            step.episode = int(self.episode[env])
            self.steps[env].append(step)
        self.waits = np.where(mask, done & (how == "next_step"), is_reset)
        fresh = self.random.integers(self.lengths[0], self.lengths[1] + 1, num_envs)
        self.left = np.where(done, fresh, self.left)
        self.episode += done
        self.number = np.where(mask, returned, number)
        reward = np.where(is_reset, 0, reward_of(number)).astype(np.float32)
        return Turn(
            obs=self.obs(number),
            action=action_of(number).astype(np.int32),
            reward=reward,
            terminated=terminated,
            truncated=done & ~terminated,
            next_obs=self.obs(returned),
            final_obs=None if how == "lost" else self.obs(after),
            is_reset=is_reset,
            mask=None if self.masks == 0 else mask,
            state=number.astype(np.float32),
        )

    def obs(self, number):
        """Return the observations of the envs with these numbers."""
        one = self.options.obs
        return np.broadcast_to(
            np.reshape(number, (-1,) + (1,) * one.ndim), (len(number), *one.shape)
        ).astype(one.dtype)

    def fill(self, replay, turns):
        for _ in range(turns):
            replay.add(self.turn())

    def all_steps(self):
        """Return the steps that were taken, by number."""
        return {
            step.number: (env, n)
            for env, own in enumerate(self.steps)
            for n, step in enumerate(own)
        }

    def history(self, number):
        """Return the steps around one as text, `100007 100008| 100010!`: | is a truncation and ! a
        termination."""
        env = number // STRIDE - 1
        if not 0 <= env < len(self.steps):
            return "no env has such observations"
        own, more = self.steps[env], self.options.n_step + 2
        near = [step for step in own if number - 4 <= step.number <= number + more]
        ends = ("!" if step.terminated else "|" if step.ends else "" for step in near)
        text = " ".join(f"{step.number}{end}" for step, end in zip(near, ends, strict=True))
        newest = "" if own[-1] in near else f" ... {own[-1].number}"
        return f"{self.options.kind}, {self.options.autoreset}, steps of its env: {text}{newest}"

    def targets(self, env, n):
        """Yield each target that a step may have, the whole window last: (reward, discount, number
        of next_obs, whether the window is whole)."""
        reward, discount = 0.0, 1.0
        for k in range(self.options.n_step):
            if n + k == len(self.steps[env]):
                return
            step = self.steps[env][n + k]
            reward += discount * float(reward_of(step.number))
            discount *= self.options.gamma
            whole = step.ends or k + 1 == self.options.n_step
            yield reward, 0.0 if step.terminated else discount, step.number + 1, whole
            if step.ends:
                return

    def check(self, batch: Batch, places=None, at_ends="all", at_newest=False):
        """Compare each item of a batch with its step. Return the numbers of the items.

        Args:
          at_ends: Of a window that has an end, compare "all", or all but the next observation,
            "discount". "none": compare neither these nor those right before an end.
          at_newest: Compare windows that reach their env's newest step too.
        """
        places = self.all_steps() if places is None else places
        first = lambda tree: np.asarray(tree, np.float64).reshape(len(batch.reward), -1)[:, 0]
        fields = (batch.obs, batch.next_obs, batch.action, batch.reward, batch.discount)
        items = np.stack([first(field) for field in fields], axis=1)
        for number, next_number, *got in np.unique(items, axis=0):
            what = f"item of obs {number:.0f}; {self.history(int(number))}"
            assert number in places, f"no step was taken there: {what}"
            assert got[0] == action_of(number), (
                f"action {got[0]:.0f}, {action_of(number)} was taken: {what}"
            )
            env, n = places[number]
            until = n + self.options.n_step
            has_end = any(step.ends for step in self.steps[env][n : until + (at_ends == "none")])
            reaches_newest = until >= len(self.steps[env])
            if (at_ends == "none" and has_end) or (reaches_newest and not at_newest):
                continue
            is_free = at_ends == "discount" and has_end
            targets = [*self.targets(env, n)]
            may = [one for one in targets if one[3]] or targets[-1:]  # the newest may be cut
            fits = (
                np.allclose(got[1:], (r, d), rtol=1e-4)
                and (d == 0 or is_free or next_number == after)
                for r, d, after, _ in may
            )
            expected = ", or ".join(f"{r:.4g}, {d:.4g}, {after}" for r, d, after, _ in may)
            assert any(fits), (
                f"reward {got[1]:.4g}, discount {got[2]:.4g}, next_obs {next_number:.0f}; expected "
                f"{expected}: {what}"
            )
        return items[:, 0].astype(int)


class Noise(Stream):
    """Envs with random numbers, which nothing compresses much."""

    def obs(self, number):
        one = self.options.obs
        return np.stack([np.random.default_rng(n).random(one.shape, one.dtype) for n in number])
