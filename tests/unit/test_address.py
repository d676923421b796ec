"""Registry addresses: bad ones are refused with a reason, secrets are never shown."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

import pxrs
from pxrs import registry
from pxrs.errors import InvalidUrl, MissingDependency, UnsupportedPlatform
from pxrs.registry.address import PASSWORD_VARIABLE, parse


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "empty"),
        ("kafka://h:1", "unknown scheme 'kafka'; choose from memory, file"),
        ("localhost:2379", "looks like a host"),
        ("localhost", "looks like a host"),
        ("10.0.0.1", "looks like a host"),
        ("broker-1.internal", "looks like a host"),
        ("a.example.com", "looks like a host"),
        ("db.example:5432,db2.example:5432/x", "looks like a host"),
        ("memory:?namespace=", "namespace"),
        ("memory:?namespace=a/b", "namespace"),
        ("memory:?namespace=..", "namespace"),
        ("memory:?colour=red", "unknown option 'colour'; choose from namespace"),
        ("memory:?colour", "cannot be read"),
        ("file:", "which directory"),
        ("file://otherhost/dir", "is a host"),
        ("file:dir?timeout=soon", "give seconds"),
        ("etcd://", "empty host"),
        ("etcd://root:hun?ter2@h:2379", "write it as %3F"),
        ("etcd://h:99999", "port"),
        ("zookeeper://h:x/", "port"),
        ("postgresql+asyncpg://u@h/d", r"postgresql\+asyncpg: .* write postgresql:// or postgresql\+psycopg://"),
        ("postgresql+psycopg2://u@h/d", r"write postgresql:// or postgresql\+psycopg://"),
        ("PostgreSQL+Psycopg2://u@h/d", r"write postgresql:// or postgresql\+psycopg://"),
        ("oracle+cx_oracle://u@h/d", r"write oracle:// or oracle\+oracledb://"),
        ("sqlite+aiosqlite:///f", r"write sqlite:// or sqlite\+pysqlite://"),
        ("etcd+grpc://h", r"unknown scheme 'etcd\+grpc'"),
    ],
)
def test_a_bad_address_is_refused_with_its_reason(url: str, reason: str) -> None:
    with pytest.raises(InvalidUrl, match=reason):
        registry.open(url)


@pytest.mark.parametrize(
    ("url", "same"),
    [
        (
            "postgresql+psycopg://me:pw@h:5433/d?namespace=prod&timeout=3",
            "postgresql://me:pw@h:5433/d?namespace=prod&timeout=3",
        ),
        ("POSTGRESQL+PSYCOPG://h/d", "postgresql://h/d"),
        ("postgres://me:pw@h:5433/d?timeout=3", "postgresql://me:pw@h:5433/d?timeout=3"),
        ("Postgres+psycopg://h/d", "postgresql://h/d"),
        ("oracle+oracledb://u@h/?service_name=s", "oracle://u@h/?service_name=s"),
        ("sqlite+pysqlite:///f.db", "sqlite:///f.db"),
    ],
)
def test_an_address_may_name_the_driver_as_sqlalchemy_does(url: str, same: str) -> None:
    assert parse(url) == parse(same)


def test_a_registry_is_opened_by_an_address_that_names_its_driver(tmp_path: Path) -> None:
    with registry.open(f"sqlite+pysqlite:///{tmp_path}/r.db") as first:
        first.commit(put={"a": b"1"})
    with registry.open(f"sqlite:///{tmp_path}/r.db") as second:
        assert second.get("a") is not None


def test_a_refused_driver_is_named_without_the_password() -> None:
    for url in ("postgres+asyncpg://me:hunter2@h/d", "postgresql+psycopg2:me:hunter2@h/d?password=hunter2"):
        for opens in (parse, registry.open, lambda url: pxrs.open("data", registry=url)):
            with pytest.raises(InvalidUrl) as refused:
                opens(url)
            assert "hunter2" not in str(refused.value)
            assert "hunter2" not in repr(refused.value.__context__)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    for url in (path, path / "below"):
        with pytest.raises(InvalidUrl, match="director"):
            registry.open(url)
    assert path.read_text() == "mine"


def test_plain_paths_and_file_addresses_are_the_same_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    addresses = ["here", "./here", "file:here", f"file://{tmp_path}/here", f"file://localhost{tmp_path}/here"]
    with registry.open(tmp_path / "here") as first:
        first.commit(put={"a": b"1"})
        for address in addresses:
            with registry.open(address) as handle:
                assert handle.get("a") is not None, address


def test_f8_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pxrs import disk

    kind = disk.file_system(tmp_path)
    if kind is None:
        pytest.skip("this system does not tell")
    monkeypatch.setattr(disk, "NETWORK_FILE_SYSTEMS", {kind})
    with pytest.raises(UnsupportedPlatform, match=f"is on {kind}, a network file system"):
        registry.open(tmp_path / "new" / "registry")
    assert not (tmp_path / "new").exists()


def test_windows_gets_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.name", "nt")
    with pytest.raises(UnsupportedPlatform, match="Linux or macOS"):
        registry.open(f"file:{tmp_path}")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:hunter2@h/db",
        "etcd://user:hunter2@h:1,h:2/x",
        "zookeeper://user:hun/ter2@h",
        "etcd://user:hunt@er2@h",
        "etcd://:hunter2@h",
    ],
)
def test_a_password_is_never_shown(url: str) -> None:
    address = parse(url)
    shown = [address.text, repr(address), str(address)]
    try:
        address.hosts(1)
    except InvalidUrl as error:
        shown.append(str(error))
    for text in shown:
        assert "hun" not in text
        assert "er2" not in text


def test_passwords_come_from_the_address_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("from file\n")
    monkeypatch.setenv(PASSWORD_VARIABLE, "from environment")
    assert parse("etcd://u:from%20address@h").credentials() == ("u", "from address")
    assert parse(f"etcd://u@h?password_file={secret}").credentials() == ("u", "from file")
    assert parse("etcd://u@h").credentials() == ("u", "from environment")
    assert parse("etcd://h").credentials() == (None, None)
    with pytest.raises(InvalidUrl, match="password_file"):
        parse(f"etcd://u@h?password_file={tmp_path}/none").credentials()


def test_several_hosts_with_and_without_ports() -> None:
    assert parse("etcd://a:1,b,[::1]:3/x").hosts(9) == [("a", 1), ("b", 9), ("::1", 3)]


def test_a_missing_driver_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme, module, extra in (("etcd", "grpc", "etcd"), ("zookeeper", "kazoo", "zookeeper")):
        code = (
            f"import sys; sys.modules['{module}'] = None\n"
            "from pxrs import registry\n"
            f"registry.open('{scheme}://127.0.0.1:1')"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert f"pip install 'pxrs[{extra}]'" in result.stderr, result.stderr
        assert MissingDependency.__name__ in result.stderr


def test_opening_imports_no_driver_that_is_not_asked_for() -> None:
    code = (
        "import sys, pxrs, pxrs.registry as r\n"
        "r.open('memory:').commit(put={'a': b''})\n"
        "print([m for m in ('kazoo', 'sqlalchemy', 'grpc', 'pyspark', 'psycopg') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_library_configures_no_logging() -> None:
    assert logging.getLogger("pxrs").handlers == []


def test_a_directory_that_is_there_may_be_named_like_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.com").mkdir()
    assert parse("example.com").directory() == tmp_path / "example.com"
    assert parse("./example.org").directory() == tmp_path / "example.org"
    assert parse("data.v1").directory() == tmp_path / "data.v1"
