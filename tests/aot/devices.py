"""Compile for absent accelerators: a TPU by libtpu, a GPU by JAX's CUDA plugin and a description of
the device."""

import dataclasses
import functools
import os
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.update(TPU_SKIP_MDS_QUERY="1", JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
DUMPS = pathlib.Path(tempfile.mkdtemp(prefix="jaxreplay-aot-"))
_DUMP = f"--xla_dump_to={DUMPS} --xla_dump_hlo_as_text=false --xla_dump_hlo_pass_re=none"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DUMP}"

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

jax.config.update("jax_platforms", "cpu")  # takes effect even if JAX was imported before
TPUS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# Public figures of each GPU, in the form of XLA's GpuTargetConfigProto.
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {per_core} threads_per_core_limit: 2048
  core_count: {cores} fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  clock_rate_ghz: {clock} device_memory_size: {memory}
  shared_memory_per_block_optin: {optin}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: 0 }}
}}
platform_name: "CUDA" runtime_version {{ major: 12 minor: 8 }}
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
_FIGURES = {
    "H100": {
        "per_core": 233472, "cores": 132, "fpus": 128, "bandwidth": 3350000000000, "l2": 52428800,
        "clock": 1.98,
        "memory": 85520809984, "optin": 232448, "major": 9,
    },
    "A100": {
        "per_core": 167936, "cores": 108, "fpus": 64, "bandwidth": 1555000000000, "l2": 41943040,
        "clock": 1.41,
        "memory": 42949672960, "optin": 166912, "major": 8,
    },
}  # fmt: skip
GPUS = tuple(_FIGURES)


@functools.cache
def device(name: str) -> Any:
    """Return a device to compile for.

    Raises:
      Exception: JAX's error, if the compiler is not installed.
    """
    if name in TPUS:
        return topologies.get_topology_desc(platform="tpu", topology_name=TPUS[name]).devices[0]
    config = _GPU.format(name=name, **_FIGURES[name])
    return topologies.get_topology_desc(
        platform="cuda", topology_name=name, target_config=config, topology="1x1x1"
    ).devices[0]


def why_not(name: str) -> str | None:
    """Return why nothing can be compiled for a device here, or None."""
    try:
        device(name)
    except Exception as error:
        return f"no compiler for {name}: {str(error).splitlines()[0][:200]}"
    return None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program compiled for a device.

    Attributes:
      text: Optimized HLO.
      seconds: Time to compile.
      temporary: Bytes of the program's own memory.
      held: Bytes of its arguments.
      aliased: Bytes of the arguments that its results reuse.
      accessed: Bytes accessed, as XLA counts them; None if XLA does not count them.
      thunks: The commands of a GPU program, one a line; empty for a TPU.
    """

    text: str
    seconds: float
    temporary: int
    held: int
    aliased: int
    accessed: float | None
    thunks: tuple[str, ...]

    @property
    def kernels(self) -> int:
        return sum(
            bool(
                re.search(
                    r"\bk(Kernel|CustomKernel|Copy|Memset\w*|Gemm|CublasLt\w*|CubSort|Custom(Call)?)\b",
                    line,
                )
            )
            for line in self.thunks
        )


def compiled(
    name: str, function: Callable[..., Any], arguments: tuple[Any, ...], donated: int | None = None
) -> Compiled:
    """Compile a function for arguments that are trees of shapes and dtypes."""
    where = SingleDeviceSharding(device(name))
    specs = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), arguments
    )
    before = set(DUMPS.iterdir())
    lowered = jax.jit(
        function, donate_argnums=() if donated is None else donated, out_shardings=where
    ).lower(*specs)
    start = time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    dumped = [path for path in DUMPS.iterdir() if path not in before]
    # the second is only there where passes changed the first
    thunks = sorted(
        (path for path in dumped if re.search("thunk_sequence.*txt$", path.name)),
        key=lambda path: "after_thunk_passes" not in path.name,
    )
    lines = tuple(thunks[0].read_text().splitlines()) if thunks else ()
    for path in dumped:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return Compiled(
        program.as_text(),
        seconds,
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
        (program.cost_analysis() or {}).get("bytes accessed"),
        lines,
    )
