"""What a buffer does with its state once the arguments are checked: write, tell the sampler; draw, read the view."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxreplay import bits, episode_table, platforms
from jaxreplay.drawable import Drawable, change_of, cut_rows, still_pending
from jaxreplay.stream_state import StreamState
from jaxreplay.streams import Streams
from jaxreplay.types import Index, Sample
from jaxreplay.views import Anchor
from jaxreplay.window import Window

_FOR_THE_VIEW = 1  # the sampler draws its bits for purpose 0


@dataclasses.dataclass(frozen=True)
class Layout:
    """What decides the meaning of a state's arrays: where rows lie, and when one of them can be drawn."""

    streams: Streams
    window: Window
    exponent: float | None = None  # of the priorities in the sampler's tree: each is stored as priority ** exponent


class ReplayState(flax.struct.PyTreeNode):
    """Everything that a buffer holds; E streams. What returns a new one takes the old one over: donate it."""

    streams: StreamState
    pending: jax.Array | None  # int32[E]: newest rows of each stream whose window is not known yet; None if the episode table tells
    cut: jax.Array | None  # int32[E]: oldest rows of each stream whose look-back is overwritten; None without a bounded look-back
    sampler: Any
    episodes: episode_table.EpisodeState | None  # None unless `keep_episodes`, or the view or the sampler looks episodes up
    layout: Layout = flax.struct.field(pytree_node=False)  # static: of the buffer that it is of


def layout_of(replay: Any, platform: str | None = None) -> Layout:
    """Of a buffer's states on a platform; None: the buffer's, or where new arrays go."""
    platform = platform or replay.platform or platforms.default()
    exponent = getattr(replay.sampler, "exponent", None)
    return Layout(dataclasses.replace(replay.streams, platform=platform), replay.window, exponent)


def empty(replay: Any, example: Any, platform: str | None = None) -> ReplayState:
    """A state without rows. `example`: one env's step, or item, checked: shapes and dtypes. `platform`: as for `layout_of`."""
    layout = layout_of(replay, platform)
    streams = layout.streams
    return ReplayState(
        streams=streams.init(example),
        pending=None if replay.window.after is None else jnp.zeros((replay.num_envs,), jnp.int32),
        cut=jnp.zeros((replay.num_envs,), jnp.int32) if replay.window.before else None,
        sampler=replay.sampler.init(streams, replay.window),
        episodes=episode_table.init(streams, example) if replay.has_table else None,
        layout=layout,
    )


def drawable(replay: Any, state: ReplayState) -> Drawable:
    return Drawable.of(state.layout.streams, replay.window, state.streams, state.episodes, state.pending, state.cut)


def write(replay: Any, state: ReplayState, steps: Any, mask: jax.Array | None, priority: jax.Array | None) -> ReplayState:
    """Leaves `[T, E, ...]`, few enough that neither the rows that wait nor those that a new one looks back to are overwritten."""
    streams, window = state.layout.streams, replay.window
    before = drawable(replay, state)
    if state.cut is not None:
        # Always so, which XLA cannot know: the write then depends on the flags that the last one read, and copies none.
        is_ready = jnp.broadcast_to(state.cut >= 0, (jax.tree.leaves(steps)[0].shape[0], streams.num_envs))
        mask = is_ready if mask is None else mask & is_ready
    counted, written = streams.count(state.streams, steps, mask)
    pending = state.pending if window.after is None else still_pending(window, streams.length, before.pending, written)
    table, noted = episode_table.count(streams, state.streams, state.episodes, written) if state.episodes else (None, None)
    after = state.replace(streams=counted, pending=pending, episodes=table)
    if streams.platform == "gpu":
        # The least of the two is the first one, in a way that XLA cannot know: else it would keep a copy of what is counted on.
        waited = before.pending if window.after is None else jnp.minimum(before.pending, window.after)
        after, written, noted, waited = _counted_first(after, written, noted, waited)
        before = dataclasses.replace(before, pending=waited)
    after = after.replace(
        streams=streams.put(after.streams, steps, written), episodes=noted and episode_table.put(_not_none(after.episodes), noted)
    )
    if window.before:
        after = after.replace(cut=cut_rows(window, streams, after.streams))
    change = change_of(before, drawable(replay, after), written) if window.is_bounded else None
    if priority is not None and streams.rows_per_step(steps) == 2:  # a tail has none
        priority = jnp.stack([priority, jnp.zeros_like(priority)], axis=1).reshape(-1, streams.num_envs)
    return after.replace(sampler=replay.sampler.observe(streams, state.sampler, change, priority))


def _counted_first(state: ReplayState, *others: Any) -> tuple[Any, ...]:
    """All that is counted comes before all that is put, in one kernel: into each write XLA would fuse the counting that it needs."""
    rows = {name: getattr(state.streams, name) for name in ("steps", "flags", "rank")}
    table = {name: getattr(state.episodes, name) for name in ("ordinal", "last", "first")} if state.episodes else {}
    small = state.replace(
        streams=state.streams.replace(**dict.fromkeys(rows)),
        episodes=state.episodes and state.episodes.replace(**dict.fromkeys(table)),
        sampler=None,
    )
    small, *rest = jax.lax.optimization_barrier((small, *others))
    whole = small.replace(
        streams=small.streams.replace(**rows), episodes=small.episodes and small.episodes.replace(**table), sampler=state.sampler
    )
    return whole, *rest


def draw(replay: Any, state: ReplayState, key: jax.Array, batch_size: int, can_sample: jax.Array) -> tuple[ReplayState, Sample]:
    sampler, row, probability = replay.sampler.draw(state.sampler, drawable(replay, state), key, batch_size)
    if replay.sampler.consumes:  # before `can_sample` nothing is handed out, so nothing is taken
        sampler = jax.tree.map(lambda new, old: jnp.where(can_sample, new, old), sampler, state.sampler)
    words = bits.draw(key, batch_size, _FOR_THE_VIEW) if replay.view.draws else None
    batch = read(replay, state, state.layout.streams.index(state.streams, row), probability, can_sample & (probability > 0), words)
    return state.replace(sampler=sampler), batch


def get(replay: Any, state: ReplayState, row: jax.Array, is_valid: jax.Array, lap: jax.Array | None, key: jax.Array | None) -> Sample:
    """Rows int32[...] in `[0, capacity)`, of which those that are not valid are none; `lap` as of their draw, where it is known."""
    current, members = state.layout.streams.index(state.streams, row), drawable(replay, state)
    is_valid &= members.contains(row) & (lap is None or current.lap == lap)
    words = None
    if replay.view.draws:
        assert key is not None
        words = jax.tree.map(lambda word: word.reshape(row.shape), bits.draw(key, row.size, _FOR_THE_VIEW))
    return read(replay, state, current, replay.sampler.probability(state.sampler, members, row), is_valid, words)


def read(replay: Any, state: ReplayState, index: Index, probability: jax.Array, is_valid: jax.Array, words: Any) -> Sample:
    """The index of an item that is not valid has a lap that no row has: an update by it is ignored, also once the row is drawable."""

    def item(row, words):
        own = None if words is None else jnp.stack(words)
        return replay.view.read(Anchor(state.layout.streams, state.streams, row, state.episodes, own))

    for _ in index.row.shape:
        item = jax.vmap(item)
    lap = jnp.where(is_valid, index.lap, index.lap ^ jnp.uint32(2**31))
    return Sample(item(index.row, words), Index(index.row, lap), jnp.where(is_valid, probability, 0), is_valid)


def _not_none(value: Any) -> Any:
    assert value is not None
    return value
