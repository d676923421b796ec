"""What the project needs of a local disk: syncs that reach the medium, and file systems whose locks hold.

`fdatasync` is enough on Linux; macOS needs `F_FULLFSYNC`, because its `fsync` stops at the drive's cache. Network file
systems are refused: their locks and their links are not safe between hosts (F8).
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from pxrs.errors import UnsupportedPlatform

NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ncpfs", "9p", "ceph", "glusterfs", "lustre", "beegfs"),
        *("gfs2", "ocfs2", "davfs", "webdav", "afpfs"),
        *("fuse.glusterfs", "fuse.sshfs", "fuse.davfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "virtiofs"),
    }
)
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""The process, or the system, has as many files open as it may."""


def require_posix(what: str) -> None:
    """Raise a clear error on Windows, where locks, links and syncs differ."""
    if os.name != "posix":
        raise UnsupportedPlatform(f"{what} needs Linux or macOS: locks and syncs differ on {sys.platform}")


def sync_data(descriptor: int) -> None:
    """Return when the file's data is on the medium."""
    if sys.platform == "darwin":  # pragma: no cover - not run here
        _sync_drive(descriptor)
    else:
        os.fdatasync(descriptor)


def sync_folder(folder: str | os.PathLike[str] | int) -> None:
    """Return when the folder's entries are on the medium. It is given by its path, or as an open descriptor."""
    descriptor = folder if isinstance(folder, int) else os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if sys.platform == "darwin":  # pragma: no cover - not run here
            _sync_drive(descriptor)
        else:
            os.fsync(descriptor)
    finally:
        if descriptor is not folder:
            os.close(descriptor)


def _sync_drive(descriptor: int) -> None:  # pragma: no cover - macOS
    import fcntl

    fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # type: ignore[attr-defined]


def explain(error: OSError, path: str | os.PathLike[str] | None = None) -> str:
    """The file, what the operating system says of it, and what to do if that is known.

    path: the file, for errors that do not name it."""
    file = error.filename if error.filename is not None else path
    what = str(error.strerror or error) if file is None else f"{os.fspath(file)}: {error.strerror}"
    if error.errno == errno.ENFILE:
        return f"{what}; the whole system has as many files open as it may: raise it with `sysctl fs.file-max`"
    if error.errno == errno.EMFILE:
        return (
            f"{what}; raise the limit of open files with `ulimit -n` (of a systemd service: LimitNOFILE=), or use "
            "fewer: each open partition and each thread that waits for messages takes up to three descriptors, each "
            "lease of a registry in files and each connection one"
        )
    return what


def make_folders(path: Path) -> None:
    """Make a folder and what is missing above it, all of it durable."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def refuse_network_file_system(path: str | os.PathLike[str], what: str = "a registry") -> None:
    """Raise UnsupportedPlatform if the path, or the folder it will be made in, is on a network file system."""
    kind = file_system(path)
    if kind in NETWORK_FILE_SYSTEMS:
        raise UnsupportedPlatform(
            f"{os.fspath(path)} is on {kind}, a network file system: {what} is not safe there, since locks are not; "
            "use a local disk, or a registry on PostgreSQL, etcd or ZooKeeper"
        )


def file_system(path: str | os.PathLike[str]) -> str | None:
    """The type of the file system that holds the path, as the kernel names it; None where it cannot be told."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    device = _device(Path(path).absolute())
    for line in reversed(mounts.splitlines()):
        # 36 35 98:0 /root /mountpoint rw,noatime master:1 - ext4 /dev/root rw
        left, _, right = line.partition(" - ")
        if left.split(" ")[2] == device:
            return right.split(" ")[0]
    return None


def _device(path: Path) -> str:
    while not path.exists() and path != path.parent:
        path = path.parent
    number = path.stat().st_dev
    return f"{os.major(number)}:{os.minor(number)}"
