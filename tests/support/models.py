"""The rows that each sampler may return, as lists: what the oracle does not say."""

import collections
import itertools

import jax
import numpy as np

import jaxreplay as jr
from jaxreplay.samplers.permutation import permute
from tests.support import oracle_views
from tests.support.histories import ADDS, BLOCK

ROOMS = (1, BLOCK, 10)  # steps for which a consumer is asked
order_of = jax.jit(permute)
LARGEST = np.arange(256, dtype=np.int32)  # at least the rows of any pass: one program for all


class Model:
    """Uniform sampling with replacement, and the base of the others."""

    def __init__(self, config, oracle, start):
        self.config, self.oracle = config, oracle
        self.sampler, self.batch_size = config.buffer.sampler, config.buffer.batch_size

    @staticmethod
    def seen(sampler):
        """Return what a check reads of the sampler's state after a draw."""
        return {}

    def before(self, kind, num_steps):
        """Note what an operation makes certain."""

    def after(self, kind):
        """Note an operation."""

    def numbers(self):
        return [self.oracle.number(*one) for one in self.oracle.candidates()]

    def probabilities(self):
        """Map the number of each candidate to its probability."""
        numbers = self.numbers()
        return {number: 1 / len(numbers) for number in numbers}

    def size(self, probabilities):
        return len(probabilities)

    def check_batch(self, seen, probabilities):
        """Check a batch of independent draws."""
        batch = seen["batch"]
        positive = {row for row, p in probabilities.items() if p > 0}
        row = batch.index.row[batch.is_valid]
        assert batch.is_valid.any() == bool(positive)
        assert self.may_fail() or batch.is_valid.all() == bool(positive)
        assert positive.issuperset(row.tolist())
        expected = [probabilities[one] for one in row.tolist()]
        np.testing.assert_allclose(batch.probability[batch.is_valid], expected, rtol=1e-5)
        if not self.may_fail():
            surely = {one for one, p in probabilities.items() if p * self.batch_size > 25}
            assert surely.issubset(row.tolist())  # one is missed once in 10^10 batches

    def may_fail(self):
        """Return whether items may be invalid: a GPU tries rows."""
        return self.config.buffer.platform == "gpu" and self.config.buffer.length >= 16


class NewestModel(Model):
    def probabilities(self):
        found, most = self.oracle.candidates(), self.sampler.num_rows
        streams = self.oracle.streams
        is_new = {self.oracle.number(*one): len(streams[one[0]]) - one[1] <= most for one in found}
        return {row: new / max(sum(is_new.values()), 1) for row, new in is_new.items()}

    def size(self, probabilities):
        return sum(p > 0 for p in probabilities.values())


class RecentModel(Model):
    """Geometric probabilities in the order of time."""

    def probabilities(self):
        found, decay = self.oracle.candidates(), self.sampler.decay
        mass = {
            self.oracle.number(env, index): decay ** sum(e == env and i > index for e, i in found)
            for env, index in found
        }
        return {row: m / sum(mass.values()) for row, m in mass.items()}


class EpisodesModel(Model):
    """Each episode with a candidate alike, then its rows."""

    def probabilities(self):
        spans = [oracle_views.spans(self.oracle, rows) for rows in self.oracle.streams]
        episode = {
            self.oracle.number(env, index): (env, spans[env][index])
            for env, index in self.oracle.candidates()
        }
        sizes = collections.Counter(episode.values())
        return {row: 1 / len(sizes) / sizes[one] for row, one in episode.items()}


class PrioritizedModel(Model):
    @property
    def alpha(self):
        return self.sampler.alpha

    def probabilities(self):
        return self.oracle.probabilities(self.alpha)

    def after(self, kind):
        if kind == "reset":
            stored = [self.oracle.row(*one).priority for one in self.oracle.candidates(after=0)]
            self.oracle.max_priority = (max(stored, default=0) * bool(self.alpha)) or 1.0
            self.oracle.max_error = 1e-5  # it is found from its power

    @staticmethod
    def seen(sampler):
        names = ("max_priority", "num_bad_priorities", "num_stale_updates")
        return {name: getattr(sampler, name) for name in names}

    def check_batch(self, seen, probabilities):
        super().check_batch(seen, probabilities)
        for name, value in seen["sampler"].items():
            check_number(self.oracle, name, value)


class BlendModel(PrioritizedModel):
    """A quarter of uniform sampling, and three of prioritized."""

    alpha = 0.5

    def probabilities(self):
        own = super().probabilities()
        return {row: 0.25 / len(own) + 0.75 * p for row, p in own.items()}

    @staticmethod
    def seen(sampler):
        return PrioritizedModel.seen(sampler["priority"])

    def may_fail(self):
        return True


class ConsumingModel(Model):
    """A batch has each row once, then invalid items."""

    def check_batch(self, seen, probabilities):
        rooms = [self.has_room(num * (1 + (self.config.form == "same_step"))) for num in ROOMS]
        assert seen["has_room"].tolist() == rooms

    def has_room(self, num_rows):
        return True

    def check_taken(self, batch, taken):
        rows = [self.oracle.number(*one) for one in taken]
        assert batch.is_valid.tolist() == [k < len(rows) for k in range(self.batch_size)]
        assert batch.index.row[: len(rows)].tolist() == rows
        assert len(set(rows)) == len(rows)


