"""Command line of jaxreplay: `inspect` shows a checkpoint, `info` what a report needs."""

import argparse
import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

import jax

from jaxreplay._util.names import printable


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the error in one line, control characters escaped, and exit with status 2."""
        sys.stderr.write(f"{self.prog}: {printable(' '.join(message.split()))}\n")
        raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _Parser(prog="python -m jaxreplay", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_inspect(
        commands.add_parser(
            "inspect", help="show what a checkpoint holds, and warn of what looks wrong"
        )
    )
    info = commands.add_parser("info", help="show what a report of a fault needs")
    info.set_defaults(run=_info)
    options = parser.parse_args(arguments)
    try:
        text, status = options.run(options)
    except (ValueError, ImportError, OSError, MemoryError, OverflowError) as error:
        parser.error(str(error) or type(error).__name__)
    sys.stdout.write(f"{text}\n")
    if status:
        raise SystemExit(status)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="folder or URL of a Checkpointer")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    parser.add_argument("--member", default="", metavar="NAME", help="member of a mixture")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--plot", metavar="FILE", help="write a page with plots, such as page.png; needs matplotlib"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every file of every checkpoint; exit with status 1 if one is damaged",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="limit of a request to a remote store",
    )
    parser.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> tuple[str, int]:
    from jaxreplay import checkpoint  # needs jaxreplay[checkpoint]

    if options.verify:
        if options.plot is not None:
            raise ValueError("--verify writes no page; leave out --plot")
        return _verify(options)
    found = checkpoint.inspect(
        options.path, step=options.step, member=options.member, timeout=options.timeout
    )
    if options.plot is not None:
        found.to_figure().savefig(options.plot)
    return (found.to_json() if options.json else str(found)), 0


def _verify(options: argparse.Namespace) -> tuple[str, int]:
    from jaxreplay import checkpoint  # needs jaxreplay[checkpoint]

    found = checkpoint.verify(options.path, timeout=options.timeout)
    if options.step is not None:
        found = [one for one in found if one.step in (options.step, None)]
        if all(one.step is None for one in found):
            raise FileNotFoundError(
                f"there is no checkpoint of step {options.step} under {options.path}"
            )
    if options.json:
        text = json.dumps([{"step": one.step, "problems": one.problems} for one in found], indent=2)
    else:
        lines = []
        for one in found:
            name = "unreadable" if one.step is None else f"step {one.step}"
            lines += [
                f"{name}: {'is broken' if one.problems else 'is intact'}",
                *(f"  {printable(problem)}" for problem in one.problems),
            ]
        text = "\n".join(lines)
    return text, int(any(one.problems for one in found))


def _info(_: argparse.Namespace) -> tuple[str, int]:
    """Return the versions of this machine's Python, of the library and of all that it may use, and
    JAX's devices."""
    versions = {"Python": platform.python_version(), "platform": platform.platform()}
    for line in ("jaxreplay", "jaxlib", *(importlib.metadata.requires("jaxreplay") or ())):
        name = re.split(r"[^\w.-]", line)[0]
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "-"
    try:
        versions["devices"] = ", ".join(map(str, jax.devices()))
    except RuntimeError as error:
        versions["devices"] = str(error)
    return "\n".join(f"{name}: {found}" for name, found in versions.items()), 0


if __name__ == "__main__":
    main()
