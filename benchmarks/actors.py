"""Steps a second from four actors in other processes, and what they cost the learner, beside
TorchRL's replay buffer in a Ray actor and agentlace: writes ACTORS.md.

    python benchmarks/actors.py [--quick] [--before FOLDER]

The envs take no time: each step is of arrays that are there. Each way has its turn in each round.
FOLDER is another checkout, whose package has a turn, too.
`make bench` installs TorchRL; agentlace comes from its repository. Without them, or without Ray,
their rows are left out.
"""

import argparse
import contextlib
import importlib.util
import itertools
import logging
import math
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from report import about

import jaxreplay as jr

ACTORS, ENVS, BLOCK = 4, 16, 64  # envs of each actor; steps of a block
IMAGE = (84, 84, 1)
CAPACITY = 2**20


def step_of(num_envs: int, image: bool = False) -> dict[str, Any]:
    """Return a step of 100 bytes for each env, or with an image."""
    flags = np.zeros(num_envs, bool)
    obs = np.ones((num_envs, *IMAGE), np.uint8) if image else np.ones((num_envs, 19), np.float32)
    return {
        "obs": obs,
        "action": np.ones((num_envs, 4), np.float32),
        "reward": np.ones(num_envs, np.float32),
        "terminated": flags,
        "truncated": flags,
    }


def fast(actor: Any) -> None:
    """Add steps as fast as that goes."""
    step = step_of(actor.num_envs)
    while True:
        actor.add(**step)


def reading(actor: Any) -> None:
    """Add steps as `fast` does, and look for newer parameters before each."""
    step = step_of(actor.num_envs)
    while True:
        actor.params()
        actor.add(**step)


def images(actor: Any) -> None:
    """Add images as fast as that goes."""
    step = step_of(actor.num_envs, image=True)
    while True:
        actor.add(**step)


def buffer_of(capacity: int = CAPACITY) -> Any:
    """Return a buffer for all envs."""
    return jr.uniform(
        capacity=capacity,
        num_envs=ACTORS * ENVS,
        batch_size=256,
        autoreset="next_step",
        allow_mask=True,
    )


def busy() -> float:
    """Return the seconds that the processors have worked since the machine began, if it tells."""
    told = pathlib.Path("/proc/stat")
    if not told.exists():
        return math.nan
    user, nice, system, _, _, *others = told.read_text().split("\n")[0].split()[1:8]
    return sum(map(int, (user, nice, system, *others))) / os.sysconf("SC_CLK_TCK")


def ours(
    seconds: float, on: Any, act: Any = fast, capacity: int = CAPACITY, params: Any = None
) -> tuple[float, float]:
    """Return steps a second with `jr.Replay`, and milliseconds of a core for a block."""
    with jr.Replay(buffer_of(capacity), timeout=120) as replay:
        actors = replay.start(act, ACTORS, block_length=BLOCK, params=params, on=on)
        warm = time.perf_counter() + 8.0  # programs for each number of blocks are compiled
        while actors.metrics()["steps"] < 64 * ACTORS * ENVS * BLOCK or time.perf_counter() < warm:
            time.sleep(0.05)
        first, began, worked = actors.metrics()["steps"], time.perf_counter(), busy()
        time.sleep(seconds)
        num, ended = actors.metrics()["steps"] - first, time.perf_counter()
        return num / (ended - began), (busy() - worked) * 1e3 / (num / (ENVS * BLOCK))


def one(name: str, seconds: float) -> tuple[float, float]:
    """Return what `ours` does for one of our ways."""
    on = jr.actors.ray(num_cpus=0) if "Ray" in name else None
    if "images" in name:
        return ours(seconds, on, images, 2**16)
    if "parameters" in name:
        return ours(seconds, on, reading, params=np.ones(10 * 2**20, np.uint8))
    return ours(seconds, on)


def before(folder: str, name: str, seconds: float) -> tuple[float, float]:
    """Return the same of another checkout."""
    command = [sys.executable, __file__, "--one", name, str(seconds)]
    environment = os.environ | {"PYTHONPATH": folder}
    told = subprocess.run(
        command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    )
    rate, ms = told.stdout.split()[-2:]
    return float(rate), float(ms)


