"""Mutations that the tests must catch: `python tests/mutations.py [NUMBER ...]`, not part of a run.

Each changes one expression of a copy of the package, and runs the test files that hold the promise
until one test fails. A mutation that no test catches is printed, and makes the exit status 1.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
ORACLE = "storage/test_oracle_streams.py"
# what breaks, its file, the code, the changed code, and files of tests
MUTATIONS = (
    (
        "a gap between blocks is no cut",
        "actors/block.py",
        "return block.place != self.added[block.actor]",
        "return block.place[0] != self.added[block.actor][0]",
        "actors/test_blocks.py",
    ),
    (
        "a block is begun before it is granted",
        "actors/actor.py",
        "self._wait()  # again,",
        "pass  # again,",
        "actors/test_actors.py",
    ),
    (
        "the write head is off by one",
        "storage/writes.py",
        "position=ring.wrap(end, length),",
        "position=ring.wrap(end + 1, length),",
        ORACLE,
    ),
    (
        "a lap that ends at the last row is not counted",
        "storage/writes.py",
        "(end >= length).astype",
        "(end > length).astype",
        ORACLE,
    ),
    (
        "a stale row is written again",
        "storage/writes.py",
        "(state.index(row).lap == index.lap)",
        "(index.lap == index.lap)",
        ORACLE,
    ),
    (
        "padding among envs is written",
        "storage/writes.py",
        "taken &= envs < layout.num_envs",
        "taken &= envs <= layout.num_envs",
        ORACLE,
    ),
    (
        "n steps go on across an end",
        "views/transition.py",
        "~is_terminated[:-1] & ~reader.is_final(steps[1:])",
        "~is_terminated[:-1]",
        ORACLE,
    ),
    (
        "a short window is discounted like a whole one",
        "views/transition.py",
        "jnp.asarray(powers, jnp.float32)[num_steps])",
        "jnp.asarray(powers, jnp.float32)[self.n_step])",
        ORACLE,
    ),
    (
        "a final row is sampled",
        "storage/layout.py",
        "(row_flags.FINAL if self.needs_next_obs else 0)",
        "0",
        ORACLE,
    ),
    (
        "a masked step writes its final row",
        "storage/row_flags.py",
        "jnp.stack([mask, mask & done], axis=1)",
        "jnp.stack([mask, done], axis=1)",
        ORACLE,
    ),
    (
        "a late index is taken",
        "storage/sampleable.py",
        "is_in_range & (self.state.index(row).lap == index.lap) & self.contains",
        "is_in_range & self.contains",
        ORACLE,
    ),
    (
        "of a row that appears twice, the last priority counts",
        "samplers/sum_tree.py",
        'leaves = leaves.at[index].max(mass, mode="drop")',
        'leaves = leaves.at[index].set(mass, mode="drop")',
        "samplers/test_sum_tree.py " + ORACLE,
    ),
    (
        "a parent drifts from the sum of its children",
        "samplers/sum_tree.py",
        'sums[array] = there.set(new, mode="promise_in_bounds")',
        'sums[array] = there.max(new, mode="promise_in_bounds")',
        "samplers/test_sum_tree.py",
    ),
    (
        "a row is sampled a step too early",
        "storage/writes.py",
        "num_pending + writes.num_rows), window.after)",
        "num_pending + writes.num_rows), max(window.after - 1, 0))",
        ORACLE,
    ),
    (
        "a row is sampled whose look-back is overwritten",
        "storage/writes.py",
        "place, jnp.minimum(before, filled))",
        "place, jnp.minimum(before - 1, filled))",
        ORACLE,
    ),
    (
        "a uniform sample takes the row of its third try, whatever it is",
        "samplers/uniform.py",
        "is_hit | sampleable.contains(other)",
        "jnp.ones_like(is_hit)",
        "samplers/test_uniform.py samplers/test_laws.py " + ORACLE,
    ),
    (
        "a stack has frames of the episode before",
        "views/frame_stack.py",
        "depth = inner.rows_before(offset, view.num_frames - 1)[..., None]",
        "depth = inner.rows_before(offset, 64)[..., None] * 0 + view.num_frames - 1",
        ORACLE,
    ),
    (
        "the achieved goal of the step itself is taken for a later one",
        "views/hindsight.py",
        "random.below(*reader.random_words(1), to_end) + 1",
        "random.below(*reader.random_words(1), to_end)",
        "samplers/test_laws.py " + ORACLE,
    ),
    (
        "a queue hands out a row twice",
        "samplers/queue.py",
        "[before + turn * self.period for before",
        "[before + jnp.maximum(turn - 1, 0) * self.period for before",
        "samplers/test_queue.py " + ORACLE,
    ),
    (
        "a queue gives a row its last use at once",
        "samplers/queue.py",
        "before = room - left * jnp.uint32(self.period)",
        "before = room - jnp.minimum(left, 1) * jnp.uint32(self.period)",
        "samplers/test_queue.py " + ORACLE,
    ),
    (
        "a chunk reads on after its episode",
        "views/chunk.py",
        "has_action & ~reader.is_first(later) & (",
        "has_action & (",
        ORACLE,
    ),
    (
        "an agent that has ended acts again",
        "storage/agents.py",
        "is_gone = done & row_flags",
        "is_gone = ~done & row_flags",
        "buffers/test_agents.py " + ORACLE,
    ),
    (
        "a window reaches into a stream that went round",
        "storage/relayout.py",
        "opens = oldest & follows &",
        "opens = oldest & ~follows &",
        "buffers/test_adopt.py",
    ),
    (
        "a group is returned once too often",
        "buffers/groups.py",
        "state.num_uses < self.max_uses",
        "state.num_uses <= self.max_uses",
        "buffers/test_groups.py",
    ),
    (
        "a donated leaf is copied",
        "storage/stored_arrays.py",
        'return leaf.at[row.reshape(-1)].set(values, unique_indices=are_distinct, mode="drop")',
        "return jnp.where(row.min() < 0, leaf, leaf.at[row.reshape(-1)].set(values, "
        'unique_indices=are_distinct, mode="drop"))',
        "buffers/test_in_place.py",
    ),
    (
        "an advantage goes on across a truncation",
        "targets.py",
        "carry = jnp.where(terminated | truncated | ~mask, 0, gamma * lambda_)",
        "carry = jnp.where(terminated | ~mask, 0, gamma * lambda_)",
        "test_targets.py",
    ),
    (
        "a checkpoint has the row after each row",
        "checkpoint/rows.py",
        "ring.position_of(picked.number, length)",
        "ring.position_of(picked.number + 1, length)",
        "checkpoint/test_checkpoint.py",
    ),
    (
        "a damaged chunk is read",
        "checkpoint/bundle.py",
        "if checksum([content]) != sums.stored:",
        "if False:",
        "checkpoint/test_checkpoint_damage.py",
    ),
    (
        "an end gives up a start of sequences, and the next one comes a period later",
        "storage/newest_row.py",
        "phase = jnp.where(is_given_up, before, phase)",
        "phase = jnp.where(is_given_up, phase, phase)",
        "buffers/test_end_streams.py",
    ),
    (
        "an end counts a final row that opens an episode as one",
        "storage/writes.py",
        "ends &= row_flags.is_of_episode(flags)",
        "ends &= True",
        ORACLE,
    ),
    (
        "candidates after a drop have the numbers of dropped ones",
        "buffers/drop.py",
        "end = counters.num_candidates + jnp.uint32(layout.length)",
        "end = counters.num_candidates",
        "samplers/test_without_replacement.py",
    ),
    (
        "an item has the probability of the sampler that gave it alone",
        "samplers/blend.py",
        'row, is_valid = of("row"), of("probability") > 0\n'
        "        probability = self.probability(state, sampleable, row)",
        'row, is_valid = of("row"), of("probability") > 0\n        probability = of("probability")',
        "samplers/test_blend.py",
    ),
    (
        "the first strata of a draw are taken for the rest of a batch",
        "samplers/shares.py",
        "place = jnp.where(count == size, nth, (part * size).astype(jnp.int32))",
        "place = nth",
        "samplers/test_blend.py",
    ),
    (
        "an item of a small shard weighs as one of a large shard",
        "distributed/shard.py",
        "weight=batch.weight * (self.num_shards * share)",
        "weight=batch.weight",
        "distributed/test_distributed.py",
    ),
    (
        "a timeout is taken for a termination",
        "sb3/base.py",
        'info.get("TimeLimit.truncated", False)',
        'info.get("TimeLimit", False)',
        "sb3/test_sb3.py",
    ),
    (
        "a step that waits on the host is overwritten by its env",
        "host/staging.py",
        "[leaf.copy() for leaf in leaves]",
        "list(leaves)",
        "stateful/test_staging.py stateful/test_stateful.py",
    ),
    (
        "the end of a block is taken for an episode's end",
        "datasets/episodes.py",
        "num = length - 1 if length > 1 and ends[-2] else max(length - 2, 0)",
        "num = length",
        "test_dataset_files.py",
    ),
    (
        "the transition before a dropped row goes on",
        "datasets/episodes.py",
        "is_cut = np.append(is_final[1:], False) & ~ends",
        "is_cut = np.zeros_like(ends)",
        "test_dataset_files.py",
    ),
    (
        "frames of a video begin at the key frame",
        "datasets/lerobot.py",
        "(not frame or abs(coming.time - time) < abs(frame.time - time))",
        "not frame",
        "test_lerobot.py",
    ),
    (
        "a row of a checkpoint is read from the place that it had before a wrap",
        "checkpoint/reader.py",
        "group_of[at], place_of[at] = nth, np.flatnonzero(is_left)",
        "group_of[at], place_of[at] = nth, np.arange(len(at))",
        "checkpoint/test_opened.py",
    ),
    (
        "a write does not wait for gathers",
        "buffers/tiered.py",
        "wait([flight.future for flight in self._flights])\n\n        def write()",
        "wait([])\n\n        def write()",
        "buffers/test_tiered.py",
    ),
    (
        "rows larger than the host's memory are allocated",
        "buffers/tiered.py",
        "if free is not None and needs > free:\n            raise MemoryError(",
        "if False:\n            raise MemoryError(",
        "buffers/test_tiered.py inspection/test_plan.py",
    ),
    (
        "flags of a drop do not reach the journal",
        "buffers/tiered.py",
        'name == "drop")',
        "False)",
        "buffers/test_tiered_kills.py buffers/test_tiered_files.py",
    ),
    (
        "values that waited for a killed process are left out",
        "storage/file_rows.py",
        "self._put(self._waiting())",
        "pass",
        "buffers/test_tiered_kills.py",
    ),
    (
        "the oldest rows count while they are overwritten",
        "storage/file_rows.py",
        "progress[FIRST] = np.maximum(progress[FIRST], oldest)",
        "pass",
        "buffers/test_tiered_kills.py",
    ),
    (
        "a flush does not reach the disk",
        "storage/array_files.py",
        'getattr(os, "fdatasync", os.fsync)(file)',
        "pass",
        "buffers/test_tiered_files.py",
    ),
    (
        "a short write of a page is taken for a whole one",
        "storage/array_files.py",
        "at, left = at + written, left[written:]",
        "at, left = at + written, left[len(left) :]",
        "buffers/test_tiered_files.py",
    ),
    (
        "a journal may say that more rows are there than a ring holds",
        "storage/file_rows.py",
        '(first >= 0) & (first <= end) & (end <= first + about["length"])',
        "(first >= 0) & (first <= end)",
        "buffers/test_tiered_files.py",
    ),
    (
        "a learner asks for a block again that its checkpoint has",
        "actors/block.py",
        "first = max(added, place[1] if place[0] == incarnation else 0)",
        "first = added",
        "actors/test_blocks.py",
    ),
    (
        "an actor that is started again has its old seed",
        "actors/actor.py",
        "np.random.SeedSequence([setup.seed, index, incarnation])",
        "np.random.SeedSequence([setup.seed, index])",
        "actors/test_actors.py",
    ),
    (
        "an env resets when one of its agents has ended",
        "actors/actor.py",
        "ends = ends.all(-1)",
        "ends = ends.any(-1)",
        "actors/test_actors.py",
    ),
    (
        "a block begins with the mask of an earlier one",
        "actors/actor.py",
        "            self._mask[:] = True",
        "            self._mask[:] |= self._number < 4",
        "actors/test_actors.py",
    ),
    (
        "a block that an interrupt has lost is waited for",
        "actors/outbox.py",
        "if number > self._num_put:",
        "if number > self._num_put + 1:",
        "actors/test_protocol.py",
    ),
    (
        "a learner that was replaced is heard",
        "actors/outbox.py",
        "if ask.learner != self.learner:\n                return\n",
        "if not self.learner:\n                return\n",
        "actors/test_protocol.py",
    ),
    (
        "an actor that hangs is waited for",
        "actors/actors.py",
        "and now - line.since > self._timeout",
        "and False",
        "actors/test_actors.py",
    ),
    (
        "the largest staleness is not measured",
        "actors/actors.py",
        'self._figures["staleness"] = max(self._figures["staleness"], stale)',
        'self._figures["staleness"] = 0',
        "actors/test_actors.py",
    ),
    (
        "an actor that failed is not counted as lost",
        "actors/actors.py",
        'self._figures["lost"] += 1',
        'self._figures["lost"] += 0',
        "actors/test_actors.py",
    ),
    (
        "a Feed names no envs whose episodes end",
        "actors/feed.py",
        "ends = self._offer.cut()",
        "self._offer.cut()",
        "actors/test_actors.py distributed/test_distributed.py",
    ),
    (
        "a window of a member goes over steps that it did not get",
        "stateful/actor_host.py",
        "gap[offer.envs] = True",
        "pass",
        "actors/test_actors.py",
    ),
    (
        "a window of a member goes over a lost block",
        "stateful/actor_host.py",
        "gap[:-1] |= ends",
        "pass",
        "actors/test_actors.py",
    ),
    (
        "a step that only resets is a member's first one",
        "stateful/actor_host.py",
        "steps = offer.steps[0], offer.mask_after(gap), None",
        "steps = offer.steps[0], offer.steps[1], None",
        "actors/test_actors.py",
    ),
    (
        "a step that only resets is the first one after a masked block",
        "actors/actors.py",
        "gap[self.envs] &= ~mask.any(0)",
        "gap[self.envs] = False",
        "actors/test_actors.py",
    ),
    (
        "parts of a batch are rounded down to 1/1,024",
        "samplers/shares.py",
        "edges = jnp.round(ends[:-1] * (batch_size * _UNITS)).astype(jnp.int32)",
        "edges = jnp.floor(ends[:-1] * (batch_size * _UNITS)).astype(jnp.int32)",
        "samplers/test_blend.py",
    ),
    (
        "of a figure that several samplers have, the last one's is told",
        "samplers/joined.py",
        "found = of_part | found",
        "found = found | of_part",
        "samplers/test_blend.py buffers/test_contract.py",
    ),
    (
        "a blend's beta is that of its last sampler",
        "samplers/joined.py",
        "known[0] if known else 0.0",
        "known[-1] if known else 0.0",
        "samplers/test_blend.py",
    ),
    (
        "a new row of priority 0 has probability 0",
        "samplers/online_queue.py",
        "of_new = jnp.where(of_new > 0, of_new, least)",
        "of_new = jnp.where(of_new >= 0, of_new, least)",
        "samplers/test_blend.py buffers/test_contract.py",
    ),
    (
        "a write of one leaf looks like that of another",
        "storage/writes.py",
        "stamp = random.avalanche((stamp ^ content) + jnp.uint32(zlib.crc32(name.encode())))",
        "stamp = random.avalanche(stamp ^ content)",
        "checkpoint/test_checkpoint.py",
    ),
    (
        "map_rows leaves no stamp, so that a save keeps old rows",
        "buffers/map_rows.py",
        "    return stamped(state, stamp)\n\n\ndef block_of",
        "    return state\n\n\ndef block_of",
        "buffers/test_map_rows.py checkpoint/test_checkpoint.py",
    ),
    (
        "an array that is shorter than it says is taken",
        "datasets/arrays.py",
        "if len(values) < stop - start:",
        "if False:",
        "test_dataset_files.py",
    ),
    (
        "a success in the middle of an episode ends it",
        "datasets/lerobot.py",
        "terminated = terminated | (success & (done | truncated))",
        "terminated = terminated | success",
        "test_lerobot.py",
    ),
    (
        "other candidates have the numbers of earlier ones",
        "storage/relayout.py",
        "count if is_same else 0",
        "count",
        "buffers/test_adopt.py",
    ),
    (
        "a merge deals streams to the envs in order, not to the emptiest",
        "storage/relayout.py",
        "order = jnp.argsort(state.counters.filled, stable=True).astype(jnp.int32)",
        "order = jnp.arange(layout.num_envs, dtype=jnp.int32)",
        "buffers/test_adopt.py test_dataset_files.py",
    ),
    (
        "an opened checkpoint keeps every file that it has read",
        "checkpoint/reader.py",
        "while len(self._kept) > max(self._cache_bytes // max(size, 1), 1):",
        "while False:",
        "checkpoint/test_opened.py",
    ),
)


def run_tests(file, changed, tests, num_processes=2):
    """Run files of tests over a copy of the package in which `file` has the text `changed`, until
    one test fails. Return its name, "timeout" after 15 minutes, or "" if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in ("jaxreplay", "tests", "examples"):
            shutil.copytree(ROOT / name, copy / name)
        for name in ("pyproject.toml", "Makefile"):
            shutil.copy(ROOT / name, copy)
        (copy / "jaxreplay" / file).write_text(changed)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, "-n", str(num_processes), *(f"tests/{name}" for name in tests.split())],
                cwd=copy,
                env=os.environ | {"PYTHONPATH": str(copy)},
                capture_output=True,
                text=True,
                timeout=900,
            )
        except subprocess.TimeoutExpired:
            return "timeout"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failed:
        failed = [done.stderr.strip().rpartition("\n")[2] or "pytest could not run"]
    return failed[0].partition(" - ")[0] if failed else ""


def is_caught(number: int) -> bool:
    what, file, code, changed, tests = MUTATIONS[number]
    text = (ROOT / "jaxreplay" / file).read_text()
    assert text.count(code) == 1, (what, text.count(code))
    failed = run_tests(file, text.replace(code, changed), tests)
    sys.stdout.write(f"{number + 1:3} {what}: {(failed or 'NOT CAUGHT')[:120]}\n")
    sys.stdout.flush()
    return bool(failed)


if __name__ == "__main__":
    numbers = [int(one) - 1 for one in sys.argv[1:]] or range(len(MUTATIONS))
    caught = [is_caught(number) for number in numbers]
    raise SystemExit(not all(caught))
