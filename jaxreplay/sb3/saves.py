"""One checkpoint of a Stable-Baselines3 model and its replay buffer; needs `jaxreplay[checkpoint]`.

    model.learn(100_000, callback=SaveCallback("run", save_freq=10_000))

    model = resume("run", SAC("MlpPolicy", env, replay_buffer_class=jaxreplay.sb3.ReplayBuffer))
    model.learn(100_000 - model.num_timesteps, reset_num_timesteps=False)

A checkpoint has pickles, as the files of `model.save` do: load those that you trust.
"""

import inspect
import io
import pickle
import random
from typing import Any, TypeVar

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnvWrapper

from jaxreplay._util import transfers
from jaxreplay.sb3.base import DropInBuffer

M = TypeVar("M", bound=OffPolicyAlgorithm)
_EXTRAS = dict.fromkeys(("model", "buffer", "random", "envs", "statistics"), b"")


class SaveCallback(BaseCallback):
    """Save model and replay buffer together, during `learn` and at its end.

    It saves before the first step of a rollout. A save writes the rows that are new, and the whole
    model.

    Args:
      path: A folder or URL of this run alone, as for `Checkpointer`.
      save_freq: Least number of env steps between two saves.
      max_to_keep: Number of newest checkpoints to keep. Default: 2.
      save_envs: Save the envs, too, pickled, so that a resumed run goes on within their episodes,
        bit-identically. Otherwise they are reset; the statistics of a `VecNormalize` are kept.
        Default: False.
      verbose: As for all callbacks. Default: 0.
    """

    def __init__(
        self,
        path: Any,
        save_freq: int,
        max_to_keep: int = 2,
        save_envs: bool = False,
        verbose: int = 0,
    ):
        super().__init__(verbose)
        self.path, self.save_freq, self.max_to_keep = path, save_freq, max_to_keep
        self.save_envs = save_envs
        self._checkpointer: Any = None
        self._last = 0  # step of the last save

    def _on_training_start(self) -> None:
        self._last = self.model.num_timesteps
        buffer = _buffer_of("SaveCallback", self.model)
        # that of `resume`, or of an earlier `learn`, if it is of this path
        self._checkpointer = buffer._owner.last_checkpointer.at(self.path, buffer._owner.saved)
        self._checkpointer.max_to_keep = self.max_to_keep

    def _on_rollout_start(self) -> None:
        if self.model.num_timesteps - self._last >= self.save_freq:
            self._save()

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        if self.model.num_timesteps > self._last:
            self._save()

    @transfers.allows
    def _save(self) -> None:
        model, content = self.model, io.BytesIO()
        buffer = _buffer_of("SaveCallback", model)
        model.save(content)
        with buffer._monitor:
            state = buffer._owner.state
        rest = buffer._attributes()
        extras = {
            "model": content.getvalue(),
            "buffer": pickle.dumps(rest),
            # `load` seeds the action space anew
            "random": pickle.dumps((*_random_states(), model.action_space)),
            "envs": _pickled(model.get_env()) if self.save_envs else b"",
            "statistics": pickle.dumps(_statistics(model)),
        }
        self._checkpointer.save(state, model.num_timesteps, extras=extras)
        self._last = model.num_timesteps


