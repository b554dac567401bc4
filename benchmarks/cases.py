"""The measured cases: every row of the results, and in each row the columns that are measured side
by side."""

import dataclasses

NUM_ENVS = 64
BATCH_SIZE = 256
IMAGE_STEPS = 24  # 43 MB
ONE_THREAD = ", one thread"  # after a library's name: its process gives XLA one thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to time in one library. Its fields are plain, since the worker gets it as JSON."""

    # "uniform", "prioritized" or "items"; for look-ups "episodes", "two terminals", "hindsight" or
    # "sequences"
    buffer: str
    # "add", "sample", "update" or "fused" (all buffer operations of a training step); "look up";
    # "ragged"; "crossing"; "sb3 add" or "sb3 sample"
    operation: str
    mode: str  # "call": one jitted call after another; "scan": iterations of one compiled loop
    capacity: int
    obs: str = "vector"  # "vector": float32[8]; "image": uint8[84, 84, 4]
    form: str = ""  # a variant, explained in the file that prepares the case
    iterations: int = 512
    num_envs: int = NUM_ENVS
    batch_size: int = BATCH_SIZE
    population: int = 0  # buffers under `vmap`; 0: one buffer
    episode_length: int = 0  # steps of every episode; 0: dones are random


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a table. Its columns, each (library, case), are timed in turn, round after
    round."""

    # "main", "gpu", "compat", "jits", "threads", "batches", "populations", "forms", "flat",
    # "image", "lengths", "numpy", "ragged", "crossing" or "sb3"
    table: str
    name: str
    columns: dict[str, tuple[str, Case]]

    @property
    def capacity(self) -> int:
        return next(iter(self.columns.values()))[1].capacity


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Capacities in rows."""

    main: tuple[int, ...] = (100_000, 1_000_000)
    # With the second sizes, the rows of all envs fall into the same cache sets.
    flat: tuple[tuple[int, int], ...] = ((16_000, 4_000_000), (2**14, 2**22))
    batches: tuple[int, ...] = (32, 256, 4_096, 16_384)
    populations: tuple[int, ...] = (16, 256)
    member: int = 16_000  # rows of each buffer of a population
    image: int = 20_000
    lengths: tuple[int, int, int] = (10, 1_000, 100_000)  # steps of an episode
    lookups: int = 2**20
    ragged: int = 3_700_000  # steps; 1 GB
    sb3: int = 20_000
    rounds: int = 9  # enough for quartiles
    iterations: int = 512


QUICK = Sizes(
    main=(20_000,),
    flat=((4_096, 65_536),),
    batches=(32,),
    populations=(2,),
    member=1_000,
    image=1_000,
    lengths=(10, 100, 1_000),
    lookups=2**14,
    ragged=37_000,
    sb3=1_000,
    rounds=2,
    iterations=64,
)

_SLOW_FORMS = ("weights", "carried")  # of the fused loop, in which XLA copies flashbax's tree
_OPERATIONS = {"uniform": ("add", "sample"), "prioritized": ("add", "sample", "update")}


def all_rows(sizes: Sizes) -> list[Row]:
    rows = [row for capacity in sizes.main for row in _main(capacity)] + [
        row for capacity in sizes.main for row in _threads(capacity)
    ]
    rows += [row for capacity in sizes.main for row in _compat(capacity)]
    rows += _jits(sizes.main[0])
    rows += _batches(sizes.main[-1], sizes.batches) + _populations(sizes.member, sizes.populations)
    rows += (
        _forms(sizes.main[-1])
        + [row for pair in sizes.flat for row in _flat(*pair)]
        + _image(sizes.image)
    )
    rows += (
        _lengths(sizes.lookups, sizes.lengths)
        + _numpy()
        + [_ragged(sizes.ragged)]
        + _crossings()
        + _sb3(sizes.sb3)
    )
    return [_with_iterations(row, sizes.iterations) for row in rows]


def gpu_rows(sizes: Sizes, has_torchrl: bool) -> list[Row]:
    """Rows for a GPU: loops and calls, of vectors and of images; batches and populations."""
    rows, capacity = [], sizes.main[-1]
    for row in _main(capacity):
        _, case = row.columns["jaxreplay"]
        is_torchrls = has_torchrl and case.buffer == "prioritized" and case.mode == "call"
        columns = _beside_flashbax(case, *["torchrl"] * is_torchrls)
        rows.append(Row("gpu", f"{capacity:,}, {row.name}", columns))
    for operation, mode in (("add", "call"), ("sample", "call"), ("fused", "scan")):
        case = _case("uniform", operation, mode, sizes.image, obs="image")
        name = f"{sizes.image:,} images, {_name(case)}"
        rows.append(Row("gpu", name, _beside_flashbax(case)))
    rows += _populations(sizes.member, sizes.populations) + _batches(capacity, sizes.batches)
    return [_with_iterations(row, sizes.iterations) for row in rows]


