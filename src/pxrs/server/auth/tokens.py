"""The tokens file: who may do what, and the hashes by which tokens are recognised.

    {"version": 1, "tokens": [
      {"id": "9f2c51d0a7e4", "name": "ci", "sha256": "...", "certificate": null,
       "created": "2026-01-31T12:00:00.000000Z", "expires": null, "allow": ["topic:orders=write"]}]}

A token is 256 random bits. The file has only its SHA-256, which is enough: nobody finds the bits again by trying, as
one does with passwords, so that the hash needs neither salt nor slowness. A token is looked up by this hash; how long
that takes tells nothing about tokens, because nobody can choose a token whose hash begins as wanted.

Instead of a token, an entry may have the name of a client certificate: `CN=worker-7` or `SAN=worker-7.example`.

The file is replaced as a whole, so that a reader sees the old content or the new one. Writers hold a lock on its
folder, so that no entry is lost when two processes write at once.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from pxrs import disk
from pxrs.errors import InvalidArgument, NoWritePermission, PxrsError
from pxrs.server.auth.permissions import Grants
from pxrs.wording import microseconds, rfc3339

VERSION: Final = 1
TOKEN_BYTES: Final = 32
BEGINNING: Final = "pxrs_"
"""What every token begins with, so that programs that search for secrets find it."""
FILE_BYTES_MAX: Final = 16 << 20
TOKENS_MAX: Final = 10_000
LOCK_S: Final = 10.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@/-]{0,99}")
_ID: Final = re.compile(r"[0-9a-f]{12}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_CERTIFICATE: Final = re.compile(r"(CN|SAN)=[!-~][ -~]{0,254}")


@dataclass(frozen=True, slots=True)
class Token:
    """One entry of the file."""

    id: str
    """Names the entry in commands and logs. It is no secret."""
    name: str
    """Who has the token."""
    grants: Grants
    created: float
    """Seconds since 1970, as is `expires`."""
    expires: float | None = None
    """From when on it is not accepted any more; None: never."""
    sha256: str | None = field(default=None, repr=False)
    """The hash of the token, in hexadecimal digits; None for a certificate."""
    certificate: str | None = None

    def is_expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a tokens file has."""

    by_id: Mapping[str, Token]
    by_hash: Mapping[str, Token]
    by_certificate: Mapping[str, Token]

    @classmethod
    def of(cls, tokens: Iterable[Token]) -> Tokens:
        """Raises InvalidArgument if an id, a token or a certificate is there twice."""
        found = list(tokens)
        by_id = {token.id: token for token in found}
        by_hash = {token.sha256: token for token in found if token.sha256 is not None}
        by_certificate = {token.certificate: token for token in found if token.certificate is not None}
        if len(by_id) < len(found) or len(by_hash) + len(by_certificate) < len(found):
            raise InvalidArgument("two entries have the same id, token or certificate")
        return cls(by_id, by_hash, by_certificate)

    def find(self, token: str) -> Token | None:
        """The entry of this token."""
        return self.by_hash.get(hash_of(token))


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def new_token() -> str:
    return BEGINNING + base64.urlsafe_b64encode(secrets.token_bytes(TOKEN_BYTES)).rstrip(b"=").decode()


# The content of the file.


def dump(tokens: Tokens) -> bytes:
    entries = [
        {
            "id": token.id,
            "name": token.name,
            "sha256": token.sha256,
            "certificate": token.certificate,
            "created": _time_text(token.created),
            "expires": _time_text(token.expires),
            "allow": token.grants.texts,
        }
        for token in tokens.by_id.values()
    ]
    return (json.dumps({"version": VERSION, "tokens": entries}, indent=1) + "\n").encode()


def load(data: bytes) -> Tokens:
    """Raises InvalidArgument, whose text has nothing of the file but ids and names."""
    try:
        found = json.loads(data)
        version, entries = found["version"], found["tokens"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidArgument("it is not a JSON object with `version` and `tokens`") from error
    if version != VERSION:
        raise InvalidArgument(f"its version is {str(version)[:20]}, but this pxrs supports {VERSION}: upgrade pxrs")
    if not isinstance(entries, list) or len(entries) > TOKENS_MAX:
        raise InvalidArgument(f"`tokens` must be a list of at most {TOKENS_MAX:,} entries")
    return Tokens.of(_entry(number, each) for number, each in enumerate(entries, 1))


def _entry(number: int, found: Any) -> Token:
    try:
        allow = found["allow"]
        if not isinstance(allow, list) or not all(isinstance(each, str) for each in allow):
            raise InvalidArgument("`allow` must be a list of grants")
        token = Token(
            _matching(_ID, found["id"], "id"),
            _matching(_NAME, found["name"], "name"),
            Grants.parse(allow),
            _time(found["created"]) or 0.0,
            _time(found.get("expires")),
            None if found.get("sha256") is None else _matching(_HASH, found["sha256"], "sha256"),
            None if found.get("certificate") is None else _matching(_CERTIFICATE, found["certificate"], "certificate"),
        )
    except InvalidArgument as error:
        raise InvalidArgument(f"entry {number}: {error}") from None
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError):
        raise InvalidArgument(f"entry {number} has a missing field, or a field of the wrong type") from None
    if (token.sha256 is None) == (token.certificate is None):
        raise InvalidArgument(f"entry {number} needs either sha256 or certificate")
    return token


