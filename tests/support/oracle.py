"""The reference that the library must agree with: a slow, simple replay of lists of rows.

Every stream is the list of all rows ever written; the newest `length` of them are stored.
"""

import dataclasses
import math


@dataclasses.dataclass(eq=False)
class Row:
    obs: float
    action: int = 0
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    is_final: bool = False
    priority: float = 0.0
    is_closed: bool = False  # its final row will not come
    is_dropped: bool = False


@dataclasses.dataclass
class Transition:
    obs: float
    action: int
    reward: float
    discount: float
    next_obs: float
    num_steps: int


class Oracle:
    def __init__(self, *, num_envs, length, autoreset, n_step, gamma):
        self.length, self.n_step, self.gamma = length, n_step, gamma
        self.autoreset = autoreset
        self.streams = [[] for _ in range(num_envs)]
        # A done came before the last clear, and its final row after the clear is still to come.
        self.owed = [False] * num_envs
        self.began_with_a_tail = [False] * num_envs  # the first row after the clear is a final row
        self.max_priority = 1.0
        self.num_bad_priorities = self.num_stale_updates = self.num_ignored_writes = 0

    def clear(self):
        self.owed = [self.owes_final_row(env) for env in range(len(self.streams))]
        self.began_with_a_tail = self.owed
        self.streams = [[] for _ in self.streams]
        self.max_priority = 1.0

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
            row = Row(
                obs[env], action[env], reward[env], terminated[env], truncated[env], False, given
            )
            self._append(env, row, final_obs[env])

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
                self.owed[env] = False
                for row in rows[-1:]:
                    row.is_closed, row.is_final = True, not row.terminated
            for row in reversed(rows):
                if self._closes(row):
                    break
                row.is_final = row.is_dropped = True

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
        first = rows[index]
        if first.is_final or index < len(rows) - self.length:
            return None
        reward = 0.0
        for k in range(self.n_step):
            row = rows[index + k]
            following = rows[index + k + 1] if index + k + 1 < len(rows) else None
            reward += self.gamma**k * row.reward
            if row.terminated:
                has_tail = following is not None and self.autoreset != "same_step_no_final_obs"
                return Transition(
                    first.obs,
                    first.action,
                    reward,
                    0.0,
                    following.obs if has_tail else row.obs,
                    k + 1,
                )
            if following is None:
                return None
            if following.is_final or k + 1 == self.n_step:
                return Transition(
                    first.obs, first.action, reward, self.gamma ** (k + 1), following.obs, k + 1
                )

    def sampleable(self):
        """Map the row number in the buffer to (row, its transition), for sampleable rows."""
        found = {}
        for env, rows in enumerate(self.streams):
            for position, index in self.stored(env):
                transition = self.transition(env, index)
                if transition is not None:
                    found[env * self.length + position] = (rows[index], transition)
        return found

    def probabilities(self, alpha):
        """Map the row number to the probability of one draw, for sampleable rows."""
        mass = {
            number: row.priority**alpha if row.priority > 0 else 0.0
            for number, (row, _) in self.sampleable().items()
        }
        total = math.fsum(mass.values())
        return {number: m / total if total else 0.0 for number, m in mass.items()}

    def update(self, rows, priorities):
        """Set new priorities of sampled rows (Row objects, or None for an invalid index). If a row
        appears more than once, its largest priority counts."""
        live = {id(row) for row, _ in self.sampleable().values()}
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