def _main(capacity: int) -> list[Row]:
    rows = []
    for buffer, operations in _OPERATIONS.items():
        cases = [
            _case(buffer, operation, mode, capacity)
            for mode in ("call", "scan")
            for operation in operations
        ]
        cases.append(_case(buffer, "fused", "scan", capacity))
        if buffer == "prioritized":
            cases += [_case(buffer, "fused", "scan", capacity, form=form) for form in _SLOW_FORMS]
        rows += [Row("main", _name(case), _beside_flashbax(case, "limit")) for case in cases]
    return rows


def _compat(capacity: int) -> list[Row]:
    """flashbax's functions, and ours with its interface."""
    rows = []
    for buffer, operations in _OPERATIONS.items():
        for operation in (*operations, "fused"):
            case = _case(buffer, operation, "scan" if operation == "fused" else "call", capacity)
            columns = {library: (library, case) for library in ("compat", "flashbax")}
            rows.append(Row("compat", f"{capacity:,} rows, {_name(case)}", columns))
    return rows


def _jits(capacity: int) -> list[Row]:
    """Single calls of `jr.jit`, and of `jax.jit` around the same methods."""
    rows = []
    for buffer, operations in _OPERATIONS.items():
        for operation in operations:
            case = _case(buffer, operation, "call", capacity)
            plain = dataclasses.replace(case, form="jax.jit")
            columns = {"jr.jit": ("jaxreplay", case), "jax.jit": ("jaxreplay", plain)}
            columns["flashbax"] = ("flashbax", case)
            rows.append(Row("jits", f"{capacity:,} rows, {_name(case)}", columns))
    return rows


def _threads(capacity: int) -> list[Row]:
    rows = []
    for buffer, form in (("uniform", ""), *(("prioritized", form) for form in ("", *_SLOW_FORMS))):
        case = _case(buffer, "fused", "scan", capacity, form=form)
        libraries = [
            library + threads
            for library in ("jaxreplay", "flashbax")
            for threads in ("", ONE_THREAD)
        ]
        rows.append(
            Row(
                "threads",
                f"{buffer}, {capacity:,} rows" + (f", {form}" if form else ""),
                {library: (library, case) for library in libraries},
            )
        )
    return rows


def _beside_flashbax(case: Case, *others: str) -> dict[str, tuple[str, Case]]:
    return {library: (library, case) for library in ("jaxreplay", "flashbax", *others)}


def _batches(capacity: int, batch_sizes: tuple[int, ...]) -> list[Row]:
    rows = []
    for buffer, operation in (
        ("uniform", "sample"),
        ("prioritized", "sample"),
        ("prioritized", "update"),
    ):
        for mode in ("call", "scan"):
            for batch_size in batch_sizes:
                case = _case(buffer, operation, mode, capacity, batch_size=batch_size)
                name = f"{_name(case)}, {batch_size:,}"
                rows.append(Row("batches", name, _beside_flashbax(case)))
    return rows


def _populations(capacity: int, sizes: tuple[int, ...]) -> list[Row]:
    rows = []
    for size in sizes:
        for buffer, operations in _OPERATIONS.items():
            for operation in (*operations, "fused"):
                mode = "scan" if operation == "fused" else "call"
                case = _case(buffer, operation, mode, capacity, population=size)
                name = f"{size} buffers, {_name(case)}"
                rows.append(Row("populations", name, _beside_flashbax(case)))
    return rows


def _forms(capacity: int) -> list[Row]:
    """The fused loop of buffers for which flashbax has no counterpart, beside the plain buffer."""
    rows = []
    for buffer in _OPERATIONS:
        plain = _case(buffer, "fused", "scan", capacity)
        forms = ["next_step", "final_obs", "n_step=3"] + (
            ["weights"] if buffer == "prioritized" else []
        )
        for form in forms:
            case = dataclasses.replace(plain, form=form)
            rows.append(
                Row(
                    "forms",
                    f"{buffer}: {form}",
                    {"plain": ("jaxreplay", plain), "form": ("jaxreplay", case)},
                )
            )
    return rows


def _flat(small: int, large: int) -> list[Row]:
    """Writes at two capacities. Their cost must not grow; a hidden copy would show as a
    factor of hundreds."""
    rows = []
    for buffer, operation in (
        ("uniform", "add"),
        ("prioritized", "add"),
        ("prioritized", "update"),
    ):
        for mode in ("call", "scan"):
            cases = {
                name: _case(buffer, operation, mode, capacity)
                for name, capacity in (("small", small), ("large", large))
            }
            columns = {name: ("jaxreplay", case) for name, case in cases.items()}
            columns |= {f"limit_{name}": ("limit", case) for name, case in cases.items()}
            rows.append(Row("flat", _name(cases["small"]), columns))
    return rows


