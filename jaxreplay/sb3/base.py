"""The base of the drop-in buffers: Stable-Baselines3's methods, over rows on the device.

Stable-Baselines3 passes each transition with its next observation. Here that observation is stored
as the next step's own, or as the final row of its episode (`storage/newest_row.py`).
"""

import functools
import math
import operator
import warnings
from collections.abc import Iterable
from typing import Any, cast

import jax
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from jaxreplay._util import transfers
from jaxreplay.datasets.episodes import Episode, episode_parts, steps_of
from jaxreplay.inspection.contents import resets_of
from jaxreplay.samplers import Sampler
from jaxreplay.samplers.uniform import Uniform
from jaxreplay.sb3 import columns, rows
from jaxreplay.sb3.arrays import TORCH_DTYPES, each, fitted
from jaxreplay.sb3.batch import SB3View
from jaxreplay.sb3.record import Record
from jaxreplay.sb3.rows import RowsOwner, TransitionBuffer, TransitionsOnHost
from jaxreplay.stateful.lock import Monitor
from jaxreplay.stateful.owner import Draws
from jaxreplay.stateful.places import OnDevice
from jaxreplay.storage import ring
from jaxreplay.torch import to_torch
from jaxreplay.types import Step
from jaxreplay.views import View

_FLOAT, _BOOL = np.dtype(np.float32), np.dtype(bool)


