"""Tests of hostile checkpoints with valid checksums and wrong content: they give the library's own
errors, use little memory, and no path outside is read."""

import contextlib
import copy
import json
import pathlib
import random
import re
import warnings
import zlib

import jax
import numpy as np
import pytest

from tests.conftest import SOAK

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.__main__ import main
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError, folder

# control characters, except the newline
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_MOST_MORE = 2**30  # bytes; `limited` allows twice as much

NESTED = "@nested@"  # stands for 100,000 nested lists
STRANGE = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        7,
        255,
        2**31 - 1,
        2**31,
        2**32,
        2**53,
        2**62,
        2**63,
        2**64,
        10**30,
        -(2**63),
        -(10**30),
    ),
    *(
        0.5,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "a",
        "0",
        "-1",
        "x" * 5000,
        "..",
        "../../../../etc/passwd",
        "/etc/passwd",
        "~",
    ),
    *(
        "\x1b[31mred\x1b[2J",
        "a\nb\r\x07",
        "\u202edlrow",
        "\x00",
        "\ud800",
        "é",
        "0000000001-00000000",
        "0000000001-00000000-000000",
    ),
    *(
        "float32[]",
        "uint8[99999999999]",
        "float64[999999, 999999, 999999]",
        "object[2]",
        "int4[3]",
        "bfloat16[1]",
        "key<fry>[]",
        "str[1]",
    ),
    *(
        [],
        {},
        [[]],
        [{}],
        {"a": 1},
        [1],
        [0, 0],
        [-1, -1],
        [2**70],
        [[1, 2]],
        [[2**62, 1]],
        [0] * 3000,
        NESTED,
    ),
]


def nodes(tree, path=()):
    """Yield the path of each node of a JSON tree."""
    yield path
    for key, value in (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    ):
        yield from nodes(value, (*path, key))


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def changed(r, tree):
    """Return a copy with random changes, mostly one, and often near the root."""
    tree = copy.deepcopy(tree)
    for _ in range(r.choice([1, 1, 1, 2, 5])):
        path = r.choice(
            sorted(nodes(tree), key=lambda path: (len(path), str(path)))[
                : r.choice([20, 60, 10**6])
            ]
        )
        if not path:
            if r.random() < 0.1:
                return r.choice(STRANGE)
            continue
        parent, key, how = at(tree, path[:-1]), path[-1], r.random()
        if how < 0.6:
            parent[key] = copy.deepcopy(r.choice(STRANGE))  # may become a node, and be changed
        elif how < 0.7:
            del parent[key]
        elif how < 0.8 and isinstance(parent, list):
            parent[key:key] = [copy.deepcopy(parent[key])] * r.choice([1, 2, 1000])
        elif how < 0.8:
            parent[f"{key}{r.choice(STRANGE)}"] = parent[key]
        elif how < 0.9:
            parent[key] = copy.deepcopy(at(tree, r.choice([*nodes(tree)])))
        elif isinstance(parent[key], int):
            parent[key] += r.choice([-2, -1, 1, 2, 1000, 2**31, -(2**31)])
        elif isinstance(parent[key], str) and parent[key]:
            place = r.randrange(len(parent[key]))
            parent[key] = (
                parent[key][:place]
                + r.choice(["", "9", "9999999", "/", "\x1b", "]", "é"])
                + parent[key][place + 1 :]
            )
    return tree


def as_text(tree):
    return json.dumps(tree).replace(f'"{NESTED}"', "[" * 100_000 + "]" * 100_000)


def sealed(text):
    body = text.encode()
    return f"{zlib.crc32(body):08x}\n".encode() + body


def buffers():
    flag, zero = np.False_, np.zeros((), np.float32)
    step = {
        "obs": {"a": np.zeros(3, np.uint8), "b": zero},
        "action": zero,
        "reward": zero,
        "terminated": flag,
        "truncated": flag,
    }
    yield (
        jr.items(capacity=32, num_envs=2, batch_size=4),
        {"x": np.zeros(3, np.float32), "y": np.zeros((), np.int32)},
    )
    yield (
        jr.prioritized(
            capacity=32,
            num_envs=2,
            batch_size=4,
            autoreset="next_step",
            track_episodes=True,
            normalize_weights="buffer",
        ),
        step,
    )
    yield jr.rollout(length=4, num_envs=2, autoreset="next_step"), step


def saved(path, buffer, example, num_steps):
    checkpointer = Checkpointer(path, buffer, chunk_bytes=1024, max_to_keep=2, progress=False)
    state, steps = (
        buffer.init(example),
        jax.tree.map(lambda leaf: np.ones((2, *leaf.shape), leaf.dtype), example),
    )
    add = jax.jit(buffer.add)
    for t in range(num_steps):
        state = add(
            state,
            {**steps, "terminated": np.array([t == 5, False]), "truncated": np.zeros(2, bool)}
            if "obs" in example
            else steps,
        )
        if t in (num_steps - 4, num_steps - 1):
            checkpointer.save(state, t, metadata={"t": t})
    checkpointer.close()
    return state


