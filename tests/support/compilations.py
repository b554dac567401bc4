"""Keep compiled programs from one run of the tests to the next, and count them.

Compiling is most of the time of these tests. All test processes, and the next run, share the
programs in a folder outside of the checkout: `$XDG_CACHE_HOME/jaxreplay/xla`, by default
`~/.cache/jaxreplay/xla`. `JAXREPLAY_CACHE=off` compiles everything anew.
"""

import collections
import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import sys

_MOST_BYTES = 2**30  # of the folder, when a run begins
_PROGRAMS, _READ = (
    "/jax/core/compile/backend_compile_duration",
    "/jax/compilation_cache/cache_retrieval_time_sec",
)


def folder() -> pathlib.Path:
    """Return the folder of this Python, JAX and processor."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib")]
    # Programs use the instructions of the processor.
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        versions += sorted({line for line in lines if line.startswith(("flags", "Features"))})
    key = hashlib.sha256(
        "\n".join([sys.version, platform.machine(), *versions]).encode()
    ).hexdigest()[:16]
    return root() / key


def root() -> pathlib.Path:
    return (
        pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        / "jaxreplay"
        / "xla"
    )


def use_cache() -> None:
    """Have JAX cache programs, in this process and its children. Call this before JAX is
    imported."""
    if os.environ.get("JAXREPLAY_CACHE") != "off":
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder()))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def trim(most_bytes: int = _MOST_BYTES) -> None:
    """If the programs have more than `most_bytes`, delete the least recently read ones until half
    of that is left."""
    found = []
    for path in root().glob("*/*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total = sum(size for _, size, _ in found)
    if total > most_bytes:
        for _, size, path in sorted(found):
            if total <= most_bytes // 2:
                break
            path.unlink(missing_ok=True)
            total -= size


@contextlib.contextmanager
def count_programs(function):
    """Yield a function that counts the programs compiled for `function`, or read from the cache, in
    the block."""
    import jax.monitoring

    counts = collections.Counter()

    def listen(event, _, **options):
        if event == _PROGRAMS:
            counts[options["fun_name"]] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: counts[f"jit({function})"]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class Counter:
    """Count the programs of all test processes, and print the counts at the end."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    def listen(self) -> None:
        import jax.monitoring

        jax.monitoring.register_event_duration_secs_listener(
            lambda name, *_, **__: self.counts.update([name])
        )

    def pytest_sessionfinish(self, session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["programs"] = [self.counts[_PROGRAMS], self.counts[_READ]]

    def pytest_testnodedown(self, node) -> None:
        self.counts.update(
            dict(
                zip(
                    (_PROGRAMS, _READ),
                    getattr(node, "workeroutput", {}).get("programs", (0, 0)),
                    strict=True,
                )
            )
        )

    def pytest_terminal_summary(self, terminalreporter) -> None:
        programs, read = self.counts[_PROGRAMS], self.counts[_READ]
        terminalreporter.write_line(
            f"{programs:,} programs: {programs - read:,} compiled, {read:,} read from the cache"
        )
