"""What the drop-in buffers share: Stable-Baselines3's calls on the outside, streams on the device
within.

Stable-Baselines3 hands over whole transitions. Here the observation after a step is stored as the
next step's own, or as the end of its episode (`storage/provisional.py`). Whether a step goes on
from the one before is told by comparing its observation with the one that was announced: after a
reset in the middle of an episode nothing is paired that does not belong together.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from jaxreplay._util.checks import check_not_forked
from jaxreplay._util.signals import defer_interrupts
from jaxreplay.buffers.jitted import method, program
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import is_alive
from jaxreplay.inspection.contents import resets_of
from jaxreplay.inspection.resets import ResetWatch
from jaxreplay.samplers import Sampler
from jaxreplay.samplers.uniform import Uniform
from jaxreplay.sb3.arrays import TORCH_DTYPES, is_same, shaped
from jaxreplay.sb3.batch import SB3View
from jaxreplay.stateful.host_arrays import fit
from jaxreplay.storage import provisional
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.torch import to_torch
from jaxreplay.types import Step
from jaxreplay.views import View

_THEIR_ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


class DropInBuffer(buffers.ReplayBuffer):
    """The base of the drop-in buffers.

    Args:
      buffer_size: transitions in all, as of Stable-Baselines3; the end of each episode that is
        stored takes the place of one.
      observation_space, action_space: Dict observations too. 64-bit numbers are stored in 32 bits,
        unless `jax_enable_x64` is on, and come out as 64-bit ones.
      device: where batches go. n_envs: environments that step together.
      optimize_memory_usage: always so here; it must not be set.
      handle_timeout_termination: whether a step with `TimeLimit.truncated` in its info is
        bootstrapped from.
      storage_device: the platform whose first device holds the rows, such as "cpu"; JAX's default
        device if None.
    """

    copy_info_dict = False  # whether the steps' infos are kept: hindsight's

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        storage_device: str | None = None,
    ):
        # Not those of ReplayBuffer, which allocate: the base of all buffers.
        super(buffers.ReplayBuffer, self).__init__(
            buffer_size, observation_space, action_space, device, n_envs=n_envs
        )
        if optimize_memory_usage:
            raise ValueError(
                f"{type(self).__name__}: observations are always stored once here; leave out "
                "optimize_memory_usage=True"
            )
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        self.storage_device = storage_device
        # A row more for the end of the newest episode; at the least, what one window takes.
        view = self._view()
        sizes: Any = {
            "capacity": max(self.buffer_size, view.window.length) * n_envs + n_envs,
            "num_envs": n_envs,
            "batch_size": 1,
        }
        self._replay = ReplayBuffer(
            **sizes, autoreset="same_step", sampler=self._sampler(), view=view
        )
        self._state = self._empty()
        self._forget()
        self._watch = ResetWatch()
        self._seed: int | None = None
        self._num_draws = 0
        self._pid = os.getpid()

    def _sampler(self) -> Sampler:
        return Uniform()

    def _view(self) -> View:
        return SB3View()

    def _empty(self) -> Any:
        with jax.default_device(self._rows_on()):
            return jax.device_put(self._replay.init(self._example()), self._rows_on())

    def _rows_on(self) -> Any:
        return None if self.storage_device is None else jax.devices(self.storage_device)[0]

    def _forget(self) -> None:
        """There is no step that the next one could go on from."""
        self._announced: Any = None
        self._may_go_on, self._was_first = np.zeros((2, self.n_envs), bool)
        # transitions of each stream, on the device
        self._counts: Any = np.zeros(self.n_envs, np.int32)
        self.pos, self.full = 0, False
        self._is_torn = False

    def memory(self) -> str:
        """The bytes that the rows take, leaf by leaf."""
        return str(self._replay.memory(self._example()))

    @property
    def nbytes(self) -> int:
        return self._replay.memory(self._example()).total

    @property
    def _owner(self) -> np.ndarray:
        """Number of transitions that each stream holds: int32[n_envs]."""
        return np.asarray(self._counts)

    def size(self) -> int:
        """Transitions held for each environment; their mean where episodes of different lengths
        leave room for more or fewer."""
        return int(self._owner.sum() // self.n_envs)

    def reset(self) -> None:
        check_not_forked(f"this {type(self).__name__}", self._pid)
        with defer_interrupts():
            self._state = (
                method("clear")(self._replay, self._state)
                if is_alive(self._state)
                else self._empty()
            )
            self._forget()

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Append one transition of each environment, as Stable-Baselines3's algorithms do.

        Args:
          obs, next_obs: arrays `[n_envs, ...]`, or dicts of them; `next_obs` is the true one also
            where the episode ended.
          action, reward, done: `[n_envs, ...]`. infos: one dict for each environment.
        """
        self._check_whole()
        obs, next_obs = self._stored("obs", obs), self._stored("next_obs", next_obs)
        done = shaped("done", np.array(done, bool), (self.n_envs,))
        timeout = np.zeros_like(done)
        if self.handle_timeout_termination or self.copy_info_dict:
            timeout = shaped(
                "infos",
                np.array([info.get("TimeLimit.truncated", False) for info in infos], bool),
                (self.n_envs,),
            )
            timeout &= self.handle_timeout_termination
        goes_on = self._may_go_on & is_same(self._announced, obs, self.n_envs)
        step = Step(
            obs=obs,
            action=fit(
                "action",
                shaped(
                    "action",
                    self._flat(np.array(action, self._action_dtype)),
                    (self.n_envs, self.action_dim),
                ),
            ),
            reward=shaped("reward", np.array(reward, np.float32), (self.n_envs,)),
            terminated=done & ~timeout,
            truncated=timeout | ~done,
            final_obs=next_obs,
        )
        with self._changing():
            self._state, self._counts, rows = _add(
                self._replay, self._state, step, goes_on, self._was_first
            )
            self._announced, self._may_go_on, self._was_first = (
                next_obs,
                ~(done | timeout),
                ~goes_on,
            )
            self._after_add(rows, infos)
            self.pos += 1
            if self.pos == self.buffer_size:
                self.full, self.pos = True, 0
        problem = self._watch.after_add(self.n_envs, lambda: resets_of(self._state))
        if problem is not None:
            warnings.warn(
                f"add: {problem}. This buffer is for envs that reset within the step; next_obs is "
                "the observation before the reset",
                stacklevel=2,
            )

    def _after_add(self, rows: jax.Array, infos: list[dict[str, Any]]) -> None:
        """Keep what a buffer has beside the rows. `rows`: int32[n_envs], where the transitions
        lie."""

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Transitions, each one held as likely as any other. Draws from NumPy's generator as
        Stable-Baselines3's own buffer does, so that equal seeds give equal batches, until the first
        row is overwritten.

        Args:
          batch_size: transitions. env: normalizes observations and rewards.
        """
        self._check_not_empty()
        counts = self._owner
        if (counts == counts[0]).all():
            return self._get_samples(np.random.randint(0, counts[0], size=batch_size), env)
        ends = np.cumsum(counts)
        nth = np.random.randint(0, ends[-1], size=batch_size)
        env_indices = np.searchsorted(ends, nth, side="right")
        return self._read(nth - (ends - counts)[env_indices], env_indices, env)

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> Any:
        """The transitions with these numbers in their stream, 0 the oldest that is held, each of an
        environment drawn anew."""
        env_indices = np.random.randint(0, self.n_envs, size=len(batch_inds))
        if len(bad := batch_inds[(batch_inds < 0) | (batch_inds >= self._owner[env_indices])]):
            raise IndexError(
                f"{type(self).__name__}: there is no transition {bad[0]}: the streams hold "
                f"{self._owner.tolist()}"
            )
        return self._read(batch_inds, env_indices, env)

    def _read(self, nth: np.ndarray, env_indices: np.ndarray, env: VecNormalize | None) -> Any:
        # JAX compares buffers, and would take an interrupt in that for an error of theirs
        with defer_interrupts():
            return self._samples(
                _get(self._replay, self._state, env_indices.astype(np.int32), nth.astype(np.int32)),
                env,
            )

    def _samples(self, item: Any, env: VecNormalize | None) -> Any:
        """What Stable-Baselines3 learns from: of an `SB3Batch`."""
        if env is None:
            obs, next_obs, action, done, reward = to_torch(
                (item.obs, item.next_obs, item.action, item.done, item.reward)
            )
            obs, next_obs = self._observation(obs), self._observation(next_obs)
        else:
            action, done = to_torch((item.action, item.done))
            obs, next_obs = (self._normalized(x, env) for x in (item.obs, item.next_obs))
            reward = self.to_torch(self._normalized_reward(item, env))
        kind: Any = DictReplayBufferSamples if isinstance(obs, dict) else ReplayBufferSamples
        return kind(
            obs,
            self._cast(action, self._action_dtype),
            next_obs,
            self._cast(done),
            self._cast(reward),
        )

    def _normalized(self, obs: Any, env: VecNormalize) -> Any:
        if isinstance(self.observation_space, spaces.Dict):
            wide = {
                key: np.asarray(leaf).astype(self.observation_space[key].dtype)
                for key, leaf in obs.items()
            }
        else:
            wide = np.asarray(obs).astype(self.observation_space.dtype)
        return jax.tree.map(self.to_torch, env.normalize_obs(wide))

    def _normalized_reward(self, item: Any, env: VecNormalize) -> np.ndarray:
        return self._normalize_reward(np.asarray(item.reward), env)

    def _observation(self, obs: Any) -> Any:
        if isinstance(self.observation_space, spaces.Dict):
            return {
                key: self._cast(leaf, self.observation_space[key].dtype)
                for key, leaf in obs.items()
            }
        return self._cast(obs, self.observation_space.dtype)

    def _cast(self, tensor: torch.Tensor, dtype: Any = None) -> torch.Tensor:
        """On the device, and in 64 bits again where the space has them."""
        return tensor.to(self.device, TORCH_DTYPES.get(dtype, tensor.dtype))

    def _next_draw(self) -> tuple[np.uint32, np.uint32]:
        """A seed, from NumPy's generator, and the number of the draw."""
        if self._seed is None:
            self._seed = int(np.random.randint(2**31))
        self._num_draws = (self._num_draws + 1) & 0xFFFFFFFF
        return np.uint32(self._seed), np.uint32(self._num_draws)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Rows and what the host knows of them change together, or the buffer says that they did
        not. A signal waits meanwhile."""
        with defer_interrupts():
            before, self._is_torn = self._state, True
            try:
                yield
            except BaseException:
                self._is_torn = self._state is not before or not is_alive(before)
                raise
            self._is_torn = False

    def _check_whole(self) -> None:
        check_not_forked(f"this {type(self).__name__}", self._pid)
        if self._is_torn:
            raise RuntimeError(
                f"{type(self).__name__}: a change was interrupted, and what it wrote is not "
                "known; call reset()"
            )

    def _check_not_empty(self) -> None:
        self._check_whole()
        if not self._owner.any():
            raise ValueError(
                f"{type(self).__name__}: there is nothing to sample yet; add transitions first, "
                "or raise learning_starts"
            )

    def _flat(self, action: np.ndarray) -> np.ndarray:
        """Each env's in one axis, where they are as many as they should be."""
        is_alive = action.size == self.n_envs * self.action_dim and (
            self.n_envs == 1 or len(action) == self.n_envs
        )
        return action.reshape(self.n_envs, self.action_dim) if is_alive else action

    def __getattr__(self, name: str) -> Any:
        if name in _THEIR_ARRAYS:
            raise AttributeError(
                f"{type(self).__name__} has no array of {name}: steps are stored once, on the "
                "device; draw a sample"
            )
        raise AttributeError(name)

    @property
    def _action_dtype(self) -> Any:
        return self._maybe_cast_dtype(self.action_space.dtype)

    def _example(self) -> Step:
        def of(shape, dtype):
            return np.zeros(shape, jax.dtypes.canonicalize_dtype(dtype))

        if isinstance(self.observation_space, spaces.Dict):
            shapes: Any = self.obs_shape  # by key
            obs = {key: of(shapes[key], self.observation_space[key].dtype) for key in shapes}
        else:
            obs = of(self.obs_shape, self.observation_space.dtype)
        flag = np.zeros((), bool)
        action = of((self.action_dim,), self._action_dtype)
        return Step(
            obs=obs,
            action=action,
            reward=np.float32(0),
            terminated=flag,
            truncated=flag,
            final_obs=obs,
        )

    def _stored(self, where: str, obs: Any) -> Any:
        """A copy, of the space's shapes and dtypes: the caller may reuse its arrays."""
        if not isinstance(self.observation_space, spaces.Dict):
            array = np.array(obs, self.observation_space.dtype)
            return fit(where, shaped(where, array, (self.n_envs, *self.obs_shape)))
        if missing := [key for key in self.observation_space.spaces if key not in obs]:
            raise ValueError(f"{where}: missing {', '.join(missing)}")
        stored = {}
        for key, space in self.observation_space.spaces.items():
            name, array = f"{where}.{key}", np.array(obs[key], space.dtype)
            stored[key] = fit(name, shaped(name, array, (self.n_envs, *self.obs_shape[key])))  # type: ignore[index]
        return stored

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return {
            **{name: value for name, value in state.items() if name != "_pid"},
            "_state": jax.tree.map(np.asarray, self._state),
            "_counts": self._owner,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if hasattr(super(), "__setstate__"):
            super().__setstate__(state)  # type: ignore[misc]
        self._state = jax.device_put(self._state, self._rows_on())
        self._pid = os.getpid()


@functools.partial(program, changes=True)
def _add(
    buffer: ReplayBuffer, state: Any, step: Step, goes_on: Any, was_first: Any
) -> tuple[Any, jax.Array, jax.Array]:
    """Add a step. Returns the state, the transitions that each stream holds, and the row of its
    newest one: int32[E] both."""
    state = provisional.add(buffer, state, step, goes_on, was_first)
    layout, position = state.layout, state.streams.heads.position
    # the final row comes after it
    return state, _transitions(state).count(), layout.row(layout.envs(), layout.wrap(position - 2))


@program
def _get(buffer: ReplayBuffer, state: Any, env: jax.Array, nth: jax.Array) -> Any:
    """Read the `nth` transition of each stream `env`, int32[B] both; 0 is the oldest that is
    held."""
    return buffer.get(state, _transitions(state).select(env, nth)).experience


def _transitions(state: Any) -> Sampleable:
    """Return the set of all transitions, also those around which a view may not read."""
    none = jnp.zeros((state.layout.num_envs,), jnp.int32)
    return Sampleable(state.streams, state.episodes, none, none)
