"""What a replay is asked. An adapter answers for one library, in the way of its own docs.

An adapter has at most ten methods. It leaves out what its library does not offer: the properties
that need it are then "not offered", which is no fault.
"""

import dataclasses
import importlib.util
import inspect
import pathlib
import sys
from typing import Any, ClassVar

import numpy as np


class NotOffered(Exception):  # noqa: N818
    """The library has no such thing."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to make.

    Attributes:
      capacity: Number of steps of all envs together that fit, less those of an episode or two, and
        final observations that take the place of a step.
      kind: "uniform", "prioritized", "sequences" or "goals" (hindsight).
      num_envs: E.
      batch_size: Number of items of a batch, B.
      n_step, gamma: Of transitions.
      autoreset: "next_step": the step after a done ignores its action and returns the first
        observation. "same_step": a done returns the first one, and the final one beside it.
        "lost": as "same_step", and the final observation is lost.
      alpha, beta: Exponents of priorities and of importance weights.
      length, burn_in: Of sequences: steps to learn from, and steps before them.
      obs: One env's observation: a tree of arrays of which shapes and dtypes count.
      seed: Of whatever is random.
    """

    capacity: int
    kind: str = "uniform"
    num_envs: int = 1
    batch_size: int = 64
    n_step: int = 1
    gamma: float = 0.5
    autoreset: str = "same_step"
    alpha: float = 1.0
    beta: float = 1.0
    length: int = 4
    burn_in: int = 0
    obs: Any = dataclasses.field(default_factory=lambda: np.zeros(3, np.float32), hash=False)
    seed: int = 0


@dataclasses.dataclass
class Turn:
    """What a loop has after a step of its envs; leaves [E, ...].

    Attributes:
      obs, action: Before the step.
      reward, terminated, truncated, next_obs: As the envs returned them.
      final_obs: The true observation after the action; None with `autoreset="lost"`.
      is_reset: Where the action was ignored, since the env reset ("next_step").
      mask: Where an env took a step; None if all did.
      state: Recurrent state before the step, a number for each env.
    """

    obs: Any
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    next_obs: Any
    final_obs: Any
    is_reset: np.ndarray
    mask: np.ndarray | None = None
    state: np.ndarray | None = None


@dataclasses.dataclass
class Batch:
    """A sample as NumPy arrays, leaves [B, ...]; None where the library has no such field.

    The value target is `reward + discount * value(next_obs)`. Of sequences, leaves are [B, T, ...],
    `mask` says which steps count, `is_first` which open an episode, and `state` is the recurrent
    state that belongs to the first step. Of goals, `goal` is the goal of each item.
    """

    obs: Any
    action: np.ndarray
    reward: np.ndarray
    discount: np.ndarray | None = None
    next_obs: Any = None
    index: Any = None
    weight: np.ndarray | None = None
    probability: np.ndarray | None = None
    mask: np.ndarray | None = None
    is_first: np.ndarray | None = None
    state: np.ndarray | None = None
    goal: np.ndarray | None = None


class Replay:
    """An adapter begins with these. `Options` of a kind that is not offered raise `NotOffered`."""

    name = ""  # with the version
    is_threadsafe = False  # its docs say so
    arguable: ClassVar[dict[str, str]] = {}  # of properties that fail: why that may be meant so

    def __init__(self, options: Options):
        self.options = options

    def add(self, turn: Turn) -> None:
        """Add what a loop has after one step of all envs."""
        raise NotOffered

    def sample(self, beta: float | None = None) -> Batch:
        """Sample a batch of valid items; with another beta where a call may have one."""
        raise NotOffered

    def update_priorities(self, index: Any, priority: np.ndarray) -> None:
        """Set priorities of sampled items, by `Batch.index`."""
        raise NotOffered

    def reset_max_priority(self) -> None:
        """Forget the largest priority, which new rows get."""
        raise NotOffered

    def nbytes(self) -> int:
        """Return the bytes of all that is stored, as allocated."""
        raise NotOffered

    def save(self, path: str) -> None:
        """Save to a path, over an earlier save of it."""
        raise NotOffered

    def load(self, path: str) -> None:
        """Load into a replay that was made just now, of the same options or others."""
        raise NotOffered

    def seed(self, seed: int) -> None:
        """Let the next samples depend on the seed alone."""
        raise NotOffered

    def pure(self, turn: Turn) -> Any:
        """Return an empty state for such turns and pure functions of JAX: `row(turn)`, arrays to
        add; `add(state, row)`; `sample(state, key)`, arrays."""
        raise NotOffered


def loaded(path):
    """Return the module of a file with adapters."""
    name = f"adapter_{pathlib.Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def adapters_of(path):
    """Return the adapters of a file, by the name of their class."""
    return {
        name: one
        for name, one in vars(loaded(path)).items()
        if inspect.isclass(one)
        and issubclass(one, Replay)
        and one.name
        and not name.startswith("_")
    }
