"""Tests of hostile checkpoints with valid checksums and wrong content: they give the library's own
errors, use little memory, and no path outside is read."""

import contextlib
import copy
import functools
import json
import pathlib
import random
import re
import shutil
import warnings

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.__main__ import main
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError, folder
from jaxreplay.checkpoint.groups import NUM_COLUMNS
from tests.checkpoint.runs import (
    BUFFER,
    EXAMPLE,
    fields_of,
    manifests,
    save_run,
    save_two,
    sealed,
    state_of,
)
from tests.conftest import ALL, SOAK
from tests.support.refusals import check_refused, refused, warned

# control characters, except the newline
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

NESTED = "@nested@"  # stands for 100,000 nested lists
STRANGE = [
    *(sign * 2**power for power in (0, 1, 3, 8, 31, 32, 53, 62, 63, 64, 100) for sign in (1, -1)),
    *(None, True, False, 0, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x" * 5000, "\x1b[31mred\x1b[2J", "a\nb\r\x07", "\u202edlrow", "\x00", "\ud800"),
    *("é", "-1", "..", "/etc/passwd", "../../../../etc/passwd", "str[1]", "int4[3]"),
    *("0000000001-00000000", "0000000001-00000000-000000", "float32[]", "uint8[99999999999]"),
    *("object[2]", "bfloat16[1]", "key<fry>[]"),
    "float64[999999, 999999, 999999]",
    *([], {}, {"a": 1}, [-1, -1], [2**70], [[2**62, 1]]),
    [0] * 3000,
    NESTED,
]


def nodes(tree, path=()):
    """Yield the path of each node of a JSON tree."""
    yield path
    pairs = enumerate(tree) if isinstance(tree, list) else ()
    for key, value in tree.items() if isinstance(tree, dict) else pairs:
        yield from nodes(value, (*path, key))


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def changed(r, tree):
    """Return a copy with random changes, mostly one, and often near the root."""
    tree = copy.deepcopy(tree)
    for _ in range(r.choice([1, 1, 1, 2, 5])):
        paths = sorted(nodes(tree), key=lambda path: (len(path), str(path)))
        path = r.choice(paths[: r.choice([20, 60, 10**6])])
        if not path:
            if r.random() < 0.1:
                return r.choice(STRANGE)
            continue
        parent, key, how = at(tree, path[:-1]), path[-1], r.random()
        old = parent[key]
        if how < 0.6:
            parent[key] = copy.deepcopy(r.choice(STRANGE))  # may become a node, and be changed
        elif how < 0.7:
            del parent[key]
        elif how < 0.8 and isinstance(parent, list):
            parent[key:key] = [copy.deepcopy(old)] * r.choice([1, 2, 1000])
        elif how < 0.8:
            parent[f"{key}{r.choice(STRANGE)}"] = old
        elif how < 0.9:
            parent[key] = copy.deepcopy(at(tree, r.choice(paths)))
        elif isinstance(old, int):
            parent[key] += r.choice([-2, -1, 1, 2, 1000, 2**31, -(2**31)])
        elif isinstance(old, str) and old:
            place = r.randrange(len(old))
            new = r.choice(["", "9", "9999999", "/", "\x1b", "]", "é"])
            parent[key] = old[:place] + new + old[place + 1 :]
    return tree


def as_text(tree):
    return json.dumps(tree).replace(f'"{NESTED}"', "[" * 100_000 + "]" * 100_000)


def forge(path, keys, value):
    """Change a field of each manifest under a path to a value, or to a function of the old one."""
    for manifest in manifests(path):
        fields = fields_of(manifest)
        parent, key = at(fields, keys[:-1]), keys[-1]
        parent[key] = value(parent[key]) if callable(value) else value
        manifest.write_bytes(sealed(json.dumps(fields)))


@pytest.fixture
def limited():
    """Limit the process's memory to 2 GiB more than it has, so that larger allocations fail."""
    resource, status = pytest.importorskip("resource"), pathlib.Path("/proc/self/status")
    before = resource.getrlimit(resource.RLIMIT_AS)
    if status.exists():
        kib = int(re.search(r"VmSize:\s+(\d+)", status.read_text())[1])
        resource.setrlimit(resource.RLIMIT_AS, (2**10 * kib + 2**31, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def asked(monkeypatch):
    """Return a set to which every path that is read is added."""
    paths = set()
    for name in ("read", "entries"):
        real = getattr(folder.Folder, name)

        def noted(self, name, *arguments, real=real):
            paths.add((self._path / name).resolve())
            return real(self, name, *arguments)

        monkeypatch.setattr(folder.Folder, name, noted)
    return paths


def tried(call):
    """Return the call's result or its error, which must be the library's own.

    Texts of errors and warnings must be fit for a terminal.
    """
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            found = call()
        except (FileNotFoundError, ValueError) as error:
            found = error
    if isinstance(found, ValueError) and not isinstance(found, CorruptCheckpointError):
        assert re.search(
            "of another buffer|has leaves of other|in format|of a rollout|no checkpoint of "
            "one replay buffer|restore:|inspect:",
            str(found),
        ), found
    said = [one.message for one in caught] + [found] * isinstance(found, Exception)
    for text in map(str, said):
        assert not _CONTROL.search(text), text
        assert len(text) < 20_000
    return found


STEP = {
    "obs": {"a": np.zeros(3, np.uint8), "b": np.float32(0)},
    "action": np.float32(0),
    "reward": np.float32(0),
    "terminated": np.False_,
    "truncated": np.False_,
}
FORM = {"num_envs": 2, "autoreset": "next_step"}


def save_two_of(path, buffer):
    """Save two checkpoints, and return the state of the newest."""
    run = jr.jit(buffer)
    state = run.init(STEP)
    step = jax.tree.map(lambda leaf: np.ones((2, *leaf.shape), leaf.dtype), STEP)
    checkpointer = Checkpointer(path, buffer, chunk_bytes=1024, max_to_keep=2)
    for t in range(20):
        step |= {"terminated": np.array([t == 5, False]), "truncated": np.zeros(2, bool)}
        state = run.add(state, step)
        if t in (16, 19):
            checkpointer.save(state, t, metadata={"t": t})
    return state


@pytest.mark.parametrize(
    "buffer",
    [
        jr.prioritized(capacity=32, batch_size=4, track_episodes=True, **FORM),
        jr.rollout(length=4, **FORM),
    ],
    ids=["prioritized", "rollout"],
)
def test_made_up_metadata_gives_own_errors(buffer, tmp_path, limited, asked, capsys):
    path, num_trials = tmp_path / "run", 1700 if SOAK else 100 if ALL else 35
    state = save_two_of(path, buffer)
    before = {file: file.read_bytes() for file in manifests(path)}
    trees = {file: fields_of(file) for file in before}
    r, num_refused = random.Random(str(buffer)), 0
    for trial in range(num_trials):
        for manifest in [*before] if trial % 4 == 3 else [*before][-1:]:
            manifest.write_bytes(sealed(as_text(changed(r, trees[manifest]))))
        restore = Checkpointer(path, buffer).restore
        found = tried(functools.partial(restore, STEP))
        if isinstance(found, Exception):
            num_refused += 1
        else:
            assert jax.tree.map(np.shape, jax.device_get(found)) == jax.tree.map(np.shape, state)
        looked = tried(lambda: checkpoint.inspect(path))
        if not isinstance(looked, Exception):
            for text in (str(looked), looked.to_json()):
                assert not _CONTROL.search(text.replace("\t", " "))
        tried(lambda: checkpoint.verify(path))
        if trial % 5 == 0:
            tried(functools.partial(restore, STEP, allow_partial=True))
        if trial % 20 == 0:
            for options in ([], ["--verify"]):
                with contextlib.suppress(SystemExit):
                    main(["inspect", *options, str(path)])
                printed = capsys.readouterr()
                assert not _CONTROL.search(printed.out + printed.err)
        for file, content in before.items():
            file.write_bytes(content)
    assert 5 < num_refused < num_trials - 5
    assert not [one for one in asked if not one.is_relative_to(path.resolve())]
    restored = Checkpointer(path, buffer).restore(STEP)
    np.testing.assert_array_equal(jax.tree.leaves(restored)[0], jax.tree.leaves(state)[0])


IMPOSSIBLE = "impossible for streams with a length of"
OVERLAP = (
    "has rows of a later group, or rows that the checkpoint does not have|in none of its groups"
)
FOLDER = r"Expected `str` matching regex .*folder"
COUNTERS, FILES = "counters do not fit first, end", "files, rest: they do not fit each other"
ROWS = ("members", "")


FORGED = [
    ((*ROWS, "first"), [0], IMPOSSIBLE),
    ((*ROWS, "first"), [9] * 5, IMPOSSIBLE),
    ((*ROWS, "end"), [3] * 4, IMPOSSIBLE),
    ((*ROWS, "length"), 9, IMPOSSIBLE),
    ((*ROWS, "length"), 2**40, r"Expected `int` <= .*length"),
    ((*ROWS, "end"), [24] * 4, OVERLAP),
    ((*ROWS, "first"), lambda old: [one + 1 for one in old], COUNTERS),
    ((*ROWS, "groups"), lambda old: old[: -2 * NUM_COLUMNS] + 2 * old[-NUM_COLUMNS:], OVERLAP),
    ((*ROWS, "groups"), lambda old: old[:-1], "numbers are no groups"),
    ((*ROWS, "rows", "steps.number"), "key[1]", "data type 'key' not understood"),
    (("files",), lambda old: 2 * old, FILES),
    (("metadata",), '{"a":' * 900 + "0" + "}" * 900, "nested more than 100 deep"),
    ((*ROWS, "saves", 0, "folder"), lambda old: f"../../../outside/rows/{old}", FOLDER),
    ((*ROWS, "saves", 0, "folder"), lambda old: f"/etc/{old}", FOLDER),
]


def test_a_forged_field_is_refused(tmp_path, limited, asked):
    """Forge both checkpoints: rows that cannot be, names that no file can have, and a name that
    leads to intact rows outside."""
    path = save_two(tmp_path / "a" / "run")
    shutil.copytree(path, tmp_path / "outside")
    before = {file: file.read_bytes() for file in manifests(path)}
    asked.clear()
    restore = lambda: Checkpointer(path, BUFFER).restore(EXAMPLE)
    inspect = lambda: checkpoint.inspect(path)
    for keys, value, said in FORGED:
        forge(path, keys, value)
        is_beside = said in (COUNTERS, FILES)  # the rows, which `verify` and `inspect` do not read
        check_refused(said, restore, *[inspect] * (not is_beside), error=CorruptCheckpointError)
        if not is_beside:
            for found in checkpoint.verify(path):
                assert re.search(said, found.problems[0])
        for file, content in before.items():
            file.write_bytes(content)
    assert not [one for one in asked if not one.is_relative_to(path)]


def test_rows_of_a_forged_size_are_not_allocated(tmp_path, limited):
    forge(save_two(tmp_path), (*ROWS, "rows", "steps.bytes"), "uint8[99999999999]")
    assert isinstance(tried(lambda: checkpoint.inspect(tmp_path)), CorruptCheckpointError)


def test_a_newest_manifest_that_cannot_be_read_blocks_neither_restores_nor_saves(tmp_path):
    newest = manifests(save_two(tmp_path))[-1]
    texts = ("[" * 100_000, "null", "{}", '{"format": true}')
    for content in (b"", b"\xff", b"{}", b"00000000\n{}", *map(sealed, texts)):
        newest.write_bytes(content)
        checkpointer = Checkpointer(tmp_path, BUFFER)
        with warned(rf"restore: step 20 was restored; this is damaged:\n  manifests/{newest.name}"):
            checkpointer.restore(EXAMPLE)
    save_run(checkpointer, 26)
    assert Checkpointer(tmp_path, BUFFER).all_steps() == [20, 26]


def test_a_newer_library_s_checkpoint_is_neither_skipped_nor_deleted(tmp_path):
    newest = manifests(save_two(tmp_path))[-1]
    newest.write_bytes(sealed(json.dumps({"format": 99, "library": "9.0\x1b"})))
    said = r"written in format 99, by jaxreplay 9.0\\x1b; this version reads format 1"
    with refused(said):
        checkpoint.restore(tmp_path, BUFFER, EXAMPLE)
    with refused(said):
        checkpoint.save(tmp_path, BUFFER, state_of(26))
    assert newest.exists()
