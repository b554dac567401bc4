"""Checks of what a compiled program does with large arrays: the one definition of "in place"."""

import math
import os
import re

import jax

from tests.support.steps import num_bytes

# These operations name an existing array, or change one in place.
IN_PLACE = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "optimization-barrier",
}
IN_PLACE |= {"scatter", "dynamic-update-slice"}
# Options for HLO as users get it: `compilations.compile_quickly` changes how XLA fuses.
_EMITTERS = "xla_cpu_use_fusion_emitters"
AS_FOR_USERS = {_EMITTERS: True} if _EMITTERS in os.environ.get("XLA_FLAGS", "") else {}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# of an element in bytes; others have 4
SIZES = dict.fromkeys(("pred", "s8", "u8"), 1) | dict.fromkeys(("s16", "u16", "f16", "bf16"), 2)
INSTRUCTION = re.compile(
    r"^\s*(ROOT )?%?(?P<name>\S+) = (?P<type>.+?) (?P<op>[a-z][a-z0-9-]*)\((?P<rest>.*)$"
)


def compiled(function, *arguments, donated=(), compiler_options=None):
    """Compile a function to the HLO that users get."""
    lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
    return lowered.compile((compiler_options or {}) | AS_FOR_USERS)


def large_temporaries(text, num_elements):
    """Return an optimized HLO module's instructions that make an array of at least `num_elements`:
    copies, broadcasts, iotas, and fusions that do more than a scatter."""
    bad = []
    roots = _roots(text)
    for line in text.splitlines():
        match = INSTRUCTION.match(line)
        if match is None or match["op"] in IN_PLACE or _largest(match["type"]) < num_elements:
            continue
        called = re.search(r"calls=%?([\w.\-]+)", match["rest"])
        if (
            match["op"] == "fusion"
            and called
            and roots.get(called[1]) in ("scatter", "dynamic-update-slice", "bitcast")
        ):
            continue
        bad.append(line.strip()[:200])
    return bad


def _largest(shape):
    """Return the elements of the largest array in a type such as `f32[4,2]{1,0}`, or in a tuple."""
    return max(
        (
            math.prod(map(int, filter(None, dims.split(","))))
            for dims in re.findall(r"\w+\[([\d,]*)\]", shape)
        ),
        default=0,
    )


def _roots(text):
    """Map each computation's name to the opcode of its root."""
    roots, current = {}, None
    for line in text.splitlines():
        header = re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header:
            current = header[1]
        match = INSTRUCTION.match(line)
        if match and match[1] and current:
            roots[current] = match["op"]
    return roots


def check_in_place(
    function, arguments, *, num_elements, donated=None, compiler_options=None, reused=None
):
    """Compile, and fail if the program makes large arrays, has large temporary memory, or does not
    reuse a donated state: all its bytes, or `reused` of them. Return the program's text."""
    changed = () if donated is None else donated
    program = compiled(function, *arguments, donated=changed, compiler_options=compiler_options)
    bad = large_temporaries(text := program.as_text(), num_elements)
    assert not bad, "\n".join(["arrays as large as the storage are made:", *bad])
    memory = program.memory_analysis()
    # Less than a float32 leaf of one number a row; a batch takes far less.
    assert memory.temp_size_in_bytes < 4 * num_elements, (
        f"{memory.temp_size_in_bytes} bytes of temporary memory"
    )
    if donated is not None:
        expected = reused or num_bytes(arguments[donated])
        assert memory.alias_size_in_bytes == expected, (
            f"{memory.alias_size_in_bytes} of {expected} bytes are reused"
        )
    return text


def sizes_of(shape):
    """Return the bytes of each array in a type such as `f32[4,2]{1,0}`, or in a tuple."""
    return [
        math.prod(map(int, filter(None, dims.split(",")))) * SIZES.get(kind, 4)
        for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape)
    ]


def sent(text):
    """Return the kind of each collective of a program, and the bytes of its result, sorted."""
    found = []
    for line in text.splitlines():
        match = re.match(r"^\s*(?:ROOT )?%?\S+ = (.+?) ([a-z-]+)\(", line)
        if match and match[2].removesuffix("-start") in COLLECTIVES:
            found.append((match[2].removesuffix("-start"), sum(sizes_of(match[1]))))
    return sorted(found)
