"""Calls on a local disk: syncs that reach the medium, refusals explained, network file systems refused.

`fdatasync` is enough on Linux; macOS needs `F_FULLFSYNC`, because its `fsync` stops at the drive's cache. Network file
systems are refused, because locks and hard links are not reliable between hosts there (F8).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import uuid
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from pxrs.errors import LogError, LogNotReadable, LogNotWritable, UnsupportedPlatform

NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ncpfs", "9p", "ceph", "glusterfs", "lustre", "beegfs"),
        *("gfs2", "ocfs2", "davfs", "webdav", "afpfs"),
        *("fuse.glusterfs", "fuse.sshfs", "fuse.davfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "virtiofs"),
    }
)
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""The limit of open files of the process, or of the whole system, is reached."""


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
    """Return when the folder's entries are on the medium. folder: a path, or an open descriptor."""
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
    """The file, the operating system's message, and what to do if that is known.

    path: the file, for errors that do not name it."""
    file = error.filename if error.filename is not None else path
    what = str(error.strerror or error) if file is None else f"{os.fspath(file)}: {error.strerror}"
    if error.errno == errno.ENFILE:
        return f"{what}; the whole system has reached its limit of open files: raise it with `sysctl fs.file-max`"
    if error.errno == errno.EMFILE:
        return (
            f"{what}; raise the limit of open files with `ulimit -n` (for a systemd service: LimitNOFILE=), or use "
            "fewer files: each open partition and each thread that waits for messages takes up to three descriptors, "
            "each lease of a registry in files and each connection one"
        )
    lacking = None if file is None else denied(error, path)
    # The system also reports EACCES and EPERM for operations that no mode of the file permits, such as a change of its
    # owner. Then nothing is known to be missing, and the system's own message is shown.
    return what if lacking is None or not lacking.is_certain else lacking.what


class Denied(NamedTuple):
    """A permission that this process lacks."""

    path: str
    """The file or folder that it lacks the permission for."""
    is_write: bool
    """False if it is the permission to read the file, or to search the folder."""
    what: str
    """For an error message: which user lacks the permission, and what to do."""
    is_certain: bool = True
    """Whether a look at the file's mode confirms that the permission is lacking."""


def denied(error: OSError, path: str | os.PathLike[str] | None = None) -> Denied | None:
    """Which permission this process lacks, if that is why the operating system refused; None if it is not.

    path: the file, for errors that do not name it."""
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return None
    named = [each for each in (error.filename, error.filename2, path) if isinstance(each, str | bytes | os.PathLike)]
    # An error of `rename` or `link` names two paths. For a path that does not exist, the permission of its folder
    # counts.
    places = [_nearest(os.fsdecode(each)) for each in named]
    place = next((each for each in places if not may(each, os.W_OK)), places[0] if places else "")
    is_write = error.errno == errno.EROFS or not place or may(place, os.R_OK)
    if error.errno == errno.EROFS or (is_write and place and _is_read_only(place)):
        what = (
            f"{place} is on a file system that is mounted read-only, so this process (uid {os.geteuid()}) cannot write "
            "there: mount it writable, or run this process on a machine where it is writable"
        )
        return Denied(place, True, what)
    action = "write to" if is_write else "read"
    try:
        status = os.stat(place)
        owner = f"{_user(status.st_uid)}, mode {stat.filemode(status.st_mode)}"
        advice = f"run this process as {_user(status.st_uid)}, or grant it the permission"
    except OSError:
        owner, advice = "unknown", "run this process as the owner, or grant it the permission"
    what = f"{_user(os.geteuid())} may not {action} {place} (owner: {owner}): {advice}"
    return Denied(place, is_write, what, not place or not may(place, os.W_OK if is_write else os.R_OK))


def write_refusal(path: str | os.PathLike[str]) -> OSError | None:
    """The error that creating a file in this folder, or writing to this file, would raise for lack of permission; None
    if it is permitted, or if the path does not exist."""
    if not os.path.exists(path) or may(path, os.W_OK):
        return None
    number = errno.EROFS if _is_read_only(path) else errno.EACCES
    return OSError(number, os.strerror(number), os.fspath(path))


def may(path: str | os.PathLike[str], mode: int) -> bool:
    """Whether this process has the permission (os.R_OK, os.W_OK); for a folder, also the one to search it."""
    mode |= os.X_OK if os.path.isdir(path) else 0
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def log_error(error: OSError, path: str | os.PathLike[str] | None = None, where: str = "") -> LogError:
    """An error of the operating system as a LogError; as LogNotWritable or LogNotReadable if a permission is lacking.

    path: as in `explain`. where: what the text begins with."""
    lacking = denied(error, path)
    if lacking is None:
        return LogError(f"{where}{explain(error, path)}")
    kind = LogNotWritable if lacking.is_write else LogNotReadable
    return kind(lacking.path, f"{where}{lacking.what}")


def _nearest(path: str) -> str:
    """The path if it exists, otherwise the nearest folder above it that exists."""
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def _is_read_only(path: str | os.PathLike[str]) -> bool:
    """Whether the path is on a file system that is mounted read-only."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _user(number: int) -> str:
    import pwd  # not on every system

    try:
        return f"user {pwd.getpwuid(number).pw_name} (uid {number})"
    except KeyError:
        return f"the user with uid {number}"


def make_folders(path: Path) -> None:
    """Create a folder and the missing ones above it, and sync each entry."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def refuse_network_file_system(path: str | os.PathLike[str], what: str = "a registry") -> None:
    """Raise UnsupportedPlatform if the nearest folder of the path that exists is on a network file system."""
    kind = file_system(path)
    if kind in NETWORK_FILE_SYSTEMS:
        raise UnsupportedPlatform(
            f"{os.fspath(path)} is on {kind}, a network file system: {what} is not safe there, because file locks are "
            "unreliable; use a local disk, or a registry on PostgreSQL, etcd or ZooKeeper"
        )


def file_system(path: str | os.PathLike[str]) -> str | None:
    """The type of the file system that holds the path, as the kernel names it; None if it is not known."""
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


def replace_file(path: str, data: bytes, *, is_durable: bool = False, mode: int = 0o644) -> None:
    """Write a small file under another name and rename it, so that readers see the old content or the new one.

    is_durable: the content is synced first. The caller syncs the folder, which makes the new name durable.
    mode:       the permissions of the file, less those that the umask of the process takes away."""
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        try:
            left = memoryview(data)
            while left:  # on a nearly full disk `write` may write a part, and only the next call fails
                left = left[os.write(descriptor, left) :]
            if is_durable:
                sync_data(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


UNREADABLE: Final = tuple(
    getattr(errno, name)
    for name in ("EIO", "EUCLEAN", "EBADMSG", "ENODATA", "EREMOTEIO", "EILSEQ")
    if hasattr(errno, name)
)
"""The errors of a read of what the disk or the file system has damaged."""


def with_checksum(text: str) -> bytes:
    """The content of a small file with one line: the checksum of the text, a space, the text."""
    return f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}\n".encode()


def read_with_checksum(path: str) -> str | None:
    """The text of a file that `with_checksum` made; None if the checksum does not match. Raises FileNotFoundError."""
    with open(path, "rb", buffering=0) as file:  # most are missing, or tiny: no buffer is made for them
        checksum, _, text = file.read().rstrip(b"\n").partition(b" ")
    return text.decode() if xxhash.xxh3_64_hexdigest(text).encode() == checksum else None
