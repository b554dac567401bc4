"""A learner that continues from its last checkpoint, and is killed at any moment, or ends."""

import functools
import os
import pathlib
import signal
import sys
import threading

import numpy as np

import jaxreplay as jr
from tests.support import acting


def main(folder, number, last, address=None):
    on = None
    if address is not None:
        import ray

        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        on = jr.actors.ray(name="killed_learner", num_cpus=0.05)
    buffer = jr.uniform(
        capacity=4 * 8192, num_envs=4, batch_size=64, autoreset="next_step", allow_mask=True
    )
    path = pathlib.Path(folder) / "replay"
    replay = jr.Replay(
        buffer, framework="numpy", samples_per_insert=4.0, timeout=300.0, example=acting.EXAMPLE
    )
    with replay:
        had = before = 0
        if path.exists():
            replay.load(path)
            had, (_, before) = len(replay), acting.check_rows(replay, 4, gaps=on and 4 * number)
        act = functools.partial(acting.alone, "tabnanny")
        actors = replay.start(act, 1 if on is None else 2, block_length=8, on=on)
        if on is None:
            pids = [str(one.process.pid) for _, one in actors._engine._of.values()]
            (pathlib.Path(folder) / "actors").write_text(" ".join(pids))
        seconds = np.random.default_rng(number).uniform(0.0, 0.6)
        for count, batch in enumerate(replay):
            acting.check_transitions(batch)
            if count - count // 8 * 8 == 0:
                replay.save(path)
                _, after = acting.check_rows(replay, 4, gaps=on and 4 * number)
                if number == last and count >= 40 and after >= (4 if on else before + 4):
                    break  # all actors have begun
            if count == 0 and number < last:
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        assert len(replay) > had
        actors.stop()
        _, after = acting.check_rows(replay, 4, gaps=on and 4 * number)
        assert after == (4 if on else before + 4), "no incarnation but these"


if __name__ == "__main__":
    import tabnanny  # noqa: F401 (no actor imports it)

    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
