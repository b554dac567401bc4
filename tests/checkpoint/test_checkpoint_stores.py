"""Tests of stores: names of paths, and object stores that are down, slow, or truncate answers."""

import contextlib
import http.server
import os
import pathlib
import random
import socket
import threading
import time
import types
import urllib.request

import pytest
import tensorstore

from jaxreplay import checkpoint
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError, PathInUseError
from jaxreplay.checkpoint.store import store_at
from tests.checkpoint.runs import (
    BUFFER,
    EXAMPLE,
    check,
    check_intact,
    check_restored,
    quiet,
    state_of,
)
from tests.conftest import ALL, SOAK
from tests.support.refusals import check_refused, refused

# Names of paths.


def test_one_folder_has_many_names(tmp_path, monkeypatch):
    path = tmp_path / "a run"
    checkpoint.save(path, BUFFER, state_of(4), step=1)
    quoted = str(path).replace(" ", "%20")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    names = [
        f"{path}/",
        f"file://{quoted}",
        f"FILE://{quoted}",
        f"file://LOCALHOST{quoted}/",
        str(path),
        os.fsencode(path),
        pathlib.Path("a run"),
        "a run",
        "~/a run",
    ]
    for name in names:
        assert Checkpointer(name, BUFFER).all_steps() == [1], name
    assert [entry.name for entry in tmp_path.iterdir()] == ["a run"]


