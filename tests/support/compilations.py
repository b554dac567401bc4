"""Keep compiled programs from one run of the tests to the next.

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
_QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
COMPILED = "/jax/core/compile/backend_compile_duration"


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
        # XLA's own caches would put the folder's path into each program's key.
        os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")


def compile_quickly() -> None:
    """Have XLA leave machine code as it is, and fuse without its emitters, in this process and its
    children. Call this before JAX is imported. The second is for jaxlib 0.10: 0.12 has emitters
    alone, and stops at an unknown flag."""
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "True"
    flags = os.environ.get("XLA_FLAGS", "")
    if importlib.metadata.version("jaxlib").startswith("0.10.") and _QUICK not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_QUICK}".strip()


def begin(most_bytes: int = _MOST_BYTES) -> None:
    """Note when each program was last used, so that `used` knows which ones this run uses. If they
    have more than `most_bytes`, delete the least recently used ones until half of that is left."""
    found = []
    for path in root().glob("*/*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            last = max(status.st_atime, status.st_mtime)
            os.utime(path, (last - 1, last))  # so Linux notes the next time that it is read
            found.append((last, status.st_size, path))
    total = sum(size for _, size, _ in found)
    if total > most_bytes:
        for _, size, path in sorted(found):
            if total <= most_bytes // 2:
                break
            path.unlink(missing_ok=True)
            total -= size


def used(since: float) -> list[int]:
    """Return the sizes, in bytes, of the programs that were compiled or read since then, by child
    processes, too."""
    statuses = [path.stat() for path in folder().glob("*-cache")]
    return [s.st_size for s in statuses if max(s.st_atime, s.st_mtime) >= since]


@contextlib.contextmanager
def count_programs(function=None):
    """Yield a function that counts the programs compiled for `function`, or for any, or read from
    the cache, in the block."""
    import jax.monitoring

    counts = collections.Counter()

    def listen(event, _, **options):
        if event == COMPILED:
            counts[options.get("fun_name", "a program")] += 1  # its name, from jax 0.6 on

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: counts[f"jit({function})"] if function else counts.total()
    finally:
        if hasattr(jax.monitoring, "unregister_event_duration_listener"):  # an older JAX lacks it
            jax.monitoring.unregister_event_duration_listener(listen)