class QueueModel(ConsumingModel):
    """The oracle's rows that were consumed or lost, and the count of the lost ones."""

    def __init__(self, config, oracle, start):
        super().__init__(config, oracle, start)
        self.done, self.lost = set(), start
        self.uses = collections.defaultdict(int)
        self.is_cleared, self.has_asked = False, True

    @staticmethod
    def seen(sampler):
        return {"lost": sampler.lost}

    def left(self, **window):
        found = self.oracle.candidates(**window)
        return [one for one in found if self.oracle.row(*one) not in self.done]

    def probabilities(self):
        left = set(self.left())
        return {self.oracle.number(*one): one in left for one in self.oracle.candidates()}

    def size(self, probabilities):
        return sum(probabilities.values())

    def has_room(self, num_rows):
        before, waiting = self.oracle.window["before"], self.left(after=0)
        for env, rows in enumerate(self.oracle.streams):
            needed = len(rows) - (before or 0)
            mine = [index for stream, index in waiting if stream == env]
            if mine:
                first, _ = oracle_views.spans(self.oracle, rows)[mine[0]]
                needed = first if before is None else max(first, mine[0] - before)
            if len(rows) + num_rows - self.oracle.length > needed:
                return False
        return True

    def take(self, seen):
        taken, most = [], self.sampler.max_uses
        for use in range(most):
            left = [one for one in self.left() if self.uses[self.oracle.row(*one)] == use]
            streams = [
                [one for one in left if one[0] == env] for env in range(self.config.num_envs)
            ]
            turns = [one for turn in itertools.zip_longest(*streams) for one in turn]
            turns = [one for one in turns if one is not None]
            taken += sorted(turns[: self.batch_size - len(taken)])
        if taken:
            self.count_lost()
        for one in taken:
            self.uses[self.oracle.row(*one)] += 1
        self.done |= {row for row, uses in self.uses.items() if uses == most}
        self.check_taken(seen["batch"], taken)
        assert seen["batch"].probability.tolist() == seen["batch"].is_valid.tolist()
        assert seen["sampler"]["lost"] == min(self.lost, 2**32 - 1)

    def count_lost(self):
        stored, self.oracle.length = self.oracle.length, 10**9
        ever = self.left(before=0, after=0)
        self.oracle.length = stored
        gone = {self.oracle.row(*one) for one in set(ever) - set(self.left(after=0))}
        new = {row for row in gone if not self.uses[row]}
        self.lost += 0 if self.is_cleared else len(new)
        self.done |= gone
        assert not (gone and self.has_asked)  # a producer that asks loses nothing
        self.is_cleared = False
        # Further rows of an episode whose first rows are lost will be lost as well.
        self.has_asked |= self.oracle.window["before"] is not None

    def before(self, kind, num_steps):
        if kind == "drop":
            was_cleared = self.is_cleared
            self.count_lost()
            self.is_cleared = was_cleared
        if kind in ADDS:
            rows = num_steps * (1 + (self.config.form == "same_step"))
            self.has_asked &= self.has_room(rows)
        self.is_cleared |= kind == "clear"


class PassModel(ConsumingModel):
    """The pass as a list of the oracle's rows in their order."""

    def __init__(self, config, oracle, start):
        super().__init__(config, oracle, start)
        self.rows, self.position = [], 0

    @staticmethod
    def seen(sampler):
        return {"key": sampler.key}

    def take(self, seen):
        now = {self.oracle.row(*one): one for one in self.oracle.candidates()}
        taken, rounds = [], 0
        while (
            now
            and len(taken) < self.batch_size
            and (not taken or (rounds < 8 and self.position < len(self.rows)))
        ):
            is_used_up = self.position == len(self.rows)
            if is_used_up or sum(row in now for row in self.rows) <= len(self.rows) // 8:
                self.begin(now, seen["sampler"]["key"])
            for row in self.rows[self.position :][: self.batch_size]:
                if len(taken) < self.batch_size:
                    self.position += 1
                    taken += [now[row]] if row in now else []
            rounds += 1
        assert bool(taken) == bool(now)
        self.check_taken(seen["batch"], taken)
        expected = seen["batch"].is_valid / max(len(now), 1)
        np.testing.assert_allclose(seen["batch"].probability, expected, rtol=1e-6)

    def begin(self, now, key):
        """Begin a pass: order the rows by env, then time, and permute them by the pass's key."""
        rows, place = list(now), np.minimum(LARGEST, len(now) - 1)
        order = np.asarray(order_of(key, place, np.int32(len(rows))))
        self.rows, self.position = [rows[place] for place in order[: len(rows)]], 0

    def after(self, kind):
        if kind == "clear":
            self.rows, self.position = [], 0
        if kind == "drop":  # a new pass begins
            self.rows = [None] * len(self.rows)


def check_number(oracle, name, value):
    """Check a figure of an oracle's: exactly, but a largest priority after a reset."""
    error = oracle.max_error * (name == "max_priority")
    np.testing.assert_allclose(value, np.float32(getattr(oracle, name)), rtol=error, err_msg=name)


MODELS = {
    jr.Uniform: Model,
    jr.Newest: NewestModel,
    jr.Recent: RecentModel,
    jr.UniformEpisodes: EpisodesModel,
    jr.Prioritized: PrioritizedModel,
    jr.samplers.Blend: BlendModel,
    jr.Queue: QueueModel,
    jr.WithoutReplacement: PassModel,
}
