"""Checks of every buffer's compiled programs, for absent accelerators. Only `make aot` runs them.

There are a million rows, or as many images as fit into a v5e: XLA moves smaller leaves as a whole
into vector memory, which looks like a copy.
"""

import functools
import json
import os
import pathlib
import re

import pytest

if "libtpu" not in os.environ.get("JAXREPLAY_AOT", ""):
    pytest.skip("needs the compilers that `make aot` installs", allow_module_level=True)

import devices
import jax
from programs import CASES, IMAGES, NUMBERS, compile_case, groups_programs, programs

from tests.support.hlo import INSTRUCTION, sizes_of
from tests.support.steps import num_bytes

FEW = os.environ["JAXREPLAY_AOT"] == "libtpu"  # only the TPU, and three programs
KERNELS = json.loads(pathlib.Path(__file__).with_name("kernels.json").read_text())
DEVICES = {"v5e": "tpu"} if FEW else {"v5e": "tpu", "H100": "gpu"}
BATCH_SIZES = (256,) if FEW else (256, 4096)
# calls that other cases lack, of cases that have no other
ONLY = {"prioritized, masked": "add to some", "writable": "write"}
CALLS = ("add", "sample", "update", "loop", "extend", "end_streams", "add to some", "write")
OWN_MEMORY = re.compile(r"S\(1\)")


def cases():
    for device, platform in DEVICES.items():
        for case in (CASES["uniform"],) if FEW else CASES.values():
            for batch_size in BATCH_SIZES if case in NUMBERS else (256,):
                for name in CALLS:
                    has_call = {
                        "update": "prioritized" in case.name,
                        "add to some": False,
                        "write": False,
                        "end_streams": case.can_end_streams,
                    }
                    if case.name in ONLY:
                        has_call = {call: call == ONLY[case.name] for call in CALLS}
                    if has_call.get(name, True) and (
                        name in ("sample", "loop", "update") or batch_size == 256
                    ):
                        yield pytest.param(
                            device,
                            platform,
                            case,
                            name,
                            batch_size,
                            id=f"{device}-{case.name}-{name}-{batch_size}",
                        )


def built(device, platform, case, name, batch_size):
    if reason := devices.why_not(device):
        pytest.fail(reason)
    return _built(device, platform, case.name, name, batch_size)


@functools.cache
def _built(device, platform, case, name, batch_size):
    return compile_case(CASES[case], device, platform, name, batch_size)


def copies(text, least):
    """Return the instructions that make an array of `least` bytes or more, other than writes in
    place.

    Arrays that XLA keeps in a TPU's vector memory for a while do not count: it moves no leaf of
    this size there.
    """
    found = []
    for line in text.splitlines():
        match = INSTRUCTION.match(line)
        if match is None or match["op"] not in (
            "copy",
            "transpose",
            "reshape",
            "convert",
            "concatenate",
            "pad",
            "broadcast",
            "copy-start",
        ):
            continue
        if match["op"] == "copy-start" and OWN_MEMORY.search(match["type"]):
            continue
        largest = max(sizes_of(match["type"]), default=0)
        if largest >= least and not OWN_MEMORY.search(match["type"]):
            found.append(line.strip()[:200])
    return found


def _sample(case, platform, batch_size):
    function, arguments, _ = programs(case, platform, batch_size)["sample"]
    return function, *arguments


def leaf_bytes(case, platform, batch_size):
    """Return the bytes of the largest stored leaf."""
    _, (state, *_), _ = programs(case, platform, batch_size)["add"]
    return max(map(num_bytes, jax.tree.leaves(state.rows.steps)))