def _matching(form: re.Pattern[str], given: object, field: str) -> str:
    if not isinstance(given, str) or not form.fullmatch(given):
        raise InvalidArgument(f"`{field}` has an invalid format")
    return given


def _time_text(seconds: float | None) -> str | None:
    time_us = microseconds(seconds)
    return None if time_us is None else rfc3339(time_us)


def _time(text: str | None) -> float | None:
    if text is None:
        return None
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise InvalidArgument("a time has no time zone: write it as 2026-01-31T12:00:00Z")
    return found.timestamp()


# The file.

Identity = tuple[int, int, int, int]
"""Device, inode, time of the last change in nanoseconds, size."""


def read(path: str) -> tuple[Identity, Tokens]:
    """The content of the file, and the identity that the file had before it was read. Raises InvalidArgument if it is
    not there, or no tokens file, or writable by everybody."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument(f"{path} is not a regular file")
            if status.st_mode & stat.S_IWOTH:
                raise InvalidArgument(f"any user can write to {path} and so grant permissions: run `chmod o-w {path}`")
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        advice = "; create it with `pxrs token create`" if isinstance(error, FileNotFoundError) else ""
        raise InvalidArgument(f"the tokens file cannot be read: {disk.explain(error, path)}{advice}") from error
    if len(data) > FILE_BYTES_MAX:
        raise InvalidArgument(f"{path} has more than {FILE_BYTES_MAX:,} bytes")
    try:
        return identity_of(status), load(data)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path} is not a tokens file: {error}") from None


def identity_of(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def create(
    path: str,
    name: str,
    allow: Iterable[str],
    *,
    now: float,
    expires: float | None = None,
    certificate: str | None = None,
) -> tuple[Token, str | None]:
    """Add an entry to the file, which is made if it is not there. The entry, and the token, which is nowhere else; None
    if the entry is for a certificate. Raises InvalidArgument, NoWritePermission."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"invalid name {name!r}: use up to 100 letters, digits, spaces and any of ._@/-")
    if certificate is not None and not _CERTIFICATE.fullmatch(certificate):
        raise InvalidArgument(f"invalid certificate {certificate!r}: write CN=NAME or SAN=NAME")
    grants = Grants.parse(allow)
    if not grants.grants:
        raise InvalidArgument("a token needs at least one grant, such as topic:orders=read")
    secret = None if certificate is not None else new_token()
    hashed = None if secret is None else hash_of(secret)
    token = Token(secrets.token_hex(6), name, grants, now, expires, hashed, certificate)
    with _locked(path):
        known = read(path)[1] if os.path.lexists(path) else Tokens.of(())
        if certificate is not None and certificate in known.by_certificate:
            other = known.by_certificate[certificate].id
            raise InvalidArgument(f"{certificate} already has the entry {other}: revoke it first")
        if len(known.by_id) >= TOKENS_MAX:
            raise InvalidArgument(f"{path} has {TOKENS_MAX:,} entries, the maximum: revoke some")
        _write(path, Tokens.of((*known.by_id.values(), token)))
    return token, secret


def revoke(path: str, which: str) -> Token:
    """Remove the entry with this id, or the only one with this name. Raises InvalidArgument, NoWritePermission."""
    with _locked(path):
        known = read(path)[1]
        found = [token for token in known.by_id.values() if which in (token.id, token.name)]
        if len(found) != 1:
            ids = ", ".join(token.id for token in found)
            what = f"several tokens have the name {which!r}: use an id instead: {ids}" if found else ""
            raise InvalidArgument(what or f"there is no token with the id or name {which!r} in {path}")
        _write(path, Tokens.of(token for token in known.by_id.values() if token is not found[0]))
    return found[0]


def _write(path: str, tokens: Tokens) -> None:
    """Replace the file. A file that is there keeps its mode and owner, so that the server can read the new one too."""
    path = os.path.realpath(path)
    try:
        status = os.stat(path) if os.path.exists(path) else None
        mode = 0o600 if status is None else stat.S_IMODE(status.st_mode)
        disk.replace_file(path, dump(tokens), is_durable=True, mode=mode)
        if status is not None:
            os.chmod(path, mode)  # the umask may have taken something away
            if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(path, status.st_uid, status.st_gid)
        disk.sync_folder(os.path.dirname(path))
    except OSError as error:
        raise _refused(error, path) from error


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the lock of the file's folder against other processes that write a tokens file there."""
    import fcntl  # not available on every system

    folder = os.path.dirname(os.path.realpath(path))
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(error, folder) from error
    until = time.monotonic() + LOCK_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise InvalidArgument(
                        f"another process has held the lock of {folder} for {LOCK_S:g} s; is it suspended?"
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _refused(error: OSError, path: str) -> PxrsError:
    lacking = disk.denied(error, path)
    if lacking is not None:
        return NoWritePermission(lacking.path, lacking.what)
    return InvalidArgument(f"the tokens file cannot be written: {disk.explain(error, path)}")
