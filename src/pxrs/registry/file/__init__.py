"""The registry on a local directory, for the processes of one machine: `file:DIR`, `file:///abs/dir` or a plain path.

There is no server and no lock that a stopped process could keep from others. A commit is one file, published as the
next number of a journal by `link(2)`; that system call is the commit point (R9). Network file systems are refused,
because their locks are not safe.

Where to start reading: `registry.py` (the class `FileRegistry`), `commit.py` (reads and commits of a handle, under its
lock), `journal.py` (how a commit is published and read), `lease.py` (when a lease is over), `watch.py` (the thread that
wakes watches). `layout.py` lists the folders and files, `codec.py` their bytes. `folder.py` notices when a folder is
moved or replaced while it is open.
"""

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
