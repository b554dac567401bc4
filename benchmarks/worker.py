"""One library in a process of its own: `python worker.py LIBRARY`.

`run.py` sends one JSON object a line through a pipe. {"prepare": NAME, "case": {...}} fills a
buffer and compiles; {"measure": NAME} answers with microseconds per iteration; {"drop": true}
forgets everything prepared; {"where": true} answers with the device of TorchRL's buffers.
"""

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable

from cases import Case


def main(library: str) -> None:
    answers = _answers()
    prepared: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer = None
        if "prepare" in request:
            prepared[request["prepare"]] = _prepare(library, Case(**request["case"]))
        elif "measure" in request:
            answer = prepared[request["measure"]]()
        elif "where" in request:
            import torchrl_buffers

            answer = torchrl_buffers.device()
        else:
            prepared.clear()
            gc.collect()
        print(json.dumps(answer), file=answers, flush=True)


def _prepare(library: str, case: Case) -> Callable[[], float]:
    if case.operation == "ragged":
        import ragged

        return ragged.prepare(case)
    if case.operation == "crossing":
        import torch_crossing

        return torch_crossing.prepare(case)
    if case.operation in ("sb3 add", "sb3 sample"):
        import sb3_buffers

        return sb3_buffers.prepare(case)
    if case.operation == "look up":
        import lookups
        import numpy_lookups

        return (numpy_lookups if library == "limit" else lookups).prepare(case)
    if library == "limit":
        import limit

        return limit.prepare(case)
    if library == "torchrl":
        import torchrl_buffers

        return torchrl_buffers.prepare(case)
    import workload

    if library == "jaxreplay":
        import jaxreplay_buffers

        return workload.prepare(jaxreplay_buffers.Library(case), case)
    import flashbax_buffers

    module = "flashbax" if library == "flashbax" else "jaxreplay.compat.flashbax"
    return workload.prepare(flashbax_buffers.Library(case, importlib.import_module(module)), case)


def _answers():
    """Return the pipe to the parent, and redirect the library's prints to stderr."""
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return pipe


if __name__ == "__main__":
    main(sys.argv[1])
