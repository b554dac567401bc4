"""Rows in files that exceed the memory: the process keeps little besides the page cache."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ALL

GB = 2**30
# As large as the memory of a usual machine, if the disk has room for it.
SCRIPT = """
import sys, threading, time
import jax, numpy as np
import jaxreplay as jr

folder, num_bytes = sys.argv[1], int(sys.argv[2])
NUM_ENVS, TIME = 64, 128
length = num_bytes // (7064 * NUM_ENVS) // TIME * TIME
most = 0

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

def watch():
    global most
    while True:
        most = max(most, resident())
        time.sleep(0.02)

threading.Thread(target=watch, daemon=True).start()
buffer = jr.prioritized(
    capacity=length * NUM_ENVS, num_envs=NUM_ENVS, batch_size=256, autoreset="next_step"
)
tier = jr.tiered(buffer, rows=folder)
number = np.arange(length, dtype=np.int32)

def steps(start, stop):
    code = number[start:stop, None] * NUM_ENVS + np.arange(NUM_ENVS, dtype=np.int32)
    image = np.zeros((*code.shape, 84, 84), np.uint8)
    image[..., 0, :4] = code[..., None].view(np.uint8)  # every image is another one
    return jr.Step(
        obs=image, action=code, reward=code.astype(np.float32),
        terminated=code % 1000 == 0, truncated=code % 777 == 0,
    )

state = tier.init(jax.tree.map(lambda leaf: leaf[0, 0], steps(0, 1)))
for start in range(0, length, TIME):
    state = tier.extend(state, steps(start, start + TIME))
checked = 0

def check(batch):
    item = batch.experience
    code = np.ascontiguousarray(np.asarray(item.obs)[:, 0, :4]).view(np.int32)[:, 0]
    assert (code == np.asarray(item.action)).all()
    assert (code.astype(np.float32) == np.asarray(item.reward)).all()
    following = np.ascontiguousarray(np.asarray(item.next_obs)[:, 0, :4]).view(np.int32)[:, 0]
    assert (following == code + NUM_ENVS)[np.asarray(item.discount) > 0].all()

start = time.perf_counter()
for key in range(100):
    batch = tier.sample(state, jax.random.key(key))
    check(batch)
    state = jax.jit(tier.update_priorities)(state, batch.index, np.ones(256, np.float32))
seconds = (time.perf_counter() - start) / 100
tier.close()
again = jr.tiered(buffer, rows=folder)
state = again.init(jax.tree.map(lambda leaf: leaf[0, 0], steps(0, 1)))
check(again.sample(state, jax.random.key(0)))
size = tier.buffer.memory(jax.tree.map(lambda leaf: leaf[0, 0], steps(0, 1))).total
print(size, most, round(seconds * 1e3, 1))
"""


@pytest.mark.no_xla
@pytest.mark.skipif(not ALL, reason="takes minutes, and much of the disk")
def test_rows_as_large_as_the_memory_take_little_of_it():
    folder = os.path.abspath("out/rows")  # on a disk, where tmp_path may be in memory
    os.makedirs("out", exist_ok=True)
    num_bytes = min(24 * GB, int(0.7 * shutil.disk_usage("out").free))
    try:
        command = [sys.executable, "-c", SCRIPT, folder, str(num_bytes)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert not done.returncode, done.stderr[-2000:]
    size, most, milliseconds = done.stdout.split()
    sys.stdout.write(f"{size} bytes of rows, {most} of memory, {milliseconds} ms a batch\n")
    assert int(size) > 0.9 * num_bytes
    assert int(most) < GB