def memory_of_process():
    fields = dict(
        line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines()
    )
    return int(fields["VmSize"].split()[0]) * 1024


@pytest.fixture
def limited():
    """Limit the process's memory to 2 GiB more than it has, so that larger allocations fail."""
    resource = pytest.importorskip("resource")
    if not pathlib.Path("/proc/self/status").exists():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_of_process() + 2 * _MOST_MORE, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def asked(monkeypatch):
    """Return a set to which every path that is read is added."""
    paths = set()
    real_read, real_listdir = folder.Folder.read, folder.Folder.entries

    def read(self, name, *arguments):
        paths.add((self._path / name).resolve())
        return real_read(self, name, *arguments)

    def entries(self, name):
        paths.add((self._path / name).resolve())
        return real_listdir(self, name)

    monkeypatch.setattr(folder.Folder, "read", read)
    monkeypatch.setattr(folder.Folder, "entries", entries)
    return paths


def tried(call):
    """Return the call's result or its error, which must be the library's own.

    Texts of errors and warnings must be fit for a terminal.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = call()
        except (FileNotFoundError, ValueError) as error:
            found = error
    if isinstance(found, ValueError) and not isinstance(found, CorruptCheckpointError):
        assert re.search(
            "of another buffer|has leaves of other|in format|of a rollout|no checkpoint of "
            "a replay buffer|restore:|inspect:",
            str(found),
        ), found
    for text in [
        str(found) if isinstance(found, Exception) else "",
        *(str(one.message) for one in caught),
    ]:
        assert not _CONTROL.search(text), text
        assert len(text) < 20_000
    return found


def test_rows_of_a_forged_size_are_not_allocated(tmp_path, limited):
    buffer, example = next(buffers())
    saved(tmp_path, buffer, example, 20)
    manifest = max((tmp_path / "manifests").iterdir())
    text = manifest.read_text().split("\n", 1)[1]
    assert "float32[3]" in text
    manifest.write_bytes(sealed(text.replace("float32[3]", "float32[99999999999]")))
    assert isinstance(tried(lambda: checkpoint.inspect(tmp_path)), CorruptCheckpointError)


@pytest.mark.parametrize(
    ("buffer", "example"), list(buffers()), ids=["items", "prioritized", "rollout"]
)
def test_made_up_metadata_gives_own_errors(buffer, example, tmp_path, limited, asked, capsys):
    path = tmp_path / "run"
    state = saved(path, buffer, example, 20)
    manifests = sorted((path / "manifests").iterdir())
    before = {file: file.read_bytes() for file in manifests}
    trees = {file: json.loads(text.split(b"\n", 1)[1]) for file, text in before.items()}
    r, outcomes = random.Random(str(buffer)), {"whole": 0, "refused": 0}
    for trial in range(1700 if SOAK else 60):
        for manifest in manifests if trial % 4 == 3 else manifests[-1:]:
            manifest.write_bytes(sealed(as_text(changed(r, trees[manifest]))))
        found = tried(lambda: Checkpointer(path, buffer, progress=False).restore(example))
        if not isinstance(found, Exception):
            jax.block_until_ready(jax.tree.map(lambda leaf: leaf + 0, found))
            assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, state)
        outcomes["refused" if isinstance(found, Exception) else "whole"] += 1
        looked = tried(lambda: checkpoint.inspect(path))
        if not isinstance(looked, Exception):
            for text in (str(looked), looked.to_json(), looked.to_html()):
                assert not _CONTROL.search(text.replace("\t", " "))
        tried(lambda: checkpoint.verify(path, progress=False))
        tried(
            lambda: Checkpointer(path, buffer, progress=False).restore(example, allow_partial=True)
        ) if trial % 5 == 0 else None
        if trial % 20 == 0:
            for arguments in (["inspect", str(path)], ["inspect", "--verify", str(path)]):
                with contextlib.suppress(SystemExit):
                    main(arguments)
                printed = capsys.readouterr()
                assert not _CONTROL.search(printed.out + printed.err)
        for file, content in before.items():
            file.write_bytes(content)
    assert outcomes["whole"] > 5
    assert outcomes["refused"] > 5
    outside = [str(one) for one in asked if not one.is_relative_to(path.resolve())]
    assert not outside
    assert np.array_equal(
        jax.tree.leaves(Checkpointer(path, buffer).restore(example))[0], jax.tree.leaves(state)[0]
    )


def test_a_newest_manifest_that_cannot_be_read_blocks_neither_restores_nor_saves(tmp_path):
    buffer, example = next(buffers())
    state = saved(tmp_path, buffer, example, 20)
    newest = sorted((tmp_path / "manifests").iterdir())[-1]
    for content in (
        b"",
        b"\xff",
        sealed("[" * 100_000),
        sealed("null"),
        sealed("{}"),
        sealed('{"format": true}'),
        b"00000000\n{}",
        b"{}",
    ):
        newest.write_bytes(content)
        checkpointer = Checkpointer(tmp_path, buffer)
        with pytest.warns(
            UserWarning,
            match=rf"restore: step 16 was restored; this is damaged:\n  manifests/{newest.name}",
        ):
            checkpointer.restore(example)
    with checkpointer:
        checkpointer.save(state, 21)
    assert Checkpointer(tmp_path, buffer).all_steps() == [16, 21]


def test_a_newer_library_s_generation_is_neither_skipped_nor_deleted(tmp_path):
    buffer, example = next(buffers())
    state = saved(tmp_path, buffer, example, 20)
    newest = sorted((tmp_path / "manifests").iterdir())[-1]
    newest.write_bytes(sealed('{"format": 99, "library": "9.0\x1b"}'.replace("\x1b", "\\u001b")))
    said = r"written in format 99, by jaxreplay 9.0\\x1b; this version reads format 7"
    with pytest.raises(ValueError, match=said):
        checkpoint.restore(tmp_path, buffer, example)
    with pytest.raises(ValueError, match=said):
        checkpoint.save(tmp_path, buffer, state)
    assert newest.exists()


def test_no_folder_outside_is_followed(tmp_path, asked):
    """Let a manifest's group name lead to an intact group outside: it is refused."""
    buffer, example = next(buffers())
    path = tmp_path / "a" / "run"
    saved(path, buffer, example, 20)
    saved(tmp_path / "b", buffer, example, 20)
    asked.clear()
    for manifest in (path / "manifests").iterdir():
        tree = json.loads(manifest.read_bytes().split(b"\n", 1)[1])
        for where in ("../../../b/rows/", "/etc/", f"{tmp_path}/b/rows/"):
            tree["groups"]["saves"][0]["folder"] = where + tree["groups"]["saves"][0]["folder"]
            manifest.write_bytes(sealed(json.dumps(tree)))
            with pytest.raises(
                CorruptCheckpointError, match=r"groups: saves\[0\]: folder: expected a name such as"
            ):
                Checkpointer(path, buffer).restore(example, int(tree["step"]))
    assert not [one for one in asked if not one.is_relative_to(path)]