@transfers.allows
def resume(path: Any, model: M, step: int | None = None) -> M:
    """Restore model and replay buffer from a checkpoint of `SaveCallback`.

    Args:
      path: The path of the callback.
      model: A new model, made as the saved one was. The result has its class, its devices, its
        replay buffer, and its envs unless the checkpoint has some.
      step: Number of env steps of the checkpoint. Default: the newest.

    Returns:
      The restored model, for `learn(..., reset_num_timesteps=False)`; `model` itself, if the path
      has no checkpoint yet.

    Raises:
      ValueError: The replay buffer is not one of `jaxreplay.sb3`, or has other arguments; or one
        of the models has a `VecNormalize`, and the other none.
    """
    buffer = _buffer_of("resume", model)
    checkpointer = buffer._owner.last_checkpointer.at(path, buffer._owner.saved)
    if not checkpointer.all_steps():
        return model
    state, found = checkpointer.restore(buffer._example(), step, extras=_EXTRAS)
    rest = pickle.loads(found["buffer"])
    if rest["_replay"] != buffer._replay:
        raise ValueError(
            f"resume: the saved replay buffer is {rest['_replay']}, the new one {buffer._replay}; "
            "make it with the same arguments"
        )
    has_envs = bool(found["envs"])
    env = pickle.loads(found["envs"]) if has_envs else model.get_env()
    if not has_envs:
        _take_statistics(model, pickle.loads(found["statistics"]))
    # `load` makes a buffer that is not used
    options = model.replay_buffer_kwargs
    small = {"buffer_size": 1, "replay_buffer_kwargs": {**options, "rows": "device"}}
    restored = type(model).load(
        io.BytesIO(found["model"]),
        env=env,
        device=model.device,
        custom_objects=small,
        force_reset=not has_envs,
    )
    restored.buffer_size, restored.replay_buffer_kwargs = model.buffer_size, options
    of_this_machine = "device", "storage_device", "rows"
    vars(buffer).update(rest | {name: getattr(buffer, name) for name in of_this_machine})
    buffer._begin(state)
    restored.replay_buffer = buffer
    if hasattr(buffer, "env"):  # for hindsight
        buffer.env = restored.get_env()
    *states, restored.action_space = pickle.loads(found["random"])
    python, numpy, of_cpu, of_gpus = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(of_cpu)
    torch.cuda.set_rng_state_all(of_gpus[: torch.cuda.device_count()])
    return restored


class _Pickler(pickle.Pickler):
    """Pickles wrappers of envs, too. They refuse, since they keep the members of their class; a
    `VecNormalize` leaves out what it wraps."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, VecEnvWrapper):
            return NotImplemented
        state = {name: each for name, each in vars(value).items() if name != "class_attributes"}
        return _made_again, (type(value), state)


def _made_again(kind: type, state: dict[str, Any]) -> Any:
    """Return the wrapper of envs that was pickled."""
    wrapper: Any = object.__new__(kind)
    members = {"class_attributes": dict(inspect.getmembers(kind))}
    vars(wrapper).update(state | members)
    return wrapper


def _pickled(envs: Any) -> bytes:
    _Pickler(content := io.BytesIO()).dump(envs)
    return content.getvalue()


def _statistics(model: Any) -> dict[str, Any] | None:
    """Return the running statistics of the envs' `VecNormalize`, None without one."""
    normalized = model.get_vec_normalize_env()
    if normalized is None:
        return None
    return {name: vars(normalized)[name] for name in {"obs_rms", "ret_rms"} & {*vars(normalized)}}


def _take_statistics(model: Any, saved: dict[str, Any] | None) -> None:
    """Give saved statistics to the envs' `VecNormalize`."""
    normalized = model.get_vec_normalize_env()
    if (normalized is None) != (saved is None):
        with_it, without = ("saved", "new") if normalized is None else ("new", "saved")
        raise ValueError(
            f"resume: the {with_it} model's envs are in a VecNormalize, the {without} one's are not"
        )
    if normalized is not None:
        vars(normalized).update(saved)


def _random_states() -> tuple[Any, ...]:
    """Return the states of the global generators that a model draws from: Python's, NumPy's, and
    PyTorch's of the CPU and of each GPU."""
    of_gpus = torch.cuda.get_rng_state_all()
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), of_gpus


def _buffer_of(where: str, model: Any) -> Any:
    buffer = getattr(model, "replay_buffer", None)
    if not isinstance(buffer, DropInBuffer):
        raise ValueError(
            f"{where}: the model's replay buffer is a {type(buffer).__name__}; make the model with "
            "replay_buffer_class=jaxreplay.sb3.ReplayBuffer"
        )
    return buffer
