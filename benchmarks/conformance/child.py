"""A process that saves or loads: `child.py adapter.py Class action folder`. Exit status 3: not
offered."""

import importlib.util
import pathlib
import sys
import threading

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from replay import NotOffered, Options
from streams import Stream

source, name, action, folder = sys.argv[1:]
spec = importlib.util.spec_from_file_location("adapter", source)
adapter = importlib.util.module_from_spec(spec)
sys.modules["adapter"] = adapter
spec.loader.exec_module(adapter)
make = getattr(adapter, name)
path = folder + "/save"


def held():
    """Return the MB that the process holds, without pages of files, which the system may drop."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024


def most_held(call):
    """Return the most MB that the process holds during a call."""
    most, done = held(), threading.Event()

    def watch():
        nonlocal most
        while not done.wait(0.005):
            most = max(most, held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    call()
    done.set()
    watcher.join()
    return most


def main():
    if action == "memory":
        before = held()
        options = Options(capacity=40_000, obs=np.zeros(10_000, np.uint8), autoreset="same_step")
        replay = make(options)
        Stream(options, lengths=(50, 50)).fill(replay, 40_000)
        replay.sample()
        filled = held()
        print(filled - before, most_held(lambda: replay.save(path)) - filled)
        return
    options = Options(
        capacity=4_000, num_envs=2, obs=np.zeros(500, np.float32), autoreset="same_step"
    )
    replay, envs = make(options), Stream(options, lengths=(5, 20))
    if action == "saves":
        envs.fill(replay, 3_000)
        replay.save(path)
        print("first", flush=True)
        while True:
            envs.fill(replay, 50)
            replay.save(path)
    replay.load(path)
    for _ in range(20_000):  # more steps than were saved
        envs.turn()
    numbers = envs.check(replay.sample())
    print("right" if len(numbers) else "empty")


try:
    main()
except NotOffered:
    sys.exit(3)
