"""The methods of buffers that take a state, in one table. Every form of a buffer reads it: jitted,
sharded, tiered, or kept by a `Replay`."""

from typing import Literal, NamedTuple


class Verb(NamedTuple):
    """Facts about a method that a form of a buffer has to know.

    Attributes:
      changes: What it changes and donates: "state", its "sampler" alone, or None.
      axis: Axis of the envs, or of the items, in its arrays: shards divide it. None if each shard
        gets the whole arrays.
      reads: Whether it returns values of rows.
      takes_steps: Whether its first argument has the fields of a step.
      counts: Name of the buffer's attribute with the number of rows of a call; None for a call
        that may touch many.
      static: Static arguments by name, and their places if they may be given by place: 2 is that
        after the buffer and the state.
      is_compiled: Whether `jaxreplay.jit` compiles it.
      copies_little: Whether the new state has the large arrays of the old one, so that little is
        copied where nothing is donated. Other methods that change a state warn of a copy.
      of_replay: What a `Replay` has in its place. Default: the same.
    """

    changes: Literal["state", "sampler"] | None = None
    axis: int | None = None
    reads: bool = False
    takes_steps: bool = False
    counts: str | None = None
    static: tuple[int | str, ...] = ()
    is_compiled: bool = True
    copies_little: bool = False
    of_replay: str | None = None


_BATCH = {"reads": True, "counts": "batch_size", "static": (3, "batch_size")}

VERBS = {
    "add": Verb("state", 0, takes_steps=True, counts="num_envs"),
    "extend": Verb("state", 1, takes_steps=True, of_replay="replay.add(steps)"),
    "sample": Verb(None, 0, **_BATCH),
    "pop": Verb("state", 0, **_BATCH, copies_little=True, of_replay="replay.sample()"),
    "get": Verb(None, 0, reads=True),
    "update_priorities": Verb("sampler", 0),
    "reset_max_priority": Verb("sampler"),
    "write": Verb("state", 0),
    "map_rows": Verb("state", static=(2, "block")),
    "size": Verb(of_replay="len(replay)"),
    "can_sample": Verb(),
    "can_add": Verb(static=(2, "num_steps"), of_replay="replay.buffer.can_add(replay.state)"),
    "metrics": Verb(),
    "age": Verb(None, 0),
    "episode_table": Verb(is_compiled=False),
    "clear": Verb("state", copies_little=True),
    "close": Verb("state", copies_little=True),  # of `Groups`
    "end_streams": Verb("state", 0),
    "drop": Verb("state", 0),
    "merge": Verb("state", 0),
    "adopt": Verb(None, 0, of_replay="Replay(buffer, state=state)"),
}
