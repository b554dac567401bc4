"""The reference that the library must agree with: a slow, simple replay of lists of rows.

Every stream is the list of all rows ever written; the newest `length` of them are stored.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from tests.support import oracle_views

SHARES = np.float32([1, -2])  # of each of two agents in the reward of a step


@dataclasses.dataclass
class Agents:
    """Flags of the agents in a step, and who acted."""

    terminated: np.ndarray
    truncated: np.ndarray
    alive: np.ndarray

    def done(self):
        return self.terminated | self.truncated

    def is_cut(self):
        return (self.truncated & ~self.terminated & self.alive).any()


@dataclasses.dataclass(eq=False)
class Row:
    obs: float
    action: int = 0
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    is_final: bool = False
    priority: float = 0.0
    agents: Agents | None = None
    is_closed: bool = False  # the last of its episode: no final row will come
    is_dropped: bool = False


@dataclasses.dataclass
class Transition:
    obs: float
    action: int
    reward: Any  # of agents: that of each, and the sum of the steps of the env
    discount: Any
    next_obs: float
    num_steps: int
    alive: np.ndarray | None = None


class Oracle:
    """`window` has the rows around a candidate, as `oracle_views.anchors` takes them."""

    def __init__(self, *, num_envs, length, autoreset, n_step=1, gamma=1.0, window=None, agents=0):
        self.length, self.n_step, self.gamma = length, n_step, gamma
        self.autoreset, self.window, self.num_agents = autoreset, window or {"after": 1}, agents
        # agents that have ended in an episode that goes on, as far as rows tell
        self.ended = np.zeros((num_envs, agents), bool)
        self.streams = [[] for _ in range(num_envs)]
        # A done came before the last clear, and its final row after the clear is still to come.
        self.owed = [False] * num_envs
        self.began_with_a_tail = [False] * num_envs  # the first row after the clear is a final row
        self.max_priority, self.max_error = 1.0, 0.0
        self.num_bad_priorities = self.num_stale_updates = self.num_ignored_writes = 0

    def clear(self):
        self.owed = [self.owes_final_row(env) for env in range(len(self.streams))]
        self.began_with_a_tail = list(self.owed)
        self.streams = [[] for _ in self.streams]
        self.ended[:] = True  # a flag of the next step may be of any earlier one
        self.max_priority, self.max_error = 1.0, 0.0

    def owes_final_row(self, env):
        """Return whether an env's next row is the final row of its last one, with next-step
        autoreset."""
        rows = self.streams[env]
        if not rows:
            return self.owed[env]
        return (
            self.autoreset == "next_step"
            and not (rows[-1].is_final or rows[-1].is_closed)
            and (rows[-1].terminated or rows[-1].truncated)
        )

    def add(self, obs, action, reward, terminated, truncated, final_obs, mask=None, priority=None):
        """Add one step of every env; each argument is a list over envs."""
        envs = [env for env in range(len(self.streams)) if mask is None or mask[env]]
        default = self.max_priority
        if priority is not None:
            self.num_bad_priorities += sum(not is_good(priority[env]) for env in envs)
            self.max_priority = max(
                [self.max_priority] + [priority[env] for env in envs if is_good(priority[env])]
            )
        for env in envs:
            given = priority[env] if priority is not None and is_good(priority[env]) else default
            flags = self._flags(env, terminated[env], truncated[env])
            row = Row(obs[env], action[env], reward[env], *flags[:2], False, given, *flags[2:])
            self._append(env, row, final_obs[env])

    def _flags(self, env, terminated, truncated):
        """Return the flags of the env, which terminates where no agent that acted is truncated, and
        those of its agents."""
        if not self.num_agents:
            return terminated, truncated
        done = terminated | truncated
        alive = ~(self.ended[env] & done)
        is_over = done.all() and (terminated | ~alive).all()
        self.ended[env] = done & (not done.all() and not self.owes_final_row(env))
        agents = Agents(np.copy(terminated), np.copy(truncated), alive)
        return is_over, done.all() and not is_over, agents

    def _append(self, env, row, final_obs):
        rows = self.streams[env]
        if self.autoreset == "next_step":
            rows.append(Row(row.obs, is_final=True) if self.owes_final_row(env) else row)
        elif self.autoreset == "same_step":
            rows.append(row)
            if row.terminated or row.truncated:
                rows.append(Row(final_obs, is_final=True))
        else:
            row.is_final = row.truncated and not row.terminated
            rows.append(row)

    def drop(self, mask):
        """Give up the unfinished episodes of some envs: their rows are of no step."""
        for env, rows in enumerate(self.streams):
            if not mask[env]:
                continue
            if self.owes_final_row(env):
                self._close(env)
            self.ended[env] &= not rows
            for row in reversed(rows):
                if self._closes(row):
                    break
                row.is_final = row.is_dropped = True

    def end(self, mask):
        """End the unfinished episodes of some envs: the newest row of each is given up."""
        for env, rows in enumerate(self.streams):
            if not mask[env]:
                continue
            if self.owes_final_row(env) or (rows and not self._closes(rows[-1])):
                self._close(env)
            self.ended[env] &= not rows

    def _close(self, env):
        """End the episode of the newest row. If the row waits for its window, it is final now."""
        self.owed[env] = False
        self.began_with_a_tail[env] &= bool(self.streams[env])
        needs = {"needs_final_obs": False, "needs_next_obs": True, "crosses_episodes": False}
        needs |= self.window
        for row in self.streams[env][-1:]:
            ends = (row.terminated and not needs["needs_final_obs"]) or (
                row.truncated and not needs["needs_next_obs"]
            )
            ends &= needs["after"] is not None and not needs["crosses_episodes"]
            row.is_closed = True
            if needs["after"] != 0 and not ends:
                row.is_final, row.terminated, row.truncated = True, False, True

    def _closes(self, row):
        ends = row.terminated and self.autoreset == "same_step_no_final_obs"
        return row.is_final or row.is_closed or ends

    def map_rows(self, function):
        """Compute the rewards of all stored steps anew."""
        for env, rows in enumerate(self.streams):
            for _, index in self.stored(env):
                rows[index].reward = function(rows[index].reward)

    def stored(self, env):
        """Return (position in the ring, index in the list) of each stored row."""
        count = len(self.streams[env])
        return [(index % self.length, index) for index in range(max(0, count - self.length), count)]

    def transition(self, env, index):
        """Return the n-step transition that begins at a row, or None if the row is not
        sampleable."""
        rows = self.streams[env]
        first, ahead = rows[index], rows[index : index + self.n_step + 1]
        if first.is_final or index < len(rows) - self.length:
            return None
        ends = [row.is_final or (row.terminated and k < self.n_step) for k, row in enumerate(ahead)]
        if len(ahead) <= self.n_step and not any(ends):
            return None
        acts = first.agents.alive if self.num_agents else True
        own, team, is_over = 0.0, 0.0, ~np.asarray(acts)
        for k, row in enumerate(ahead[: self.n_step]):
            agents = row.agents or Agents(*map(np.bool_, (row.terminated, row.truncated, True)))
            acts = acts & agents.alive
            team += self.gamma**k * row.reward
            own += self.gamma**k * row.reward * SHARES[: self.num_agents] * acts
            is_over = is_over | (acts & agents.terminated)
            acts = acts & ~agents.done()
            following = ahead[k + 1] if k + 1 < len(ahead) else None
            if row.terminated or agents.is_cut() or (following and following.is_final):
                break
        has_tail = not row.terminated or (
            following is not None and self.autoreset != "same_step_no_final_obs"
        )
        return Transition(
            first.obs,
            first.action,
            {"own": own, "team": team} if self.num_agents else team,
            np.where(is_over, 0, self.gamma ** (k + 1)),
            following.obs if has_tail else row.obs,
            k + 1,
            first.agents and first.agents.alive,
        )

    def candidates(self, **window):
        """Return (env, index) of all candidates, sorted. `window` replaces fields of the
        buffer's."""
        found = oracle_views.anchors(self, **self.window | window)
        return sorted((env, index) for env, _, index in found)

    def number(self, env, index):
        """Return the buffer's number of a row."""
        return env * self.length + index % self.length

    def row(self, env, index):
        return self.streams[env][index]

    def probabilities(self, alpha):
        """Map the row number to the probability of one draw, for sampleable rows."""
        found = {self.number(*one): self.row(*one).priority for one in self.candidates()}
        mass = {number: p**alpha if p > 0 else 0.0 for number, p in found.items()}
        total = math.fsum(mass.values())
        return {number: m / total if total else 0.0 for number, m in mass.items()}

    def update(self, rows, priorities):
        """Set new priorities of sampled rows (Row objects, or None for an invalid index). If a row
        appears more than once, its largest priority counts."""
        live = {id(self.row(*one)) for one in self.candidates()}
        accepted = {}
        for row, priority in zip(rows, priorities, strict=True):
            if row is None or id(row) not in live:
                self.num_stale_updates += 1
            elif not is_good(priority):
                self.num_bad_priorities += 1
            else:
                accepted.setdefault(id(row), (row, []))[1].append(priority)
        for row, given in accepted.values():
            row.priority = max(given)
            self.max_priority = max(self.max_priority, row.priority)

    def write(self, rows, rewards):
        """Set the rewards of sampled rows that are still stored; the last one of a row stays."""
        live = {id(row) for rows in self.streams for row in rows[-self.length :]}
        for row, reward in zip(rows, rewards, strict=True):
            if row is None or row.is_final or id(row) not in live:
                self.num_ignored_writes += 1
            else:
                row.reward = reward


def is_good(priority):
    return math.isfinite(priority) and priority >= 0
