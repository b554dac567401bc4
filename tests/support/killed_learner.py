"""A learner that continues from its last checkpoint, and is killed at any moment, or ends."""

import os
import pathlib
import signal
import sys
import threading

import numpy as np

import jaxreplay as jr
from tests.support import acting


def main(folder, number, is_last):
    buffer = jr.uniform(
        capacity=4 * 8192, num_envs=4, batch_size=64, autoreset="next_step", allow_mask=True
    )
    path = pathlib.Path(folder) / "replay"
    replay = jr.Replay(
        buffer, framework="numpy", samples_per_insert=4.0, timeout=60.0, example=acting.EXAMPLE
    )
    with replay:
        if path.exists():
            replay.load(path)
        had = len(replay)
        before = acting.check_rows(replay, 4)[1] if had else 0
        actors = replay.start(acting.endless, 2, block_length=8)
        if not is_last:
            seconds = np.random.default_rng(number).uniform(0.0, 0.6)
        for count, batch in enumerate(replay):
            acting.check_transitions(batch)
            if count == 0 and not is_last:
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            if count - count // 8 * 8 == 0:
                replay.save(path)
            if is_last and count == 40:
                break
        assert len(replay) > had
        actors.stop()
        after = acting.check_rows(replay, 4)[1]
        assert after == before + 4, "the resumed envs begin with a cut"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")
