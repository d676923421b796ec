"""The registry on a local directory: `file:DIR`, `file:///abs/dir` or a plain path."""

from __future__ import annotations

from pxrs import disk
from pxrs.registry.address import Address
from pxrs.registry.contract import Registry


def open(address: Address) -> Registry:
    disk.require_posix("a file registry")
    address.refuse_unknown_options(("timeout",))
    directory = address.directory()

    from pxrs.registry.file.registry import FileRegistry

    return FileRegistry(directory, address.namespace, address.seconds("timeout", 10.0))