def torchrl(seconds: float, steps: int) -> float:
    """Return steps a second with a `RayReplayBuffer`, to which each actor extends so many, after it
    has copied them to a block."""
    import ray
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage
    from torchrl.data.replay_buffers.ray_buffer import RayReplayBuffer

    buffer = RayReplayBuffer(
        storage=lambda: LazyTensorStorage(CAPACITY), remote_config={"num_cpus": 0}
    )

    def extend(number: int, until: float) -> int:
        step, num = step_of(ENVS), 0
        while num == 0 or time.time() < until:
            block = block_of(step, steps // ENVS)
            flat = {name: torch.as_tensor(leaf).flatten(0, 1) for name, leaf in block.items()}
            buffer.extend(TensorDict(flat, batch_size=[steps]))
            num += steps
        return num

    remote = ray.remote(extend).options(num_cpus=0)
    ray.get([remote.remote(number, 0.0) for number in range(ACTORS)])  # the processes begin
    began = time.time()
    counts = ray.get([remote.remote(number, began + seconds) for number in range(ACTORS)])
    ended = time.time()
    buffer.close()
    return sum(counts) / (ended - began)


PORTS = itertools.count(5601, 2)  # a server that has stopped keeps one of its own


def _agentlace_actor(
    name: str, port: int, period: int, length: int, until: Any, ready: Any
) -> None:
    from agentlace.data.data_store import QueuedDataStore
    from agentlace.trainer import TrainerClient, TrainerConfig

    store = QueuedDataStore(50_000)
    config = TrainerConfig(port_number=port, broadcast_port=port + 1)
    client = TrainerClient(name, "localhost", config, store, log_level=logging.ERROR)
    step = step_of(ENVS)
    store.insert(step)
    client.update()
    ready.release()
    while until.value == 0.0 or time.time() < until.value:
        for _ in range(period):
            store.insert(step if length == 1 else block_of(step, length))
        client.update()


def block_of(step: Any, length: int) -> Any:
    """Return a block, to which so many steps were copied."""
    block = {name: np.empty((length, *leaf.shape), leaf.dtype) for name, leaf in step.items()}
    for place in range(length):
        for name, leaf in step.items():
            block[name][place] = leaf
    return block


def agentlace(seconds: float, period: int, length: int = 1) -> float:
    """Return steps a second that a `TrainerServer` gets. An item is a step, or a block, of all envs
    of an actor, and so many are sent at once."""
    from agentlace.data.data_store import QueuedDataStore
    from agentlace.trainer import TrainerConfig, TrainerServer

    spawn = multiprocessing.get_context("spawn")
    until, ready = spawn.Value("d", 0.0), spawn.Semaphore(0)
    port = next(PORTS)
    config = TrainerConfig(port_number=port, broadcast_port=port + 1)
    server = TrainerServer(config, log_level=logging.ERROR)
    stores = [QueuedDataStore(50_000) for _ in range(ACTORS)]
    for number, store in enumerate(stores):
        server.register_data_store(f"actor{number}", store)
    server.start(threaded=True)
    processes = [
        spawn.Process(
            target=_agentlace_actor, args=(f"actor{number}", port, period, length, until, ready)
        )
        for number in range(ACTORS)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    first, began = sum(store.latest_data_id() for store in stores), time.time()
    until.value = began + seconds
    time.sleep(seconds)
    last, ended = sum(store.latest_data_id() for store in stores), time.time()
    for process in processes:
        process.kill()
        process.join()
    server.stop()
    return (last - first) * length * ENVS / (ended - began)


def apart(seconds: float, period: int, length: int) -> float:
    """Return what `agentlace` does in a process of its own: its server's threads do not end, and a
    run may fail, or hang."""
    command = [sys.executable, __file__, "--agentlace", *map(str, (seconds, period, length))]
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            found = subprocess.run(command, capture_output=True, text=True, timeout=60)
            if found.returncode == 0:
                return float(found.stdout.split()[-1])


@jax.jit
def update(params: Any, batch: Any) -> Any:
    """Return other parameters: some work, as of a small network."""
    x = batch.experience.obs @ params["w1"]
    for _ in range(2):
        x = jax.nn.relu(x @ params["w2"])
    loss = jnp.mean((x.sum(-1) - batch.experience.reward) ** 2)
    return jax.tree.map(lambda leaf: leaf * (1 - 1e-6 * loss), params)


PARAMS = {"w1": jnp.full((19, 256), 0.01), "w2": jnp.full((256, 256), 0.01)}


def iteration(seconds: float, with_actors: bool) -> float:
    """Return microseconds of an iteration that samples 256 items, for 32 steps that are added: by
    actors, or by hand in blocks of an actor."""
    ratio, params, num, hand = 8, PARAMS, 0, step_of(ENVS)
    block = {name: np.repeat(leaf[None], BLOCK, 0) for name, leaf in hand.items()}
    with jr.Replay(
        buffer_of(), samples_per_insert=ratio if with_actors else None, timeout=60
    ) as replay:
        if with_actors:
            replay.start(fast, ACTORS, block_length=BLOCK)
        for number in range(ACTORS):
            if not with_actors:
                replay.add(**block, envs=np.arange(ENVS) + number * ENVS)
        period, times, ended = ratio * ENVS * BLOCK // 256, [], time.perf_counter() + 4.0
        while (now := time.perf_counter()) < ended + seconds:
            if not with_actors and num // period * period == num:
                envs = np.arange(ENVS) + num // period % ACTORS * ENVS
                replay.add(**block, envs=envs)
            params = update(params, replay.sample())
            jax.block_until_ready(params)
            num += 1
            if now > ended:  # warm
                times.append(time.perf_counter() - now)
    return 1e6 * statistics.fmean(times)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--agentlace", nargs=3, type=float, help=argparse.SUPPRESS)
    parser.add_argument("--before")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(*one(args.one[0], float(args.one[1])), flush=True)
        return
    if args.agentlace:
        length, period, items = args.agentlace
        print(agentlace(length, int(period), int(items)), flush=True)
        os._exit(0)
    seconds, rounds = (0.5, 1) if args.quick else (3.0, 2)
    names = ["jaxreplay, processes", "jaxreplay, processes, 10 MB of parameters"]
    ways: dict[str, Any] = {}
    if importlib.util.find_spec("ray"):
        import ray

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
            )
        names += ["jaxreplay, Ray", "jaxreplay, Ray, 10 MB of parameters"]
        if importlib.util.find_spec("torchrl"):
            for steps in (BLOCK * ENVS, 16 * BLOCK * ENVS):
                name = f"TorchRL's RayReplayBuffer, {steps:,} steps a call"
                ways[name] = lambda steps=steps: (torchrl(seconds, steps), math.nan)
    if importlib.util.find_spec("agentlace"):
        for period in (8, BLOCK):
            name = f"agentlace, {period * ENVS:,} steps an update"
            ways[name] = lambda period=period: (apart(seconds, period, 1), math.nan)
        name = f"agentlace, items of {BLOCK * ENVS:,} steps"
        ways[name] = lambda: (apart(seconds, 1, BLOCK), math.nan)
    own: dict[str, Any] = {}
    for name in [*names, "jaxreplay, processes, images"]:
        own[name] = lambda name=name: one(name, seconds)
        if args.before:
            own[f"{name}, before"] = lambda name=name: before(args.before, name, seconds)
    ways = own | ways
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    iterations: dict[str, list[float]] = {"by hand": [], "actors": []}
    for number in range(rounds):
        order = [*ways] if number // 2 * 2 == number else [*ways][::-1]
        for name in order:
            found[name].append(ways[name]())
            rate, ms = found[name][-1]
            print(f"{name:50} {rate:12,.0f} steps/s {ms:8.2f} ms a block", flush=True)
        for name in iterations:
            iterations[name].append(iteration(seconds, name == "actors"))
            print(f"{'iteration, ' + name:50} {iterations[name][-1]:12,.0f} us", flush=True)
    write(found, iterations, args)


def write(found: Any, iterations: Any, args: argparse.Namespace) -> None:
    first = statistics.median(rate for rate, _ in found["jaxreplay, processes"])
    lines = [
        "# Actors in other processes",
        "",
        "Written by `python benchmarks/actors.py`: "
        + "; ".join(
            f"{name} {value}" for name, value in about(args.quick).items() if name != "command"
        )
        + ".",
        "",
        f"Steps a second that reach the learner's buffer from {ACTORS} actors with {ENVS} envs",
        f"each, of 100 bytes a step, or of {IMAGE[0]}x{IMAGE[1]} bytes and 25. Envs take no time,",
        f"and nothing is learned. A block has {BLOCK} steps of its actor's envs. Medians of the",
        "rounds, with the smallest and largest; and milliseconds that the machine's processors",
        "work for a block, all processes together. The parameters are of one version.",
        "",
        "| way | steps/s | | ours, by it | ms of a core a block |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for name, told in found.items():
        rates, ms = zip(*told, strict=True)
        middle, cost = statistics.median(rates), statistics.median(ms)
        lines.append(
            f"| {name} | {middle:,.0f} | {min(rates):,.0f} to {max(rates):,.0f} | "
            f"{first / middle:.1f} | {'' if math.isnan(cost) else f'{cost:.2f}'} |"
        )
    if args.before:
        command = ["git", "-C", args.before, "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        lines += ["", f"Rows with `before` are of commit {commit.strip()}."]
    hand, actors = (statistics.median(iterations[name]) for name in ("by hand", "actors"))
    lines += [
        "",
        "Microseconds of a learner's iteration, which samples 256 items and updates a network",
        f"for each 32 steps that are added, {rate(hand)} a second: by blocks of an actor that it",
        f"adds itself {hand:,.0f}, by {ACTORS} actors {actors:,.0f}: {actors / hand:.2f} of it.",
        "",
    ]
    out = args.out or pathlib.Path(__file__).parent / "ACTORS.md"
    text = out.read_text() if out.exists() else ""
    kept = "\n" + text[text.index("## ") :] if "## " in text else ""
    out.write_text("\n".join(lines) + kept)


def rate(microseconds: float) -> str:
    return f"{32 / microseconds * 1e6:,.0f}"


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with contextlib.suppress(KeyboardInterrupt):
        main()
