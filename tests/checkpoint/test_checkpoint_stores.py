"""Tests of stores: names of paths, and object stores that are down, slow, or truncate answers."""

import contextlib
import http.client
import http.server
import logging
import os
import pathlib
import random
import socket
import threading
import time
import urllib.request
import warnings

import pytest

from tests.conftest import SOAK
from tests.support.checkpointed_run import EXAMPLE, added, expected, items, numbers

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

import tensorstore

from jaxreplay import checkpoint
from jaxreplay.__main__ import main
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError, PathInUseError
from jaxreplay.checkpoint.store import store_at

# Names of paths.


def test_one_folder_has_many_names(tmp_path, monkeypatch):
    buffer, path = items(), tmp_path / "a run"
    state = added(buffer, buffer.init(EXAMPLE), 0, 4)
    checkpoint.save(path, buffer, state, step=1)
    quoted = str(path).replace(" ", "%20")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    names = [
        str(path),
        os.fsencode(path),
        f"{path}/",
        f"file://{quoted}",
        f"FILE://{quoted}",
        f"file://localhost{quoted}",
        "a run",
        "~/a run",
    ]
    for name in [*names, pathlib.Path("a run"), f"file://LOCALHOST{quoted}/"]:
        assert Checkpointer(name, buffer).all_steps() == [1], name
    assert [entry.name for entry in tmp_path.iterdir()] == ["a run"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gs:/bucket/x", "is not a URL: it must begin with gs://"),
        ("s3:/bucket", "is not a URL: it must begin with s3://"),
        ("S3:/bucket", "is not a URL: it must begin with s3://"),
        ("s3:bucket", "is not a URL: it must begin with s3://"),
        ("file:/x", "is not a URL: it must begin with file:///"),
        ("memory:x", "is not a URL: it must begin with memory://"),
        ("file://elsewhere/x", "names the host 'elsewhere'"),
        ("", "a path must have a name"),
        (b"", "a path must have a name"),
        ("a\0b", "a path must have a name"),
        (3, "a path must be a path, a URL or a TensorStore specification, got 3"),
        (None, "a path must be a path, a URL or a TensorStore specification, got None"),
    ],
)
def test_what_names_no_place_is_refused(name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: Checkpointer(name, items()),
        lambda: checkpoint.inspect(name),
        lambda: checkpoint.verify(name),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    assert not list(tmp_path.iterdir())


def test_no_url_becomes_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("nothing://x", "s4://bucket/x", "s3://", "gs://", "http://", "https://"):
        with pytest.raises((ValueError, OSError)) as caught:
            Checkpointer(name, items(), timeout=3).all_steps()
        assert name.rstrip("/") in str(caught.value) or "URL" in str(caught.value), caught.value
    assert not list(tmp_path.iterdir())


def test_a_specification_says_what_a_url_cannot(tmp_path):
    buffer = items()
    state = added(buffer, buffer.init(EXAMPLE), 0, 4)
    spec = {"driver": "file", "path": str(tmp_path / "by spec")}
    for place in (spec, tensorstore.KvStore.open({"driver": "memory", "path": "open/"}).result()):
        with Checkpointer(place, buffer) as checkpointer:
            checkpointer.save(state, 1)
        assert numbers(buffer, Checkpointer(place, buffer).restore(EXAMPLE)) == expected(buffer, 4)
    assert Checkpointer(tmp_path / "by spec", buffer).all_steps() == [1]  # the same files
    with pytest.raises((ValueError, OSError), match="nonsense"):
        Checkpointer({"driver": "nonsense"}, buffer)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "3", None, True])
def test_a_timeout_is_a_number_of_seconds(timeout, tmp_path):
    for call in (
        lambda: Checkpointer(tmp_path, items(), timeout=timeout),
        lambda: checkpoint.verify(tmp_path, timeout=timeout),
    ):
        with pytest.raises(ValueError, match="timeout must be a number of seconds"):
            call()


# Servers that are down or do not answer.


