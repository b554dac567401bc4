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

import pytest

_MOST_BYTES = 2**30  # of the folder, when a run begins
_QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
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


def compile_quickly() -> None:
    """Have XLA fuse without its emitters, in this process and its children, which halves the time
    of compiling. Call this before JAX is imported. It is for jaxlib 0.10: 0.12 has emitters alone,
    and stops at an unknown flag."""
    flags = os.environ.get("XLA_FLAGS", "")
    if importlib.metadata.version("jaxlib").startswith("0.10.") and _QUICK not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_QUICK}".strip()


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
def count_programs(function=None):
    """Yield a function that counts the programs compiled for `function`, or for any, or read from
    the cache, in the block."""
    import jax.monitoring

    counts = collections.Counter()

    def listen(event, _, **options):
        if event == _PROGRAMS:
            counts[options.get("fun_name", "a program")] += 1  # its name, from jax 0.6 on

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: counts[f"jit({function})"] if function else counts.total()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class Counter:
    """Count the programs of all test processes by file, and print the counts at the end.

    A program is what XLA compiles: a jitted function, or one operation outside of `jit`. Programs
    of child processes are not counted.

    Args:
      most: Most programs that a run may compile. More fail it. Default: any number.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most, self.num_read, self.file = most, 0, ""
        self.names: list[str] = []  # of this process's programs
        self.by_file: collections.Counter[str] = collections.Counter()

    @property
    def num_programs(self) -> int:
        return len(self.names)

    def newest(self, count: int) -> str:
        """Name the last `count` programs."""
        return f"{count} programs were compiled: {', '.join(self.names[-count:])}"

    def listen(self) -> None:
        import jax.monitoring

        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, _: float, **options) -> None:
        if event == _PROGRAMS:
            self.names.append(options.get("fun_name", "?"))
            self.by_file[self.file] += 1
        self.num_read += event == _READ

    def pytest_runtest_logstart(self, location) -> None:
        self.file = location[0]

    def pytest_testnodedown(self, node) -> None:
        by_file, num_read = getattr(node, "workeroutput", {}).get("programs", ({}, 0))
        self.by_file.update(by_file)
        self.num_read += num_read

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["programs"] = dict(self.by_file), self.num_read
        elif self.is_too_many and session.exitstatus == 0:
            session.exitstatus = 1

    @property
    def is_too_many(self) -> bool:
        return self.most is not None and self.by_file.total() > self.most

    def pytest_terminal_summary(self, terminalreporter) -> None:
        total = self.by_file.total()
        terminalreporter.write_line(
            f"{total:,} programs: {total - self.num_read:,} compiled, {self.num_read:,} read from "
            "the cache"
        )
        if self.is_too_many:
            terminalreporter.write_line(f"FAILED: at most {self.most:,} are allowed. Most are of")
            for file, count in self.by_file.most_common(10):
                terminalreporter.write_line(f"{count:6,} {file}")