@pytest.mark.no_xla
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gs:/bucket/x", "is not a URL: it must begin with gs://"),
        ("S3:/bucket", "is not a URL: it must begin with s3://"),
        ("s3:bucket", "is not a URL: it must begin with s3://"),
        ("file:/x", "is not a URL: it must begin with file:///"),
        ("memory:x", "is not a URL: it must begin with memory://"),
        ("file://elsewhere/x", "names the host 'elsewhere'"),
        *((name, "a path must have a name") for name in ("", b"", "a\0b")),
        *(
            (name, f"must be a path, a URL or a TensorStore specification, got {name}")
            for name in (3, None)
        ),
    ],
)
def test_a_name_of_no_place_is_refused(name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(
        said,
        lambda: Checkpointer(name, BUFFER),
        lambda: checkpoint.inspect(name),
        lambda: checkpoint.verify(name),
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.no_xla
def test_no_url_becomes_a_folder_nor_does_a_look(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("nothing://x", "s4://bucket/x", "s3://", "gs://", "http://", "https://"):
        with pytest.raises((ValueError, OSError)) as caught:
            Checkpointer(name, BUFFER, timeout=3).all_steps()
        assert name.rstrip("/") in str(caught.value) or "URL" in str(caught.value), caught.value
    store_at(tmp_path / "x").entries("manifests")
    with pytest.raises(FileNotFoundError):
        checkpoint.restore(tmp_path / "x", BUFFER, EXAMPLE)
    assert not list(tmp_path.iterdir())


def test_a_specification_says_what_a_url_cannot(tmp_path):
    spec = {"driver": "file", "path": str(tmp_path / "by spec")}
    for place in (spec, tensorstore.KvStore.open({"driver": "memory", "path": "open/"}).result()):
        checkpoint.save(place, BUFFER, state_of(4), step=1)
        check(checkpoint.restore(place, BUFFER, EXAMPLE), 4)
    assert Checkpointer(tmp_path / "by spec", BUFFER).all_steps() == [1]  # the same files
    with refused("nonsense", (ValueError, OSError)):
        Checkpointer({"driver": "nonsense"}, BUFFER)


@pytest.mark.no_xla
@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "3", None, True])
def test_a_timeout_is_a_number_of_seconds(timeout, tmp_path):
    check_refused(
        "timeout must be a number of seconds",
        lambda: Checkpointer(tmp_path, BUFFER, timeout=timeout),
        lambda: checkpoint.verify(tmp_path, timeout=timeout),
    )


@pytest.mark.no_xla
def test_an_object_that_is_too_large_is_not_read(tmp_path):
    for place in ("memory://large", {"driver": "file", "path": str(tmp_path)}):
        store, sizes = store_at(place), []
        store.write("a", [bytes(1000)])
        store.write("none", [])
        there = store._files

        class Watched:
            def read(self, name, there=there, sizes=sizes, **options):
                future = there.read(name, **options)
                with contextlib.suppress(ValueError):  # it has no such bytes
                    sizes.append(len(future.result().value))
                return future

        store._files = Watched()
        for most in (999, 10, 0):
            with refused(f"a has more bytes, expected at most {most}", CorruptCheckpointError):
                store.read("a", most)
        assert sum(sizes) <= 3
        with refused("b is missing", CorruptCheckpointError):
            store.read("b", 10)
        assert len(store.read("none", 0)) == 0
        for most in (1000, 2000):
            assert store.read("a", most).tobytes() == bytes(1000)


class Counted:
    """A store whose requests are noted: the kind of each, and its object or range."""

    def __init__(self, there):
        self.there, self.asked = there, []

    def __getattr__(self, kind):
        def request(*given, **options):
            self.asked.append((kind, given[0], given[1:]))
            return getattr(self.there, kind)(*given, **options)

        return request


def test_a_save_reads_each_manifest_once_and_needs_few_requests():
    """Make seven, and one for each file that is deleted."""
    checkpointer, counts = Checkpointer("memory://counted", BUFFER, max_to_keep=3), []
    line = checkpointer._store._files = Counted(checkpointer._store._files)
    for end in range(4, 16):
        line.asked.clear()
        checkpointer.save(state_of(end), end)
        num_deleted = sum(kind == "write" and given == (None,) for kind, _, given in line.asked)
        reads = [name for kind, name, _ in line.asked if kind == "read"]
        assert len(reads) == len({*reads}) <= 4
        counts.append((len(line.asked), num_deleted))
    assert max(num - num_deleted for num, num_deleted in counts[1:]) == 7
    assert sum(num for num, _ in counts[1:]) <= 10 * len(counts[1:])
    assert max(num_deleted for _, num_deleted in counts) > 1
    check_restored(Checkpointer("memory://counted", BUFFER), 15)


# Servers that are down or do not answer.


def give_credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def spec_at(port, path="run"):
    return {
        "driver": "s3",
        "bucket": "bucket",
        "path": path,
        "endpoint": f"http://127.0.0.1:{port}",
        "aws_region": "us-east-1",
    }


def check_says_so_in_time(place, seconds, said):
    checkpointer = Checkpointer(place, BUFFER, timeout=seconds)
    for call in (
        lambda: checkpointer.restore(EXAMPLE),
        lambda: checkpointer.save(state_of(0), 1),
        lambda: checkpoint.inspect(place, timeout=seconds),
        lambda: checkpoint.verify(place, timeout=seconds),
        checkpointer.all_steps,
    ):
        start = time.monotonic()
        with refused(said, OSError):
            call()
        assert time.monotonic() - start < seconds + 3


def test_a_server_that_is_down_or_silent_is_said_to_be_in_time(monkeypatch):
    give_credentials(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        said = (
            r"s3://bucket/run: no answer .* within 0.4 s: check the server and the credentials, "
            r"or raise timeout="
        )
        check_says_so_in_time(spec_at(port), 0.4, said)
    check_says_so_in_time(spec_at(port), 0.4, "s3://bucket/run")


class EmptyBucket(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        lists = "list-type" in self.path
        content = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>" * lists
        self.send_response(200 if lists else 404)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(handler):
    """Answer requests by a handler, and yield the port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as there:
        there.daemon_threads = True
        thread = threading.Thread(target=there.serve_forever)
        thread.start()
        try:
            yield there.server_address[1]
        finally:
            there.shutdown()
            thread.join()


def test_missing_credentials_are_said_in_time_and_can_be_given(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with serving(EmptyBucket) as port:
        place = spec_at(port) | {"aws_credentials": {"type": "environment"}}
        check_says_so_in_time(place, 0.6, "s3://bucket/run")
        give_credentials(monkeypatch)
        assert Checkpointer(place, BUFFER, timeout=10).all_steps() == []


class Failed:
    def result(self, timeout=None):
        raise OSError("UNAVAILABLE: made up")


class BadLine:
    """A store some of whose requests fail, before or after they are carried out, or get half an
    answer."""

    def __init__(self, there):
        self.there, self.r, self.share, self.num_bad = there, random.Random(1), 0.0, 0

    def __getattr__(self, name):
        return lambda *given, **options: self.asked(getattr(self.there, name), given, options)

    def asked(self, request, given, options):
        how = self.r.choice(["lost", "unanswered", "cut"]) if self.r.random() < self.share else ""
        self.num_bad += bool(how)
        if how == "lost":
            return Failed()
        future = request(*given, **options)
        with contextlib.suppress(ValueError):  # it has no such bytes
            content = getattr(future.result(), "value", None) if how == "cut" else None
            if content:
                half = types.SimpleNamespace(state="value", value=content[: len(content) // 2])
                return types.SimpleNamespace(result=lambda timeout: half)
        if not how:
            return future
        return Failed()


def test_over_a_bad_line_what_is_saved_is_intact():
    """A save succeeds, or fails and keeps what was saved; a restore returns a saved state, the one
    before where it gets half an answer, or fails."""
    place, r, outcomes, before, good = "memory://bad line", random.Random(0), [], set(), set()
    checkpointer, reader = (
        Checkpointer(place, BUFFER, chunk_bytes=4000, max_to_keep=2) for _ in range(2)
    )
    line = checkpointer._store._files = reader._store._files = BadLine(checkpointer._store._files)
    for end in range(5, 155 if ALL else 80, 5):
        line.share, state = r.choice([0.0, 0.01, 0.03, 0.3]), state_of(end)
        with quiet():  # about files that cannot be deleted now
            try:
                checkpointer.save(state, end)
                outcomes.append("saved")
                before, good = good, {end}
            except (OSError, PathInUseError, CorruptCheckpointError):
                good.add(end)  # the manifest may be written and only its answer lost
            with contextlib.suppress(OSError, CorruptCheckpointError, FileNotFoundError):
                restored = reader.restore(EXAMPLE)
                outcomes.append("restored")
                assert reader.step in good | before
                check(restored, reader.step)
    line.share = 0.0
    checkpointer.save(state, end)
    check_restored(Checkpointer(place, BUFFER), end)
    check_intact(checkpointer.verify())
    assert min(outcomes.count("saved"), outcomes.count("restored")) > 3
    assert line.num_bad > 5


@pytest.mark.skipif(not SOAK, reason="needs moto: runs in make soak")
def test_a_run_is_saved_to_a_server_and_restored(monkeypatch):
    """An S3 server on this machine."""
    moto = pytest.importorskip("moto.server")
    give_credentials(monkeypatch)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        bucket = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
        urllib.request.urlopen(bucket).close()
        place = spec_at(port, "plain")
        checkpointer = Checkpointer(place, BUFFER, chunk_bytes=4000, max_to_keep=2)
        for end in range(10, 101, 10):
            checkpointer.save(state := state_of(end), end)
            with refused("has a newer checkpoint, by this process", PathInUseError):
                Checkpointer(place, BUFFER).save(state)
            check(checkpoint.restore(place, BUFFER, EXAMPLE), end)
        assert checkpointer.all_steps() == [90, 100]
        assert [found.problems for found in checkpoint.verify(place)] == [[], []]
        checkpoint.save(place, BUFFER, state, step=101)
        assert Checkpointer(place, BUFFER).all_steps() == [101]
    finally:
        server.stop()
