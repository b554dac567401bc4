"""A process that saves or loads: `child.py adapter.py Class action folder`. Exit status 3: not
offered."""

import importlib.util
import pathlib
import resource
import sys

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


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MB, as Linux has it


def held():
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize() / 2**20


def main():
    if action == "memory":
        before = held()
        options = Options(capacity=40_000, obs=np.zeros(10_000, np.uint8), autoreset="same_step")
        replay = make(options)
        Stream(options, lengths=(50, 50)).fill(replay, 40_000)
        replay.sample()
        filled, most = held(), peak()
        replay.save(path)
        print(filled - before, max(peak() - most, 0) if peak() > most else 0.0)
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
    envs.fill(type("Nothing", (), {"add": lambda self, turn: None})(), 200_00)
    numbers = envs.check(replay.sample())
    print("right" if len(numbers) else "empty")


try:
    main()
except NotOffered:
    sys.exit(3)
