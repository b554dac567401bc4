"""Uninitialized arrays on the CPU, for callers that write every element: filling them with zeros
would cost as much as reading a file.

XLA has no operation that leaves its result uninitialized. So one that does nothing is registered
with XLA's foreign function interface. XLA allocates the memory, so a later program can reuse it in
place when it is donated. For large arrays the system is asked for large pages: with small ones it
would set up 250,000 pages a GB, which alone takes longer than copying a file into them.

References:
  XLA's xla/ffi/api/c_api.h, which defines these structures.
"""

import ctypes
import functools
import mmap
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version

# versions of jaxlib (from, before) that are known to have these structures; others get zeros
_KNOWN = (0, 10), (0, 13)
_LARGE = 2**26  # bytes; smaller arrays are zeros
_PAGE = 2**21  # bytes of a large page
_TARGET = "jaxreplay_unwritten"
_METADATA = 1  # type of the extension that asks a function for its version


def like(tree: Any) -> Any:
    """Return new arrays of the tree's shapes and dtypes on the default device, which must be a CPU.
    Large arrays have arbitrary content, others are zeros."""
    leaves, structure = jax.tree.flatten(tree)
    large = [leaf for leaf in leaves if _num_bytes(leaf) >= _LARGE] if _is_there() else []
    found = iter(_allocated(tuple((leaf.shape, leaf.dtype) for leaf in large)))
    return structure.unflatten(
        [next(found) if leaf in large else jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    )


def _num_bytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize


def _allocated(described: tuple[tuple[tuple[int, ...], Any], ...]) -> list[jax.Array]:
    if not described:
        return []
    arrays = jax.block_until_ready(_program(described)())
    for array in arrays:
        _ask_for_large_pages(array.unsafe_buffer_pointer(), array.nbytes)
    return arrays


@functools.cache
def _program(described: tuple[tuple[tuple[int, ...], Any], ...]) -> Any:
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in described]
    return jax.jit(lambda: jax.ffi.ffi_call(_TARGET, results)())


def _ask_for_large_pages(start: int, size: int) -> None:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    first, last = -(-start // _PAGE) * _PAGE, (start + size) // _PAGE * _PAGE
    if advice is not None and first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


class _Extension(ctypes.Structure):
    pass


_Extension._fields_ = [
    ("struct_size", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("next", ctypes.POINTER(_Extension)),
]


class _Version(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("next", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    ]


class _Metadata(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("version", _Version),
        ("traits", ctypes.c_uint32),
    ]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _Extension), ("metadata", ctypes.POINTER(_Metadata))]


class _Call(ctypes.Structure):
    """Beginning of XLA's call frame."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("extension", ctypes.POINTER(_Extension))]


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Call))
def _write_nothing(call: Any) -> None:
    """Return no error. At registration, XLA asks for the version of its interface, 0.1."""
    extension = call.contents.extension
    if extension and extension.contents.type == _METADATA:
        metadata = ctypes.cast(
            extension, ctypes.POINTER(_MetadataExtension)
        ).contents.metadata.contents
        metadata.version.major, metadata.version.minor, metadata.traits = 0, 1, 0


@functools.cache
def _is_there() -> bool:
    if not _KNOWN[0] <= tuple(map(int, jaxlib.version.__version__.split(".")[:2])) < _KNOWN[1]:
        return False
    try:
        jax.ffi.register_ffi_target(
            _TARGET, jax.ffi.pycapsule(ctypes.cast(_write_nothing, ctypes.c_void_p)), platform="cpu"
        )
    except Exception:  # zeros are correct, too
        return False
    return True
