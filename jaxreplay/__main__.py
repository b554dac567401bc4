"""Command line of jaxreplay: `plan` computes a buffer's memory before a run, and `inspect` shows a
checkpoint's contents."""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from jaxreplay import autoreset
from jaxreplay._util.aliases import Autoreset
from jaxreplay._util.names import printable
from jaxreplay.buffers import factories
from jaxreplay.buffers.tiered import tiered
from jaxreplay.inspection.plan import plan, step_of


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the error in one line, control characters escaped, and exit with status 2."""
        sys.stderr.write(f"{self.prog}: {printable(' '.join(message.split()))}\n")
        raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _Parser(prog="python -m jaxreplay", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_plan(
        commands.add_parser("plan", help="compute the bytes of every leaf, and whether they fit")
    )
    _add_inspect(
        commands.add_parser(
            "inspect", help="show what a checkpoint holds, and warn of what looks wrong"
        )
    )
    options = parser.parse_args(arguments)
    try:
        text, status = options.run(options)
    except (ValueError, ImportError, OSError, MemoryError, OverflowError) as error:
        parser.error(str(error) or type(error).__name__)
    sys.stdout.write(f"{text}\n")
    if status:
        raise SystemExit(status)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--obs",
        action="append",
        default=[],
        metavar="[NAME:][SHAPE:]DTYPE",
        help="leaf of the observation, such as image:84x84x3:uint8",
    )
    parser.add_argument(
        "--action", metavar="[SHAPE:]DTYPE", help="such as 8:float32, or int32; default: float32"
    )
    parser.add_argument(
        "--env",
        metavar="ID",
        help="Gymnasium env, whose spaces replace --obs and --action",
    )
    parser.add_argument("--capacity", type=int, required=True, help="rows")
    parser.add_argument(
        "--num-envs", type=int, default=1, help="envs, each with a ring of capacity / num_envs rows"
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        help="divide the buffer, and show what one device holds",
    )
    parser.add_argument(
        "--rows",
        metavar="PLACE",
        help='"host", or a folder: where the rows lie; default: the device',
    )
    parser.add_argument("--n-step", type=int, default=1, help="steps of a transition")
    parser.add_argument("--prioritized", action="store_true", help="include the tree of priorities")
    parser.add_argument(
        "--autoreset",
        choices=autoreset.FORMS,
        default="next_step",
        help="how the env behaves when an episode ends",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_plan)


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


def _plan(options: argparse.Namespace) -> tuple[str, int]:
    sizes = {"capacity": options.capacity, "num_envs": options.num_envs}
    sizes["batch_size"] = max(options.devices, 1)  # one item a device: it takes no memory
    make = factories.prioritized if options.prioritized else factories.uniform
    buffer = make(**sizes, n_step=options.n_step, autoreset=options.autoreset)
    name, action = _leaf_of("--action", options.action or "float32")
    if name is not None:
        raise ValueError(f"--action: pass one leaf without a name, got {options.action!r}")
    if options.env is not None and (options.obs or options.action):
        raise ValueError("--env: the env's spaces are used; leave out --obs and --action")
    example = (
        step_of(_obs_of(options.obs), action, options.autoreset)
        if options.env is None
        else _step_of_env(options.env, options.autoreset)
    )
    place = buffer if options.rows is None else tiered(buffer, rows=options.rows)
    made = plan(place, example, options.devices)
    if not options.json:
        return str(made), 0
    return json.dumps(
        {**dataclasses.asdict(made), "total": made.memory.total, "fits": made.fits}, indent=2
    ), 0


def _obs_of(texts: list[str]) -> Any:
    """Return the only leaf if it has no name, else a dict of leaves by name."""
    leaves = [_leaf_of("--obs", text) for text in texts]
    names = [name for name, _ in leaves]
    if not leaves:
        raise ValueError("pass --obs for each leaf of the observation, or --env")
    if names == [None]:
        return leaves[0][1]
    if None in names or len(set(names)) < len(names):
        raise ValueError(
            "--obs: several leaves need different names, such as image:84x84x3:uint8; "
            f"got {', '.join(texts)}"
        )
    return dict(leaves)


def _leaf_of(option: str, text: str) -> tuple[str | None, jax.ShapeDtypeStruct]:
    """Parse a leaf, such as `uint8`, `84x84x3:uint8` or `image:84x84x3:uint8`."""
    found = re.fullmatch(
        r"(?:(?P<name>[^:]*[^:x0-9-][^:]*):)?(?:(?P<shape>[0-9]+(?:x[0-9]+)*):)?(?P<dtype>[a-z][a-z0-9_]*)",
        text,
    )
    try:
        if found is None:
            raise ValueError
        dtype = jax.numpy.dtype(found["dtype"])
        if not (jax.numpy.issubdtype(dtype, jax.numpy.number) or dtype.kind == "b"):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            f"{option}: {text!r} is not [NAME:][SHAPE:]DTYPE, such as image:84x84x3:uint8, "
            "31:float32 or int32"
        ) from None
    return found["name"], jax.ShapeDtypeStruct(
        tuple(int(size) for size in (found["shape"] or "").split("x") if size), dtype
    )


def _step_of_env(name: str, form: Autoreset) -> dict[str, Any]:
    try:
        import gymnasium
    except ImportError:
        raise ImportError("--env needs Gymnasium: pip install gymnasium") from None
    try:
        env = gymnasium.make(name)
    except gymnasium.error.Error as error:
        raise ValueError(f"--env: {error}") from None
    obs, action = (
        jax.tree.map(np.asarray, space.sample())
        for space in (env.observation_space, env.action_space)
    )
    env.close()
    return step_of(obs, action, form)


if __name__ == "__main__":
    main()