@pytest.mark.parametrize(("device", "platform", "case", "name", "batch_size"), list(cases()))
def test_no_program_copies_the_buffer(device, platform, case, name, batch_size):
    program = built(device, platform, case, name, batch_size)
    tenth = leaf_bytes(case, platform, batch_size) // 10
    items = jax.eval_shape(*_sample(case, platform, batch_size)).experience
    # A large batch may itself exceed a tenth, and change its layout.
    assert not copies(program.text, max(tenth, 2 * max(map(num_bytes, jax.tree.leaves(items)))))
    _, arguments, donated = programs(case, platform, batch_size)[name]
    inputs, batch = num_bytes(arguments[1:]), num_bytes(items)
    # Allow temporary memory for the call's arguments and results. A TPU pads rows of 8 numbers to
    # 128, in two or three arrays at a time, and may change the layout of a scan's inputs.
    filled = 40 if case in NUMBERS else 2
    room = {
        "extend": 4 * inputs,
        "sample": filled * batch,
        "loop": 2.2 * inputs + filled * batch,
    }.get(name, 0)
    assert program.temporary < tenth + room, f"{program.temporary:,} bytes of temporary memory"
    if donated is not None:
        assert program.aliased >= num_bytes(arguments[0])


@pytest.mark.parametrize(("device", "platform", "case", "name", "batch_size"), list(cases()))
def test_no_loop_waits_for_the_host(device, platform, case, name, batch_size):
    """Only the scan itself loops, with a known length; on a GPU one CUDA graph holds a whole
    iteration."""
    program = built(device, platform, case, name, batch_size)
    loops = [line for line in program.text.splitlines() if re.search(r" while\(", line)]
    assert all("known_trip_count" in line or platform == "tpu" for line in loops)
    assert len(loops) <= (name in ("loop", "extend"))
    if platform == "gpu":
        assert not [line for line in program.thunks if "kConditional" in line]
        assert sum("kWhile" in line for line in program.thunks) == (name == "loop")
        # XLA makes no graph of fewer than 5 kernels
        num_graphs = sum("kCommandBuffer" in line for line in program.thunks)
        assert num_graphs == 1 or (num_graphs == 0 and program.kernels < 5)


@pytest.mark.parametrize(("device", "platform", "case", "name", "batch_size"), list(cases()))
def test_a_gpu_has_no_more_kernels_than_are_recorded(device, platform, case, name, batch_size):
    program = built(device, platform, case, name, batch_size)
    assert platform != "gpu" or program.kernels <= KERNELS[case.name][name], (
        f"{program.kernels} kernels"
    )


@pytest.mark.skipif(FEW, reason="a program of `make aot` alone")
@pytest.mark.parametrize("case", IMAGES, ids=lambda case: case.name)
def test_images_fit_into_a_v5e(case):
    held = built("v5e", "tpu", case, "sample", 256).held
    _, (state, *_), _ = programs(case, "cpu", 256)["sample"]
    assert held <= 1.15 * num_bytes(state)
    for name in ("add", "sample"):
        assert built("v5e", "tpu", case, name, 256).temporary <= 16e6
    assert built("v5e", "tpu", case, "loop", 256).temporary <= 0.4e9


@pytest.mark.skipif(FEW, reason="a program of `make aot` alone")
@pytest.mark.parametrize(
    ("device", "platform", "name"),
    [
        pytest.param(device, platform, name, id=f"{device}-groups-{name}")
        for device, platform in DEVICES.items()
        for name in groups_programs("cpu")
    ],
)
def test_groups_are_changed_in_place(device, platform, name):
    if reason := devices.why_not(device):
        pytest.fail(reason)
    function, arguments, donated = groups_programs(platform)[name]
    program = devices.compiled(device, function, arguments, donated)
    items = 8 * 4 * 1_000_000
    assert not copies(program.text, items // 10)
    assert program.temporary < items // 10
    # counters that are counted anew are not read
    assert donated is None or program.aliased >= num_bytes(arguments[0]) - 16
    assert not re.search(r" while\(", program.text)
    most = KERNELS["groups"][name]
    assert platform != "gpu" or program.kernels <= most, f"{program.kernels} kernels"