class DropInBuffer(buffers.ReplayBuffer):
    """The base of the drop-in buffers.

    `observations`, `next_observations`, `actions`, `rewards`, `dones` and `timeouts` are read-only
    copies on the host, [buffer_size, n_envs, ...], made at the first use after an `add`. Row
    `pos - 1` is the newest. `dones` is 1 at the last step of each episode, and where the next step
    did not begin with `next_obs`; `timeouts` is 1 where that was no termination. Rows that were not
    written, or whose place final rows took, are 0.

    Args:
      buffer_size: Number of transitions over all envs. Each final row that is stored takes the
        place of one.
      observation_space: Observation space of one env; may be a Dict. 64-bit numbers are stored in
        32 bits, unless `jax_enable_x64` is set, and sampled in 64 bits.
      action_space: Action space of one env; 64-bit integers likewise.
      device: PyTorch device of sampled batches. Default: "auto", a GPU if there is one.
      n_envs: Number of parallel envs. Default: 1.
      optimize_memory_usage: Must be False: observations are always stored once. Default: False.
      handle_timeout_termination: Count a step with `TimeLimit.truncated` in its info as truncated,
        with `dones` 0; else it counts as terminated. Default: True.
      storage_device: Platform whose first device stores the rows, such as "cpu" for the host's
        memory. Default: JAX's default device.
      rows: Where the rows lie: "device"; or with an index on JAX's default device: "host", in the
        memory of the host; or the path of a folder on a disk of this machine, such as "/data/run7".
        Rows that the folder has already are there for `resume` until the first `add`. Default:
        "device".

    Raises:
      ValueError: `optimize_memory_usage` is set, or `rows` is no such place, or is given with
        `storage_device`.
    """

    copy_info_dict = False  # True keeps the steps' infos, for `HerReplayBuffer`

    @transfers.allows
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
        rows: Any = "device",
    ):
        # BaseBuffer's: that of ReplayBuffer allocates arrays
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
        self.rows = rows
        if rows != "device" and storage_device is not None:
            raise ValueError(
                f"{type(self).__name__}: rows={rows!r} takes no storage_device: the index lies on "
                "JAX's default device"
            )
        # one row more, for the final row of the newest episode; at least one window
        view = self._view()
        sizes: Any = {
            "capacity": max(self.buffer_size, view.window.length) * n_envs + n_envs,
            "num_envs": n_envs,
            "batch_size": 1,
        }
        self._replay = TransitionBuffer(
            **sizes, autoreset="same_step", sampler=self._sampler(), view=view
        )
        self._draws = Draws()
        self._own()
        self._forget(self._empty())

    def _own(self) -> None:
        """Make what is of this process: the lock, and the owner of the rows."""
        self._monitor = Monitor(f"this {type(self).__name__}")
        place = (
            OnDevice(self._replay, self.storage_device)
            if self.rows == "device"
            else TransitionsOnHost(self._replay, self.rows)
        )
        self._owner = RowsOwner(place, self._draws)

    def _sampler(self) -> Sampler:
        return Uniform()

    def _view(self) -> View:
        return SB3View()

    def _empty(self) -> Any:
        return self._owner.empty(self._example())

    def _forget(self, state: Any) -> None:
        """Begin with an empty state. The next step begins an episode in each env."""
        self._record = Record(self._example(), self.n_envs, self._replay.length)
        self.pos, self.full = 0, False
        self._begin(state)

    def _begin(self, state: Any) -> None:
        """Begin with a state, and the attributes that belong to it."""
        self._owner.draws = self._draws
        self._owner.begin(state, self._record)
        self._columns: dict[str, Any] = {}

    def memory(self) -> str:
        """Return a table of the rows' memory in bytes, leaf by leaf."""
        return str(self._replay.memory(self._example()))

    @property
    def nbytes(self) -> int:
        """Memory of the rows in bytes."""
        return self._replay.memory(self._example()).total

    def _recorded(self) -> Record:
        """Return the record of all steps."""
        with self._monitor:
            self._record.settle()
        return self._record

    @property
    def _state(self) -> Any:
        """The state, with all steps added, and all rows."""
        with self._monitor:
            return self._owner.whole[1]

    def __repr__(self) -> str:
        sizes = f"{self.size()} of {self.buffer_size} rows, n_envs={self.n_envs}"
        return f"{type(self).__name__}({sizes}, device={str(self.device)!r})"

    def size(self) -> int:
        """Return the number of transitions stored for each env, rounded down from their mean.

        Envs differ in it if their rings hold different numbers of final rows.
        """
        return int(self._recorded().num_transitions.sum() // self.n_envs)

    def reset(self) -> None:
        with self._monitor:
            if self._owner.is_lost:
                return self._forget(self._empty())
            self._owner.change(self._owner.place.method("clear"))
            self._forget(self._owner.state)

    def close(self) -> None:
        """Add the steps that wait, and let another buffer open the folder of the rows. Later calls
        raise a RuntimeError. Without a folder it does nothing."""
        with self._monitor:
            self._owner.close()

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Append one transition of each env.

        It warns once if the envs seem not to reset within the step, or if `next_obs` seems to be
        taken after the reset.

        Args:
          obs: Observation before the step, [n_envs, ...], or a dict of such arrays.
          next_obs: Observation after the step, as `obs`. At the end of an episode, its final
            observation.
          action: [n_envs, ...].
          reward: float[n_envs].
          done: bool[n_envs], True at the end of an episode.
          infos: One dict for each env. `TimeLimit.truncated` tells a timeout.

        Raises:
          ValueError: An array does not fit the spaces or the number of envs.
          RuntimeError: The rows were lost in an earlier call that failed: call `reset()`.
        """
        with self._monitor.without_delay():
            problem = self._add(obs, next_obs, action, reward, done, infos)
        if problem is not None:
            warnings.warn(
                f"add: {problem}. This buffer is for envs that reset within the step; next_obs is "
                "the observation before the reset",
                stacklevel=2,
            )

    def _add(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any
    ) -> str | None:
        """Do what `add` does. An interrupt leaves an intact step or none. Return the evidence for
        envs that reset otherwise, or None."""
        self._owner.check_not_lost()
        record, per_env = self._record, (self.n_envs,)
        step: list[Any] = [*self._stored("obs", obs), *self._stored("next_obs", next_obs)]
        action = np.asarray(action, self._action_dtype)  # a cast, as Stable-Baselines3 has it
        shape = (self.n_envs, self.action_dim)
        if action.shape != shape:
            is_of_each = self.n_envs in (1, *action.shape[:1])
            action = (
                action.reshape(shape) if is_of_each and action.size == math.prod(shape) else action
            )
        step.append(fitted("action", action, action.dtype, shape))
        step.append(fitted("reward", reward, _FLOAT, per_env))
        step.append(fitted("done", done, _BOOL, per_env))
        timeout: Any = False
        if self.handle_timeout_termination or self.copy_info_dict:
            timeout = [info.get("TimeLimit.truncated", False) for info in infos]
            timeout = fitted("infos", np.array(timeout, bool), _BOOL, per_env)
        step.append(timeout if self.handle_timeout_termination else False)
        if len(record) >= record.most_waiting:
            self._flush()
        watch, problem = self._owner.watch, None
        if not len(record) and watch.is_due:
            problem = watch.look(transfers.allows(lambda: resets_of(self._state)))
        self._columns = {}
        if self.copy_info_dict:
            with self._monitor:  # the step and its infos change together
                record.put(step)
                record.settle()
                self._store_infos(record.newest_rows, infos)
        else:
            record.put(step)
        num_laps, self.pos = divmod(record.num_steps, self.buffer_size)
        self.full = num_laps > 0
        watch.count(self.n_envs)
        return problem

    def add_episodes(self, episodes: Iterable[Episode]) -> None:
        """Append the transitions of whole episodes, such as demonstrations.

        They are divided among the envs, equally many for each; if that leaves a rest, the first few
        are appended once more. All episodes are in memory at once.

        Args:
          episodes: `jaxreplay.datasets.Episode`s, whose observations and actions fit the spaces.

        Raises:
          ValueError: There is no transition, or an array does not fit the spaces.
        """
        parts = episode_parts("add_episodes", episodes)
        steps = [step for _, rows in parts for step, _ in steps_of(rows, "same_step")]
        if not (total := sum(len(one.terminated) for one in steps)):
            raise ValueError("add_episodes: the episodes have no transitions")
        whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *steps)
        order = np.resize(np.arange(total), (self.n_envs, -(-total // self.n_envs)))
        for nth in order.T:
            step = jax.tree.map(lambda leaf, nth=nth: leaf[nth], whole)
            infos = [{"TimeLimit.truncated": bool(cut)} for cut in step.truncated]
            done = step.terminated | step.truncated
            self.add(step.obs, step.final_obs, step.action, step.reward, done, infos)

    def _flush(self) -> None:
        """Add the steps that wait."""
        with self._monitor:
            self._owner.flush()

    def _store_infos(self, rows: np.ndarray, infos: list[dict[str, Any]]) -> None:
        """Store the infos of a step, for a subclass with `copy_info_dict`.

        Args:
          rows: int64[n_envs], the rows of the step's transitions.
          infos: One dict for each env.
        """

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Sample transitions uniformly, with replacement.

        It uses NumPy's generator as Stable-Baselines3's buffer does. Equal seeds give equal batches
        until the first row is overwritten.

        Args:
          batch_size: Number of transitions B.
          env: Normalizes observations and rewards. Default: they are as stored.

        Returns:
          `ReplayBufferSamples`, or `DictReplayBufferSamples` for Dict observations: tensors
          [B, ...] on `device`.

        Raises:
          ValueError: The buffer is empty.
          RuntimeError: The rows were lost in an earlier call that failed: call `reset()`.
        """
        with self._monitor:
            counts = self._check_not_empty()
            if self.n_envs == 1 or (counts == counts[0]).all():
                nth = np.random.randint(0, counts[0], size=batch_size)
                return self._read(nth, np.random.randint(0, self.n_envs, size=batch_size), env)
            ends = np.cumsum(counts)
            nth = np.random.randint(0, ends[-1], size=batch_size)
            env_indices = np.searchsorted(ends, nth, side="right")
            return self._read(nth - (ends - counts)[env_indices], env_indices, env)

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> Any:
        """Return transitions by row, as of `observations`, each of a random env."""
        env_indices = np.random.randint(0, self.n_envs, size=len(batch_inds))
        with self._monitor:
            counts, newest = self._recorded().num_transitions, self._record.num_steps - 1
            nth = counts[env_indices] - 1 - ring.position_of(newest - batch_inds, self.buffer_size)
            is_bad = (batch_inds < 0) | (batch_inds >= self.buffer_size) | (nth < 0)
            if len(bad := batch_inds[is_bad]):
                raise IndexError(
                    f"{type(self).__name__}: there is no transition {bad[0]}: the streams hold "
                    f"{counts.tolist()}"
                )
            return self._read(nth, env_indices, env)

    def _read(self, nth: np.ndarray, env_indices: np.ndarray, env: VecNormalize | None) -> Any:
        """Return transitions, while signals wait: JAX compares buffers, and reports an interrupt
        meanwhile as an error of `__eq__`."""
        if self._owner.is_in_memory:
            found = self._record.rows_of(env_indices, nth)
            convert = torch.from_numpy if env is None else np.asarray
            return self._samples(rows.taken(self._owner.state, *found, convert), env)
        chosen = np.array([env_indices, nth], np.int32)
        items = self._owner.place.read(self._owner, rows.items, len(nth), chosen)
        convert = to_torch if env is None else functools.partial(jax.tree.map, np.asarray)
        obs, action, ends = convert((items.obs, items.action, items.done))
        obs, next_obs = (each(operator.itemgetter(k), obs) for k in (0, 1))
        ends = {"done": ends[0], "reward": ends[1]}
        return self._samples(items.replace(obs=obs, next_obs=next_obs, action=action, **ends), env)

    def _samples(self, item: Any, env: VecNormalize | None) -> Any:
        """Return an `SB3Batch` as Stable-Baselines3's samples."""
        if env is None:
            found = item.obs, item.next_obs, item.action, item.done, item.reward
            found = found if isinstance(item.done, torch.Tensor) else to_torch(found)
            obs, next_obs, action, done, reward = found
            obs, next_obs = (each(self._cast, one, self._obs_dtypes) for one in (obs, next_obs))
        else:
            action = self.to_torch(np.asarray(item.action))
            done = self.to_torch(np.asarray(item.done))
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
        as_given = lambda leaf, dtype: np.asarray(leaf).astype(dtype)
        wide = each(as_given, obs, self._obs_dtypes)
        return each(self.to_torch, env.normalize_obs(wide))

    def _normalized_reward(self, item: Any, env: VecNormalize) -> np.ndarray:
        return self._normalize_reward(np.asarray(item.reward), env)

    def _cast(self, tensor: torch.Tensor, dtype: Any = None) -> torch.Tensor:
        """Move a tensor to `device`, in 64 bits if the space's dtype has them."""
        return tensor.to(self.device, TORCH_DTYPES.get(dtype, tensor.dtype))

    def _check_not_empty(self) -> np.ndarray:
        """Return the number of transitions in each env's ring: int64[n_envs]. Signals must wait."""
        self._owner.check_not_lost()
        self._record.settle()
        counts = self._record.num_transitions
        if not counts.any():
            raise ValueError(
                f"{type(self).__name__}: there is nothing to sample yet; add transitions first, "
                "or raise learning_starts"
            )
        return counts

    @transfers.allows
    def __getattr__(self, name: str) -> Any:
        if name not in columns.NAMES:
            raise AttributeError(name)
        self._owner.check_not_lost()
        if name not in self._columns:
            self._columns[name] = self._column(name)
        return self._columns[name]

    def _column(self, name: str) -> Any:
        record = self._recorded()
        column = columns.read(
            name,
            self._replay,
            self._state,
            record.num_transitions,
            record.num_steps,
            self.buffer_size,
        )
        dtype: Any = np.float32
        if name in ("dones", "timeouts") and record.num_steps:  # an episode may go on
            column[self.pos - 1, record.may_go_on] = False
        elif name == "actions":
            dtype = self._action_dtype
        elif name.endswith("observations"):
            dtype = self._obs_dtypes
        return jax.tree.map(_read_only, column, dtype)

    @functools.cached_property
    def _action_dtype(self) -> Any:
        return self._maybe_cast_dtype(self.action_space.dtype)

    def _example(self) -> Step:
        def of(dtype, shape):
            return np.zeros(shape, jax.dtypes.canonicalize_dtype(dtype))

        obs = jax.tree.map(of, self._obs_dtypes, cast(Any, self.obs_shape))
        flag = np.zeros((), bool)
        action = of(self._action_dtype, (self.action_dim,))
        return Step(
            obs=obs,
            action=action,
            reward=np.float32(0),
            terminated=flag,
            truncated=flag,
            final_obs=obs,
        )

    def _stored(self, where: str, obs: Any) -> list[np.ndarray]:
        """Return the leaves with the space's shapes, in dtypes that can be stored."""
        specs = self._obs_specs
        if not isinstance(specs, dict):
            return [fitted(where, obs, *specs)]
        if missing := [key for key in specs if key not in obs]:
            raise ValueError(f"{where}: missing {', '.join(missing)}")
        return [fitted(f"{where}.{key}", obs[key], *spec) for key, spec in specs.items()]

    @functools.cached_property
    def _obs_specs(self) -> Any:
        """Dtype and shape [n_envs, ...] of an observation, or of each leaf by its key, in JAX's
        order of a dict."""
        space, shapes = self.observation_space, cast(Any, self.obs_shape)
        if not isinstance(space, spaces.Dict):
            return space.dtype, (self.n_envs, *shapes)
        return {key: (space[key].dtype, (self.n_envs, *shapes[key])) for key in sorted(shapes)}

    @functools.cached_property
    def _obs_dtypes(self) -> Any:
        """Dtype of an observation, or of each leaf by its key."""
        space = self.observation_space
        if not isinstance(space, spaces.Dict):
            return space.dtype
        return {key: one.dtype for key, one in space.items()}

    def _attributes(self) -> dict[str, Any]:
        """Return the attributes that are saved with a state."""
        state: Any = super().__getstate__()
        left_out = ("_monitor", "_owner", "_columns", "_obs_dtypes", "_obs_specs")
        return {name: value for name, value in state.items() if name not in left_out}

    @transfers.allows
    def __getstate__(self) -> dict[str, Any]:
        if self.rows not in ("device", "host"):
            raise TypeError(
                f"{type(self).__name__}: a buffer whose rows are in files is not pickled; save it "
                "by jaxreplay.sb3.SaveCallback"
            )
        rows = jax.tree.map(np.asarray, self._state)
        return {**self._attributes(), "_rows": rows}

    @transfers.allows
    def __setstate__(self, state: dict[str, Any]) -> None:
        whole = state["_rows"]
        state = {name: value for name, value in state.items() if name != "_rows"}
        vars(self).update(state)
        if hasattr(super(), "__setstate__"):
            super().__setstate__(state)  # type: ignore[misc]
        self._own()
        self._begin(self._owner.place.adopt(whole))


def _read_only(array: np.ndarray, dtype: Any) -> np.ndarray:
    array = array.astype(dtype)
    array.flags.writeable = False
    return array
