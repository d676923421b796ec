"""The registry on a local directory: `file:DIR`, `file:///abs/dir` or a plain path."""

from __future__ import annotations

from pathlib import Path

from pxrs import disk
from pxrs.errors import InvalidUrl
from pxrs.registry.address import Address
from pxrs.registry.contract import Registry


def open(address: Address) -> Registry:
    disk.require_posix("a file registry")
    address.refuse_unknown_options(("timeout",))
    host, path = "", address.rest
    if path.startswith("//"):
        host, slash, rest = path[2:].partition("/")
        path = slash + rest
    if host not in ("", "localhost"):
        raise InvalidUrl(f"{address.text}: {host!r} is a host; write file:DIR or file:///absolute/dir")
    if not path:
        raise InvalidUrl(f"{address.text}: which directory? Write file:DIR")

    from pxrs.registry.file.store import FileRegistry

    return FileRegistry(Path(path).absolute(), address.namespace, address.seconds("timeout", 10.0))