def _image(capacity: int) -> list[Row]:
    rows = []
    for buffer, name in (
        ("items", "items: one take"),
        ("uniform", "uniform, obs and next_obs: two takes"),
    ):
        for mode in ("call", "scan"):
            case = _case(buffer, "sample", mode, capacity, obs="image")
            columns = {"jaxreplay": ("jaxreplay", case)}
            columns |= {
                form: ("limit", dataclasses.replace(case, form=form)) for form in ("fresh", "into")
            }
            rows.append(Row("image", f"{name}, {mode}", columns))
    return rows


def _lengths(capacity: int, lengths: tuple[int, ...]) -> list[Row]:
    """The same rows, in episodes of different lengths; the cost of a look-up must not grow with the
    length."""
    rows = []
    for buffer in ("episodes", "hindsight", "sequences"):
        for mode in ("call", "scan"):
            case = Case(
                buffer=buffer, operation="look up", mode=mode, capacity=capacity, num_envs=4
            )
            columns = {
                str(length): ("jaxreplay", dataclasses.replace(case, episode_length=length))
                for length in lengths
            }
            rows.append(Row("lengths", f"{buffer}, {mode}", columns))
    return rows


def _numpy() -> list[Row]:
    """A full stream of 100 episodes of 100 steps, each with its final observation."""
    rows = []
    for buffer, name in (
        ("episodes", "to the episode's end"),
        ("two terminals", "to the second terminal ahead"),
    ):
        case = Case(
            buffer=buffer,
            operation="look up",
            mode="call",
            capacity=100 * 101,
            num_envs=1,
            episode_length=100,
        )
        columns = {
            mode: ("jaxreplay", dataclasses.replace(case, mode=mode)) for mode in ("call", "scan")
        }
        columns |= {
            form: ("limit", dataclasses.replace(case, form=form)) for form in ("sort", "search")
        }
        rows.append(Row("numpy", name, columns))
    return rows


def _ragged(num_steps: int) -> Row:
    case = Case(buffer="rollout", operation="ragged", mode="call", capacity=num_steps, num_envs=1)
    columns = {
        form: (library, dataclasses.replace(case, form=form))
        for library, form in (("jaxreplay", "streamed"), ("limit", "joined"))
    }
    return Row("ragged", f"64 trajectories, {num_steps:,} steps", columns)


def _crossings() -> list[Row]:
    """jaxreplay's functions first, then the code that a user writes without it."""
    rows = []
    for name, forms in (
        ("JAX to PyTorch", ("to_torch", "numpy", "dlpack")),
        ("PyTorch to JAX", ("from_torch", "copied")),
    ):
        case = Case(buffer="", operation="crossing", mode="call", capacity=0)
        rows.append(
            Row(
                "crossing",
                name,
                {form: ("jaxreplay", dataclasses.replace(case, form=form)) for form in forms},
            )
        )
    return rows


def _sb3(capacity: int) -> list[Row]:
    rows = []
    for buffer in ("ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer", "HerReplayBuffer"):
        for operation in ("sb3 add", "sb3 sample"):
            case = Case(
                buffer=buffer, operation=operation, mode="call", capacity=capacity, num_envs=1
            )
            columns = {
                form: (library, dataclasses.replace(case, form=form))
                for form, library in (("ours", "jaxreplay"), ("theirs", "limit"))
            }
            rows.append(Row("sb3", f"{buffer}: {operation.removeprefix('sb3 ')}", columns))
    return rows


def _case(buffer: str, operation: str, mode: str, capacity: int, **others) -> Case:
    return Case(
        buffer=buffer,
        operation=operation,
        mode=mode,
        capacity=capacity // NUM_ENVS * NUM_ENVS,
        **others,
    )


def _name(case: Case) -> str:
    what = "fused" if case.operation == "fused" else f"{case.operation}, {case.mode}"
    return f"{case.buffer}: {what}" + (f", {case.form}" if case.form else "")


def _with_iterations(row: Row, iterations: int) -> Row:
    def most(case: Case) -> int:
        """Return the most iterations, so that large cases take about as long as others."""
        if case.obs == "image" and case.operation != "sample":
            return IMAGE_STEPS
        return max(iterations * BATCH_SIZE // (case.batch_size * max(case.population, 1)), 16)

    columns = {
        name: (library, dataclasses.replace(case, iterations=min(iterations, most(case))))
        for name, (library, case) in row.columns.items()
    }
    return dataclasses.replace(row, columns=columns)
