"""The programs to compile: each buffer's calls, and the fused loop of acting, adding, sampling and
updating."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from devices import Compiled, compiled

import jaxreplay as jr
from jaxreplay.storage import platforms

NUM_ENVS, STEPS, NUM_ROWS, NUM_IMAGES = 64, 100, 1_000_000 // 64 * 64, 102_400
Program = tuple[Callable[..., Any], tuple[Any, ...], int | None]


@dataclasses.dataclass(frozen=True)
class Case:
    """A buffer and its rows.

    Attributes:
      name: Name of the case.
      make: Factory of the buffer, with the arguments `capacity`, `num_envs`, `batch_size` and so
        on.
      obs: One env's observation.
      capacity: Number of rows.
    """

    name: str
    make: Callable[..., Any]
    obs: Any
    capacity: int
    autoreset: str = "same_step_no_final_obs"
    can_end_streams: bool = True  # False: the kernels of `end_streams` are not recorded yet
    num_agents: int | None = None

    def replay(self, platform: str, batch_size: int) -> Any:
        buffer = self.make(
            capacity=self.capacity,
            num_envs=NUM_ENVS,
            batch_size=batch_size,
            autoreset=self.autoreset,
        )
        return dataclasses.replace(buffer, platform=platform)

    def example(self) -> jr.Step:
        agents = () if self.num_agents is None else (self.num_agents,)
        number, flag = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct(agents, bool)
        return jr.Step(
            obs=self.obs,
            action=jax.ShapeDtypeStruct((), jnp.int32),
            reward=number,
            terminated=flag,
            truncated=flag,
            final_obs=self.obs if self.autoreset == "same_step" else None,
        )


def _hindsight(**shared: Any) -> Any:
    return jr.hindsight(
        jr.uniform(**shared), lambda achieved, goal, step: -jnp.sum(jnp.abs(achieved - goal))
    )


def _blend(**shared: Any) -> Any:
    parts = {"uniform": (jr.Uniform(), 0.5), "priority": (jr.Prioritized(), 0.5)}
    return jr.transitions(**shared, sampler=jr.blend(**parts))


def _numbers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _bytes(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.uint8)


_GOALS = {"observation": _numbers(8), "achieved_goal": _numbers(3), "desired_goal": _numbers(3)}
NUMBERS = (
    Case("uniform", jr.uniform, _numbers(8), NUM_ROWS),
    Case("prioritized", jr.prioritized, _numbers(8), NUM_ROWS),
    Case(
        "sequences",
        lambda **shared: jr.sequences(**shared, length=20, burn_in=10, period=10),
        _numbers(8),
        NUM_ROWS,
    ),
    Case(
        "frame_stack",
        lambda **shared: jr.frame_stack(jr.uniform(**shared), 4, axis=0),
        _numbers(8),
        NUM_ROWS,
    ),
    Case("hindsight", _hindsight, _GOALS, NUM_ROWS, autoreset="same_step"),
    Case(
        "hindsight, prioritized",
        lambda **shared: jr.hindsight(
            jr.prioritized(**shared),
            lambda achieved, goal, step: -jnp.sum(jnp.abs(achieved - goal)),
            unfinished=True,
        ),
        _GOALS,
        NUM_ROWS,
        autoreset="next_step",
        can_end_streams=False,
    ),
    Case(
        "chunks",
        lambda **shared: jr.chunks(**shared, obs=(-1, 0), action=16),
        _numbers(8),
        NUM_ROWS,
        can_end_streams=False,
    ),
    Case(
        "several agents",
        lambda **shared: jr.uniform(**shared, n_step=3, num_agents=4),
        _numbers(8),
        NUM_ROWS,
        can_end_streams=False,
        num_agents=4,
    ),
    Case("future_pairs", jr.future_pairs, _numbers(8), NUM_ROWS, can_end_streams=False),
    Case(
        "prioritized, masked",
        lambda **shared: jr.prioritized(**shared, allow_mask=True),
        _numbers(8),
        NUM_ROWS,
    ),
    Case("blend", _blend, _numbers(8), NUM_ROWS, can_end_streams=False),
    Case(
        "writable", lambda **shared: jr.uniform(**shared, allow_write=True), _numbers(8), NUM_ROWS
    ),
)
IMAGES = (
    Case("uniform, images", jr.uniform, _bytes(84, 84, 4), NUM_IMAGES),
    Case("prioritized, images", jr.prioritized, _bytes(84, 84, 4), NUM_IMAGES),
    Case(
        "frame_stack, images",
        lambda **shared: jr.frame_stack(jr.uniform(**shared), 4, axis=0),
        _bytes(84, 84),
        2 * NUM_IMAGES,
    ),
)
CASES = {case.name: case for case in (*NUMBERS, *IMAGES)}


def programs(case: Case, platform: str, batch_size: int) -> dict[str, Program]:
    """Map each program's name to a function, its arguments' shapes and dtypes, and the number of
    the donated argument."""
    buffer = case.replay(platform, batch_size)
    state = jax.eval_shape(buffer.init, case.example())
    step = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((NUM_ENVS, *leaf.shape), leaf.dtype), case.example()
    )
    block = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((STEPS, *leaf.shape), leaf.dtype), step)
    key, keys = (
        jax.eval_shape(lambda n=n: jax.random.split(jax.random.key(0), n)) for n in (1, STEPS)
    )
    key = jax.ShapeDtypeStruct((), key.dtype)
    batch = jax.eval_shape(buffer.sample, state, key)
    found: dict[str, Program] = {
        "add": (buffer.add, (state, step), 0),
        "extend": (buffer.extend, (state, block), 0),
        "sample": (buffer.sample, (state, key), None),
        "loop": (
            lambda carry, xs: jax.lax.scan(
                lambda carry, x: (iteration(buffer, carry, *x), None), carry, xs
            )[0],
            ((state, batch), (block, keys)),
            0,
        ),
    }
    if case.can_end_streams:
        mask = jax.ShapeDtypeStruct((NUM_ENVS,), bool)
        found["end_streams"] = (buffer.end_streams, (state, mask), 0)
    if not buffer.layout().lockstep:
        some = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((16, *leaf.shape[1:]), leaf.dtype), step
        )
        envs = jax.ShapeDtypeStruct((16,), jnp.int32)
        found["add to some"] = (
            lambda state, some, envs: buffer.add(state, some, envs=envs),
            (state, some, envs),
            0,
        )
    if buffer.allow_write:
        found["write"] = (
            lambda state, index, reward: buffer.write(state, index, {"reward": reward}),
            (state, batch.index, batch.probability),
            0,
        )
    if buffer.sampler.has_priorities:
        found["update"] = (buffer.update_priorities, (state, batch.index, batch.probability), 0)
    return found


def iteration(buffer: Any, carry: Any, step: Any, key: Any) -> Any:
    state = buffer.add(carry[0], step)
    batch = buffer.sample(state, key)
    if buffer.sampler.has_priorities:
        state = buffer.update_priorities(state, batch.index, jnp.abs(batch.experience.reward))
    return state, batch


def storage(case: Case, platform: str) -> Any:
    """Return the shapes and dtypes of the stored leaves."""
    return jax.eval_shape(case.replay(platform, 1).init, case.example()).rows.steps


def compile_case(case: Case, device: str, platform: str, name: str, batch_size: int) -> Compiled:
    function, arguments, donated = programs(case, platform, batch_size)[name]
    return compiled(device, function, arguments, donated)


def groups_programs(platform: str) -> dict[str, Program]:
    """Map the names of the programs of groups to them."""
    num, key = 64, jax.eval_shape(lambda: jax.random.key(0))
    items = {"x": jax.ShapeDtypeStruct((num, 8), jnp.float32)}
    number = jax.ShapeDtypeStruct((num,), int)
    groups = jr.Groups(group_size=16, capacity=NUM_ROWS // 16, batch_size=16)
    before, platforms.default = platforms.default, lambda: platform
    state = jax.eval_shape(groups.init, {"x": _numbers(8)})
    platforms.default = before
    return {
        "add": (groups.add, (state, items, number, number), 0),
        "pop": (groups.pop, (state, key), 0),
    }