@pytest.fixture
def credentials(monkeypatch):
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


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def check_says_so_in_time(place, seconds, said):
    buffer = items()
    state = buffer.init(EXAMPLE)
    checkpointer = Checkpointer(place, buffer, timeout=seconds)
    calls = (
        lambda: checkpointer.restore(EXAMPLE),
        lambda: checkpointer.save(state, 1),
        lambda: checkpoint.inspect(place, timeout=seconds),
        lambda: checkpoint.verify(place, timeout=seconds),
        checkpointer.all_steps,
    )
    for call in calls:
        start = time.monotonic()
        with pytest.raises(OSError, match=said):
            call()
        assert time.monotonic() - start < seconds + 3


def test_a_server_that_is_down_is_said_to_be_in_time(credentials):
    check_says_so_in_time(spec_at(free_port()), 1.0, "s3://bucket/run")


def test_a_server_that_does_not_answer_is_said_to_be_in_time(credentials):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = (
            r"s3://bucket/run: no answer .* within 1 s: check the server and the credentials, "
            r"or raise timeout="
        )
        check_says_so_in_time(spec_at(silent.getsockname()[1]), 1.0, said)


class EmptyBucket(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        lists = "list-type" in self.path
        content = (
            b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
            if lists
            else b""
        )
        self.send_response(200 if lists else 404)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def test_missing_credentials_are_said_in_time_and_can_be_given(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), EmptyBucket) as there:
        thread = threading.Thread(target=there.serve_forever)
        thread.start()
        try:
            place = {**spec_at(there.server_address[1]), "aws_credentials": {"type": "environment"}}
            check_says_so_in_time(place, 2.0, "s3://bucket/run")
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            assert Checkpointer(place, items(), timeout=10).all_steps() == []
        finally:
            there.shutdown()
            thread.join()


