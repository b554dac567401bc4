"""Hindsight experience replay: what was reached stands in for the goal."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxreplay._util import random
from jaxreplay._util.aliases import PyTree
from jaxreplay._util.checks import check_callable, check_leaves
from jaxreplay._util.names import spec_text
from jaxreplay.storage.layout import Layout, Window
from jaxreplay.types import Step
from jaxreplay.views.row_reader import RowReader, WrappedReader
from jaxreplay.views.view import WrappedView

STRATEGIES = ("future", "final", "episode", "random")


class Hindsight(WrappedView[Any]):
    """Another view, where a part of the items has another goal, with the rewards that it would have
    brought.

    Observations are mappings as those of Gymnasium's goal envs. An item has one goal, drawn anew in
    each sample; it is put into all the observations that `of` reads, and every reward that it reads
    is computed again.

    Source: Andrychowicz et al., "Hindsight Experience Replay" (2017), sections 3.2 and 4.5. There
    relabelled copies are stored.

    Args:
      inner: the view that reads them, such as a `TransitionView`.
      reward_fn: pure; `reward_fn(achieved, goal, step)`, for one step: what was achieved by it, the
        goal, and the stored `Step`, with the goal that it had. It gives what the stored reward's
        shape and dtype can hold.
      terminated_fn: as `reward_fn`: whether the step terminates the episode, computed again for
        relabelled items: then n-step targets and sequences stop there. None: as stored, so that a
        step which reaches its new goal goes on, and is bootstrapped from.
      strategy: where the goal was achieved: "future": by a later step of the episode, all alike;
        "final": by its last one; "episode": at any of its rows; "random": at any row stored.
      relabel_fraction: the fraction of items that are relabelled, in [0, 1]: k / (k + 1) in the
        paper's terms.
      achieved_key, desired_key: the keys in the observation of what was achieved and of the goal.
    """

    reward_fn: Callable[[Any, Any, Step], Any]
    terminated_fn: Callable[[Any, Any, Step], Any] | None = None
    strategy: str = "future"
    relabel_fraction: float = 0.8
    achieved_key: str = "achieved_goal"
    desired_key: str = "desired_goal"

    def _check(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"Hindsight: strategy must be one of {STRATEGIES}, got {self.strategy!r}"
            )
        if not 0 <= self.relabel_fraction <= 1:
            raise ValueError(
                f"Hindsight: relabel_fraction must be in [0, 1], got {self.relabel_fraction}"
            )
        for name in (
            ("reward_fn",) if self.terminated_fn is None else ("reward_fn", "terminated_fn")
        ):
            check_callable("Hindsight", name, getattr(self, name), ("achieved", "goal", "step"))
        if self.achieved_key == self.desired_key:
            raise ValueError(
                f"Hindsight: achieved_key and desired_key are both {self.achieved_key!r}, but a "
                "goal and what was achieved are two leaves"
            )
        if not self.inner.needs_steps or self.inner.window.crosses_episodes:
            raise ValueError(
                "Hindsight: one goal belongs to one episode; give a view of steps within one, "
                f"not {self.inner}"
            )

    @property
    def window(self) -> Window:
        if self.strategy == "random":
            return dataclasses.replace(self.inner.window, needs_final_obs=True)
        return self.inner.window.widened(
            before=None if self.strategy == "episode" else 0, after=None
        )

    @property
    def is_random(self) -> bool:
        return True

    @property
    def reads_any_row(self) -> bool:
        return self.strategy == "random" or self.inner.reads_any_row

    def check(self, where: str, layout: Layout, example: PyTree) -> None:
        if not isinstance(example.obs, Mapping) or not {self.achieved_key, self.desired_key} <= set(
            example.obs
        ):
            raise ValueError(
                f"{where}: Hindsight needs observations that are mappings with the keys "
                f"{self.achieved_key!r} and {self.desired_key!r}, "
                "got "
                + (
                    f"the keys {', '.join(map(str, example.obs))}"
                    if isinstance(example.obs, Mapping)
                    else "no mapping"
                )
            )
        hint = "Hindsight puts what was achieved in the goal's place: the same leaves."
        check_leaves(
            where,
            {self.desired_key: example.obs[self.desired_key]},
            {self.desired_key: example.obs[self.achieved_key]},
            hint,
        )
        if not layout.termination_has_final_row:
            raise ValueError(
                f"{where}: Hindsight needs what the last step of an episode achieved, which "
                'autoreset="same_step_no_final_obs" loses; bring final_obs, with "same_step"'
            )
        super().check(where, layout, example)

    def read(self, reader: RowReader) -> Any:
        high, _ = reader.random_words(0)
        is_relabelled = random.fraction(high) < self.relabel_fraction
        # What the view below draws, such as a horizon or a goal of its own, must not depend on
        # whether this goal is new.
        inner = reader.at(bits=jnp.stack(reader.random_words(2)))
        return self.inner.read(
            _Relabelled.around(
                inner, view=self, is_relabelled=is_relabelled, goal=self._goal(reader)
            )
        )

    def _goal(self, reader: RowReader) -> Any:
        if self.strategy == "random":
            return reader.random_row(1).obs(0)[self.achieved_key]
        to_end = reader.episodes.steps_to_end(reader.row)
        if self.strategy == "future":
            offset = random.below(*reader.random_words(1), to_end) + 1
        elif self.strategy == "final":
            offset = to_end
        else:
            from_start = reader.episodes.steps_from_start(reader.row)
            offset = random.below(*reader.random_words(1), from_start + to_end + 1) - from_start
        return reader.obs(offset)[self.achieved_key]


@dataclasses.dataclass(frozen=True)
class _Relabelled(WrappedReader):
    view: Any = None  # Hindsight
    is_relabelled: Any = None  # bool[]
    goal: Any = None  # pytree

    def obs(self, offset: ArrayLike) -> PyTree:
        obs = self._inner.obs(offset)
        goal = jax.tree.map(
            lambda new, old: jnp.where(self.is_relabelled, new, old),
            self.goal,
            obs[self.view.desired_key],
        )
        return {**obs, self.view.desired_key: goal}

    def reward(self, offset: ArrayLike) -> PyTree:
        return self._again(self.view.reward_fn, offset, self._inner.reward(offset))

    def is_terminated(self, offset: ArrayLike) -> jax.Array:
        stored = self._inner.is_terminated(offset)
        return (
            stored
            if self.view.terminated_fn is None
            else self._again(self.view.terminated_fn, offset, stored)
        )

    def _again(self, function: Callable, offset: ArrayLike, stored: jax.Array) -> jax.Array:
        """What `function` gives for each step with the new goal, where that is used."""

        def one(offset):
            return jnp.asarray(
                function(
                    self._inner.obs(offset + 1)[self.view.achieved_key],
                    self.goal,
                    self._inner.step(offset),
                )
            )

        offset = jnp.asarray(offset, jnp.int32)
        for_all = one
        for _ in offset.shape:
            for_all = jax.vmap(for_all)
        new = for_all(offset)
        if new.shape != stored.shape or _kind(new.dtype) > _kind(stored.dtype):
            name = getattr(function, "__name__", repr(function))
            got, expected = (spec_text(x, offset.ndim) for x in (new, stored))
            raise ValueError(
                f"Hindsight: {name} gave {got} for one step, but stored is {expected}, which "
                "cannot hold it"
            )
        return jnp.where(self.is_relabelled, new.astype(stored.dtype), stored)


def _kind(dtype: Any) -> int:
    """Of two dtypes, values of the one with the larger kind may be lost in the other."""
    kinds = (jnp.bool_, jnp.unsignedinteger, jnp.signedinteger, jnp.floating, jnp.complexfloating)
    return next(number for number, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind))
