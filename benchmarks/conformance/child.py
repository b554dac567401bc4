"""A process that saves or loads: `child.py adapter.py Class action folder`. Exit status 3: not
offered."""

import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from properties import filled
from replay import NotOffered, Options, loaded
from streams import Noise, Stream

source, name, action, folder = sys.argv[1:]
make = getattr(loaded(source), name)
path = folder + "/save"


def say(word):
    print(word, flush=True)


def main():
    if action == "memory":
        options = Options(40_000, obs=np.zeros(2_500, np.float32))
        make(options)  # what a first one loads
        say("made")
        sys.stdin.readline()
        replay = make(options)
        Noise(options, lengths=(50, 50)).fill(replay, 40_000)
        replay.sample()
        say("filled")
        sys.stdin.readline()
        replay.save(path)
        return say("saved")
    options = Options(4_000, num_envs=2, obs=np.zeros(500, np.float32))
    if action == "saves":
        replay, envs = filled(make, 3_000, options, lengths=(5, 20))
        replay.save(path)
        say("first")
        while True:
            envs.fill(replay, 50)
            replay.save(path)
    _, envs = filled(make, 1, options)  # its number of envs
    replay, envs = make(envs.options), Stream(envs.options, lengths=(5, 20))
    replay.load(path)
    say("loaded")
    for _ in range(20_000):  # more steps than were saved
        envs.turn()
    envs.check(replay.sample(), at_ends="none")
    return say("right")


try:
    main()
except NotOffered:
    sys.exit(3)