def test_the_command_line_says_it_in_a_line(capsys, credentials):
    for arguments in (
        ["inspect", "http://"],
        ["inspect", "http://127.0.0.1:9/x", "--timeout", "1"],
        ["inspect", "s3:/x"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert said.count("\n") == 1
        assert said.startswith("python -m jaxreplay: ")


# An S3 server on this machine, and a proxy that truncates, refuses and delays.


class Between(http.server.BaseHTTPRequestHandler):
    """Proxy that forwards requests. Some get an error, half an answer, none, or a late one.

    A request without an answer may have been carried out.
    """

    protocol_version = "HTTP/1.1"
    target = 0
    share = 0.0  # of requests that fail or are late
    counts: dict[str, int] = {}  # noqa: RUF012
    r = random.Random(0)

    def answer(self):
        how = (
            self.r.choice(["500", "503", "cut", "cut before", "late", "none"])
            if self.r.random() < self.share
            else "well"
        )
        self.counts[how] = self.counts.get(how, 0) + 1
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if how in ("500", "503", "cut before"):
            if how != "cut before":
                self.send_response(int(how))
                self.send_header("Content-Length", "0")
                self.end_headers()
            self.close_connection = True
            return
        there = http.client.HTTPConnection("127.0.0.1", self.target, timeout=30)
        there.request(self.command, self.path, content, dict(self.headers))
        found = there.getresponse()
        body = found.read()
        there.close()
        if how == "late":
            time.sleep(0.2)
        if how == "none":  # carried out, without an answer
            self.close_connection = True
            return
        self.send_response(found.status)
        for name, value in found.getheaders():
            if name.lower() not in (
                "transfer-encoding",
                "connection",
                "content-length",
                "date",
                "server",
            ):
                self.send_header(name, value)
        self.send_header(
            "Content-Length",
            found.getheader("Content-Length") if self.command == "HEAD" else str(len(body)),
        )
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if how == "cut" else body)
        self.close_connection |= how == "cut"

    do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = answer  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    """Port of a server with an empty bucket."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed: make soak installs it")
    if not SOAK:
        pytest.skip("runs in make soak")
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "someone")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "secret")
    one = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    one.start()
    port = one.get_host_and_port()[1]
    urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
    ).close()
    yield port
    one.stop()


@pytest.fixture
def between(server):
    class Here(Between):
        target, counts, r = server, {}, random.Random(1)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Here) as proxy:
        proxy.daemon_threads = True
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        yield proxy.server_address[1], Here
        proxy.shutdown()


def test_a_run_is_saved_to_a_server_and_restored(server):
    buffer, place = items(capacity=256), spec_at(server, "plain")
    state = buffer.init(EXAMPLE)
    with Checkpointer(place, buffer, chunk_bytes=4000, max_to_keep=2) as checkpointer:
        for end in range(10, 101, 10):
            state = added(buffer, state, end - 10, 10)
            checkpointer.save(state, end, blocking=end % 20 == 0)
            with pytest.raises(PathInUseError, match="is being written to by this process"):
                checkpoint.save(place, buffer, state)
            checkpointer.wait_until_finished(state)
            assert numbers(buffer, checkpoint.restore(place, buffer, EXAMPLE)) == expected(
                buffer, end
            )
        assert checkpointer.all_steps() == [90, 100]
    assert [found.problems for found in checkpoint.verify(place)] == [[], []]
    assert "step 100" in str(checkpoint.inspect(place))
    checkpoint.save(place, buffer, state, step=101)
    assert Checkpointer(place, buffer).all_steps() == [101]


def test_over_a_bad_line_what_is_saved_is_whole(between):
    """Save and restore over a failing connection: a save succeeds, or fails and keeps what was
    saved; a restore returns a saved state or fails."""
    port, line = between
    buffer, place, r = items(capacity=256), {**spec_at(port, "bad line")}, random.Random(0)
    state, end, outcomes, good = (
        buffer.init(EXAMPLE),
        0,
        {"saved": 0, "not saved": 0, "restored": 0, "not restored": 0},
        set(),
    )
    checkpointer = Checkpointer(place, buffer, chunk_bytes=4000, max_to_keep=2, timeout=20)
    for number in range(30):
        line.share = r.choice([0.01, 0.03, 0.1, 0.6])
        state, end = added(buffer, state, end, 5), end + 5
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about files that cannot be deleted now
            try:
                checkpointer.save(state, end, blocking=number % 2 == 0)
                checkpointer.wait_until_finished(state)
                outcomes["saved"] += 1
                good = {end}
            except (OSError, PathInUseError, RuntimeError):
                outcomes["not saved"] += 1
                good.add(end)  # the manifest may be written and only its answer lost
        if number % 3 == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader = Checkpointer(place, buffer, timeout=20)
                try:
                    found = numbers(buffer, reader.restore(EXAMPLE))
                except (OSError, CorruptCheckpointError):
                    outcomes["not restored"] += 1
                else:
                    assert reader.step in good
                    assert found == expected(buffer, reader.step)
                    outcomes["restored"] += 1
    line.share = 0.0
    checkpointer.save(state, end)
    assert numbers(buffer, Checkpointer(place, buffer).restore(EXAMPLE)) == expected(buffer, end)
    assert all(not found.problems for found in checkpointer.verify())
    assert (
        min(
            outcomes["saved"], outcomes["restored"], sum(line.counts.values()) - line.counts["well"]
        )
        > 5
    ), (outcomes, line.counts)
    checkpointer.close()


def test_two_writers_to_a_server_never_mix(between):
    port, line = between
    buffer, place, refused, wrong = items(), spec_at(port, "two"), [], []
    line.share = 0.02
    states = {start: added(buffer, buffer.init(EXAMPLE), start, 20) for start in (0, 500)}

    def run(start, barrier):
        barrier.wait()
        try:
            with Checkpointer(place, buffer, max_to_keep=2, timeout=20) as checkpointer:
                checkpointer.save(states[start])
        except PathInUseError:
            refused.append(start)
        except OSError:
            pass
        except BaseException as error:
            wrong.append(error)

    for _ in range(20):
        barrier = threading.Barrier(2)
        threads = [threading.Thread(target=run, args=(start, barrier)) for start in states]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        with contextlib.suppress(FileNotFoundError):  # neither has saved yet
            line.share = 0.0
            found = numbers(buffer, Checkpointer(place, buffer).restore(EXAMPLE))
            assert found in [numbers(buffer, state) for state in states.values()]
            line.share = 0.02
    assert not wrong
    assert refused


def test_who_only_looks_makes_no_folder(tmp_path):
    store_at(tmp_path / "x").entries("manifests")
    with pytest.raises(FileNotFoundError):
        checkpoint.restore(tmp_path / "x", items(), EXAMPLE)
    assert not list(tmp_path.iterdir())
