"""`store_at`: open the store of files at a path, URL or TensorStore specification."""

import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

import tensorstore as ts

from jaxreplay._util import checks
from jaxreplay.checkpoint.files import Files
from jaxreplay.checkpoint.folder import Folder
from jaxreplay.checkpoint.object_store import Objects

_SCHEMES = ("file", "gs", "s3", "http", "https", "memory")  # of URLs, to recognize mistyped ones


def store_at(path: Any, timeout: float = 60.0) -> Files:
    """Open the store at a path or URL.

    Args:
      path: A path or URL, such as "runs/replay", "memory://replay/" or "s3://bucket/replay/"; or
        TensorStore's specification of a key-value store, as a mapping; or an open
        `tensorstore.KvStore`.
      timeout: Seconds that a request to an object store may take. Default: 60.

    Raises:
      ValueError: `path` is none of these.
      OSError: The store cannot be opened.
    """
    checks.checked_seconds("checkpoint", timeout, 0.001)
    if isinstance(path, Mapping | ts.KvStore):
        return Objects(path, timeout)
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise ValueError(
            f"a path must be a path, a URL or a TensorStore specification, got {path!r}"
        ) from None
    if not text or "\0" in text:
        raise ValueError(f"a path must have a name, got {text!r}")
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):(/*)", text)
    if found is None or (not found[2] and found[1].lower() not in _SCHEMES):
        return Folder(os.path.expanduser(text))
    scheme, rest = found[1].lower(), text[found.end() :]
    if found[2] == "//" or (scheme == "file" and found[2] == "///"):
        return (
            Objects(f"{scheme}://{rest}", timeout)
            if scheme != "file"
            else Folder(_local_path(text, found[2], rest))
        )
    if scheme in _SCHEMES:
        raise ValueError(
            f"{text!r} is not a URL: it must begin with {scheme}://{'/' * (scheme == 'file')}"
        )
    return Folder(text)


def _local_path(url: str, slashes: str, rest: str) -> str:
    """Return the local path of a `file:` URL, whose host may only be this machine."""
    host, slash, path = ("", "/", rest) if slashes == "///" else rest.partition("/")
    if host.lower() not in ("", "localhost") or not slash:
        raise ValueError(
            f"{url!r} names the host {host!r}: for a local path write file:///path, or the path "
            "without file:"
        )
    return urllib.parse.unquote(f"/{path}")