def test_a_size_is_compared_with_the_file_before_memory_is_taken(tmp_path, limited):
    """Let the manifests claim 2**40 rows a stream: a restore and `inspect` refuse it."""
    buffer, example = next(buffers())
    state = saved(tmp_path, buffer, example, 20)
    del state
    for manifest in (tmp_path / "manifests").iterdir():
        tree = json.loads(manifest.read_bytes().split(b"\n", 1)[1])
        tree["length"] = 2**40
        manifest.write_bytes(sealed(json.dumps(tree)))
    with pytest.raises(ValueError, match="length"):
        Checkpointer(tmp_path, buffer).restore(example)
    with pytest.raises(ValueError, match="length"):
        checkpoint.inspect(tmp_path)


@pytest.mark.parametrize("where", ["leaves", "chunks"])
def test_a_name_that_no_file_can_have_is_refused(where, tmp_path):
    buffer, example = next(buffers())
    saved(tmp_path, buffer, example, 20)
    for manifest in (tmp_path / "manifests").iterdir():
        tree = json.loads(manifest.read_bytes().split(b"\n", 1)[1])
        if where == "leaves":
            tree["groups"]["leaves"][0] = "\ud800"
        else:
            tree["chunks"]["\ud800"] = tree["chunks"].pop(next(iter(tree["chunks"])))
        manifest.write_bytes(sealed(json.dumps(tree)))
    for call in (
        lambda: Checkpointer(tmp_path, buffer).restore(example),
        lambda: checkpoint.inspect(tmp_path),
    ):
        with pytest.raises(CorruptCheckpointError, match=rf"{where}.*: expected a name, got"):
            call()
    assert all(
        "expected a name" in problem
        for found in checkpoint.verify(tmp_path)
        for problem in found.problems
    )


def test_rows_of_leaves_without_elements_are_saved(tmp_path):
    """Save rows whose only leaf has no elements, so no file has data of them."""
    buffer, example = (
        jr.items(capacity=8, num_envs=2, batch_size=2),
        {"x": np.zeros((0, 3), np.float32)},
    )
    state = buffer.add(buffer.init(example), {"x": np.zeros((2, 0, 3), np.float32)})
    checkpoint.save(tmp_path, buffer, state)
    assert int(buffer.size(checkpoint.restore(tmp_path, buffer, example))) == 2
    assert checkpoint.inspect(tmp_path).to_json()
    assert [found.problems for found in checkpoint.verify(tmp_path)] == [[]]
