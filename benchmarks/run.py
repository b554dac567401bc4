"""jaxreplay beside flashbax, NumPy, PyTorch and Stable-Baselines3:
`python benchmarks/run.py [--quick] [--only TEXT]`.

Writes results.json next to this file, and RESULTS.md from it. `--only` measures some of the rows
again and keeps the others, so that a long run can be split.

Each library runs in a process of its own. All columns of a row are prepared first, then timed in
turn, round after round, so that other load on the machine affects them alike. `--quick` has small
sizes: it shows that the benchmark runs, and its figures mean nothing.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import report
from cases import ONE_THREAD, QUICK, Row, Sizes, all_rows
from tqdm import tqdm

_HERE = Path(__file__).resolve().parent
_RESULTS = _HERE / "results.json"
_LIBRARIES = (
    "jaxreplay",
    "flashbax",
    "compat",
    "limit",
    "jaxreplay" + ONE_THREAD,
    "flashbax" + ONE_THREAD,
)


class Worker:
    """A process that measures one library."""

    def __init__(self, library: str):
        self._library = library
        environment = (
            {"JAX_PLATFORMS": "cpu"}
            | dict(os.environ)
            | ({"NPROC": "1"} if library.endswith(ONE_THREAD) else {})
        )
        command = [sys.executable, str(_HERE / "worker.py"), library.removesuffix(ONE_THREAD)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def tell(self, **request) -> None:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self._library} worker ended; its error is above")
        return json.loads(line)

    def ask(self, **request):
        self.tell(**request)
        return self.answer()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure jaxreplay side by side with flashbax and NumPy."
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, one or two minutes")
    parser.add_argument(
        "--only", default="", help="rows whose table or name contains this; the others are kept"
    )
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else Sizes()
    rows = [row for row in all_rows(sizes) if arguments.only in f"{row.table} {row.name}"]
    workers = {library: Worker(library) for library in _LIBRARIES}
    results = [measure(workers, row, sizes.rounds) for row in tqdm(rows, unit="row")]
    for worker in workers.values():
        worker.close()
    about, intro = report.about(arguments.quick), report.INTRO.format(rounds=sizes.rounds)
    print(report.markdown(results, about, intro))
    if arguments.quick:
        return
    rows = {_key(row): row for row in json.loads(_RESULTS.read_text())["rows"]}
    when = f"{about.pop('date')}, {about.pop('machine')}"
    rows |= {_key(row): row for row in (_plain(result, when) for result in results)}
    kept = [_result(row, rows) for row in all_rows(sizes) if _key_of(row) in rows]
    measured: dict[str, dict[str, None]] = {}  # the tables of each day and machine
    for one in kept:
        measured.setdefault(rows[_key_of(one.row)]["measured"], {})[one.row.table] = None
    about |= {f"measured {when}": ", ".join(tables) for when, tables in measured.items()}
    (_HERE / "RESULTS.md").write_text(report.markdown(kept, about, intro))
    plain = {"about": about, "rows": [rows[_key_of(one.row)] for one in kept]}
    _RESULTS.write_text(json.dumps(plain, indent=1) + "\n")


def measure(workers: dict[str, Worker], row: Row, rounds: int) -> report.Result:
    for name, (library, case) in row.columns.items():
        workers[library].tell(prepare=name, case=dataclasses.asdict(case))
    for library, _ in row.columns.values():
        workers[library].answer()
    times: dict[str, list[float]] = {name: [] for name in row.columns}
    for number in range(rounds):
        # Every other round is reversed, so that the column before a column changes.
        for name in list(row.columns)[:: -1 if number % 2 else 1]:
            times[name].append(workers[row.columns[name][0]].ask(measure=name))
    for library in {library for library, _ in row.columns.values()}:
        workers[library].ask(drop=True)
    return report.Result(row, times)


def _key_of(row: Row) -> tuple[str, str, int]:
    return row.table, row.name, row.capacity


def _key(plain: dict) -> tuple[str, str, int]:
    """Return the key of a row of results.json."""
    first = next(iter(plain["columns"].values()))
    return plain["table"], plain["name"], first["case"]["capacity"]


def _result(row: Row, rows: dict) -> report.Result:
    columns = rows[_key_of(row)]["columns"]
    return report.Result(row, {name: columns[name]["rounds_us"] for name in row.columns})


def _plain(result: report.Result, when: str) -> dict:
    columns = {}
    for name, (library, case) in result.row.columns.items():
        columns[name] = {
            "library": library,
            "case": dataclasses.asdict(case),
            "median_us": result.median(name),
            "quartiles_us": result.quartiles(name),
            "rounds_us": result.times[name],
        }
    row = result.row
    return {"table": row.table, "name": row.name, "measured": when, "columns": columns}


if __name__ == "__main__":
    main()
