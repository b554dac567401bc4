"""What a run of the tests costs: programs, seconds of the processors, memory; and the most that
`make test` may cost."""

import collections
import contextlib
import ctypes
import os
import resource
import sys
import time

import pytest

from tests.support import compilations

MOST_LARGE_PROGRAMS = 740  # distinct ones of over LARGE bytes, those of child processes included
MOST_SECONDS = 2200  # of all processes, on all cores, with nothing in the cache
MOST_MEMORY = 3 * 2**30  # of a test process, in bytes
LARGE = 25 * 2**10  # in the cache; half of the time of compiling is that of such programs
_SHOWN = 12  # files


def _seconds(has_workers: bool) -> float:
    """Return the CPU seconds of this process and of its children that ended, but for workers, which
    say their own."""
    return sum(os.times()[: 2 if has_workers else 4])


def _memory() -> int:
    """Return the most bytes that this process ever had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_now() -> int:
    """Return the bytes that this process has, 0 where Linux does not say it."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as line:
        return int(line.read().split()[1]) * resource.getpagesize()
    return 0


def num_mappings() -> int:
    with contextlib.suppress(OSError), open("/proc/self/maps") as lines:
        return sum(1 for _ in lines)
    return 0


def give_back() -> None:
    """Give freed memory back to the system, where the C library has a call for it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Costs:
    """Sum up what all test processes cost, by file, and print it at the end.

    A program is what XLA compiles: a jitted function, or one operation outside of `jit`. Those of
    child processes are counted in the cache's folder alone.

    Args:
      has_budget: Whether a run that costs more than the most fails.
      has_workers: Whether the tests run in other processes.
    """

    def __init__(self, has_budget: bool, has_workers: bool) -> None:
        self.has_budget, self.has_workers, self.began = has_budget, has_workers, time.time()
        self.last = _seconds(has_workers)
        self.names: list[str] = []  # of this process's programs
        self.file = "collection"
        self.programs: collections.Counter[str] = collections.Counter()
        self.seconds: collections.Counter[str] = collections.Counter()
        self.memory: dict[str, int] = {}  # the most that a process had, when a file's test ended

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
        if event == compilations.COMPILED:
            self.names.append(options.get("fun_name", "?"))
            self.programs[self.file] += 1

    def pytest_runtest_logstart(self, location) -> None:
        self.note()
        self.file = location[0]

    def note(self) -> None:
        """Count what came since the last note for the file of the test that runs."""
        now = _seconds(self.has_workers)
        self.seconds[self.file] += now - self.last
        self.last, self.memory[self.file] = now, _memory()

    def pytest_testnodedown(self, node) -> None:
        programs, seconds, memory = getattr(node, "workeroutput", {}).get("costs", ({}, {}, {}))
        self.programs.update(programs)
        self.seconds.update(seconds)
        self.memory |= {file: max(most, self.memory.get(file, 0)) for file, most in memory.items()}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session) -> None:
        self.note()
        if hasattr(session.config, "workeroutput"):
            costs = dict(self.programs), dict(self.seconds), self.memory
            session.config.workeroutput["costs"] = costs
        elif self.has_budget and self.exceeded() and session.exitstatus == 0:
            session.exitstatus = 1

    def num_large(self) -> int:
        return sum(size > LARGE for size in compilations.used(self.began))

    def exceeded(self) -> list[str]:
        """Return a sentence for each limit that the run exceeded."""
        over = [(most, file) for file, most in self.memory.items() if most > MOST_MEMORY]
        first = min(over)[1] if over else None  # what a process had only grows
        costs = (
            (self.num_large(), MOST_LARGE_PROGRAMS, "large programs"),
            (round(self.seconds.total()), MOST_SECONDS, "seconds of the processors"),
            (max(self.memory.values()) >> 20, MOST_MEMORY >> 20, f"MiB in a process, at {first}"),
        )
        return [f"{cost:,} {of}, of at most {most:,}" for cost, most, of in costs if cost > most]

    def pytest_terminal_summary(self, terminalreporter) -> None:
        write = terminalreporter.write_line
        write("seconds of the processors, programs, and the most MiB of a process so far:")
        for file, seconds in self.seconds.most_common(_SHOWN if not self.has_budget else None):
            write(f"{seconds:8.1f} {self.programs[file]:6,} {self.memory[file] >> 20:6,} {file}")
        write(
            f"{self.seconds.total():8.1f} {self.programs.total():6,} "
            f"{max(self.memory.values()) >> 20:6,} in all; {self.num_large()} large programs"
        )
        for sentence in self.exceeded() if self.has_budget else ():
            write(f"FAILED: {sentence} (CONTRIBUTING.md says what to do)")
