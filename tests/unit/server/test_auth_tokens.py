"""The tokens file and the gate: hashes only, atomic writes, re-read when it changes, revoked and expired tokens."""

from __future__ import annotations

import json
import logging
import os
import pickle
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from pxrs import disk
from pxrs.errors import InvalidArgument, NotPermitted, Unauthenticated
from pxrs.server.auth import tokens
from pxrs.server.auth.gate import ANYONE, Gate
from tests.unit.server.permitted import NAMES

ORDERS = ["topic:orders=read"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "tokens.json")


def make(path: str, name: str = "ci", allow: list[str] = ORDERS, **options: Any) -> tuple[tokens.Token, str]:
    token, secret = tokens.create(path, name, allow, now=1_000.0, **options)
    assert secret is not None
    return token, secret


def bearer(secret: str) -> dict[str, str | bytes]:
    return {"authorization": f"Bearer {secret}"}


def test_a_token_is_256_random_bits_and_the_file_has_its_hash_only(path: str) -> None:
    secrets = {make(path, f"n{number}")[1] for number in range(50)}
    assert len(secrets) == 50
    assert all(secret.startswith("pxrs_") and len(secret) == 5 + 43 for secret in secrets)
    content = Path(path).read_text()
    assert not any(secret in content or secret[5:] in content for secret in secrets)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(os.path.dirname(path)) == ["tokens.json"], "nothing else is left"


def test_a_token_identifies_its_entry_and_nothing_else_does(path: str) -> None:
    token, secret = make(path)
    gate = Gate(path, NAMES)
    assert gate.identify(bearer(secret)).token == token
    assert gate.identify({"authorization": f"bearer  {secret} ".encode()}).token == token
    assert token.sha256 is not None
    wrong: list[dict[str, str | bytes]] = [
        {},
        {"authorization": ""},
        {"authorization": secret},
        {"authorization": f"Basic {secret}"},
        *map(bearer, ("", secret[:-1], f"{secret}x", secret.upper(), token.sha256, token.id, "x" * 10_000, "\udcff")),
        {"authorization": b"Bearer \xff"},
    ]
    texts = set()
    for metadata in wrong:
        with pytest.raises(Unauthenticated) as refused:
            gate.identify(metadata)
        texts.add(str(refused.value))
    assert len(texts) == 1, "the same error whatever is wrong"
    assert secret not in texts.pop()


def test_no_secret_is_in_reprs_errors_logs_or_pickles(path: str, caplog: pytest.LogCaptureFixture) -> None:
    token, secret = make(path)
    assert token.sha256 is not None
    gate = Gate(path, NAMES)
    with caplog.at_level(logging.DEBUG):
        caller = gate.identify(bearer(secret))
        with pytest.raises(NotPermitted) as refused:
            gate.check(caller, "DoPut", {"topic": "orders"})
        with pytest.raises(Unauthenticated) as unknown:
            gate.identify(bearer(f"{secret}x"))
        Path(path).write_text("{")
        gate.refresh()
    shown = [
        repr(token),
        str(caller),
        repr(caller),
        str(refused.value),
        str(unknown.value),
        caplog.text,
        str(gate.problem),
    ]
    shown.append(repr(pickle.dumps(refused.value)))
    for text in shown:
        assert secret not in text
        assert token.sha256 not in text
    assert str(caller) == f"ci ({token.id})"


def test_a_new_token_is_accepted_and_a_revoked_one_ends_after_the_next_refresh(path: str) -> None:
    _, secret = make(path)
    gate = Gate(path, NAMES)
    caller = gate.identify(bearer(secret))
    assert not gate.refresh(), "nothing has changed"
    _, second = make(path, "second")
    with pytest.raises(Unauthenticated):
        gate.identify(bearer(second))
    assert gate.refresh()
    assert gate.identify(bearer(second)).token is not None
    assert gate.is_valid(caller), "the first one is as it was"
    tokens.revoke(path, "ci")
    assert gate.is_valid(caller), "not looked at yet"
    assert gate.refresh()
    assert not gate.is_valid(caller), "w5: the server ends its streams"
    assert not gate.is_accepted(caller)
    for call in ("server.ping", "DoGet"):
        with pytest.raises(Unauthenticated):
            gate.check(caller, call, {"topic": "orders"})
    with pytest.raises(Unauthenticated):
        gate.identify(bearer(secret))


def test_a_token_whose_grants_have_changed_must_identify_itself_again(path: str) -> None:
    _, secret = make(path)
    gate = Gate(path, NAMES)
    before = gate.identify(bearer(secret))
    gate.check(before, "DoGet", {"topic": "orders"})
    content = json.loads(Path(path).read_text())
    content["tokens"][0]["allow"] = ["topic:orders=describe"]
    disk.replace_file(path, json.dumps(content).encode())
    assert gate.refresh()
    assert not gate.is_valid(before), "what it has open is ended"
    assert gate.is_accepted(before)
    with pytest.raises(NotPermitted):
        gate.check(before, "DoGet", {"topic": "orders"})
    after = gate.identify(bearer(secret))
    with pytest.raises(NotPermitted):
        gate.check(after, "DoGet", {"topic": "orders"})
    gate.check(after, "topic.bounds", {"topic": "orders"})


def test_an_entry_whose_token_was_replaced_is_another_one(path: str) -> None:
    _, secret = make(path)
    gate = Gate(path, NAMES)
    caller = gate.identify(bearer(secret))
    content = json.loads(Path(path).read_text())
    content["tokens"][0]["sha256"] = "0" * 64
    disk.replace_file(path, json.dumps(content).encode())
    assert gate.refresh()
    assert not gate.is_accepted(caller)
    assert not gate.is_valid(caller)


def test_an_expired_token_is_refused_without_a_change_of_the_file(path: str) -> None:
    now = 1_000.0
    _, secret = make(path, expires=2_000.0)
    gate = Gate(path, NAMES, lambda: now)
    caller = gate.identify(bearer(secret))
    now = 1_999.9
    assert gate.is_valid(caller)
    now = 2_000.0
    assert not gate.is_valid(caller)
    with pytest.raises(Unauthenticated):
        gate.identify(bearer(secret))
    with pytest.raises(Unauthenticated):
        gate.check(caller, "server.ping", {})


@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "other version", "writable", "folder", "bad grant"])
def test_a_file_that_cannot_be_read_changes_nothing_and_is_logged_once(
    path: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, secret = make(path)
    gate, good = Gate(path, NAMES), Path(path).read_bytes()
    caller = gate.identify(bearer(secret))
    _damage(path, damage, good)
    with caplog.at_level(logging.INFO):
        assert not any(gate.refresh() for _ in range(3))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert gate.problem is not None
    assert path in gate.problem
    assert gate.is_valid(caller)
    assert gate.identify(bearer(secret)).token == caller.token
    with pytest.raises(Unauthenticated):
        gate.identify(bearer("pxrs_other"))
    with pytest.raises(InvalidArgument, match="tokens"):
        Gate(path, NAMES)
    if os.path.isdir(path):
        os.rmdir(path)
    disk.replace_file(path, good, mode=0o600)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert gate.refresh()
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert gate.problem is None


def _damage(path: str, damage: str, good: bytes) -> None:
    content = json.loads(good)
    match damage:
        case "gone":
            os.unlink(path)
        case "folder":
            os.unlink(path)
            os.mkdir(path)
        case "empty":
            Path(path).write_bytes(b"")
        case "cut":
            Path(path).write_bytes(good[:-20])
        case "other version":
            Path(path).write_text(json.dumps({**content, "version": 2}))
        case "bad grant":
            content["tokens"][0]["allow"] = ["topic:orders=fly"]
            Path(path).write_text(json.dumps(content))
        case "writable":
            Path(path).write_bytes(good + b"\n")
            os.chmod(path, 0o602)


def test_a_missing_file_is_an_error_at_the_start(path: str) -> None:
    with pytest.raises(InvalidArgument, match="pxrs token create"):
        Gate(path, NAMES)


@pytest.mark.parametrize(
    "change",
    [
        {"id": "x"},
        {"id": 7},
        {"name": ""},
        {"name": None},
        {"sha256": "abc"},
        {"sha256": None},
        {"certificate": "CN=x"},
        {"created": "yesterday"},
        {"created": 5},
        {"expires": "2026-01-31T12:00:00"},
        {"allow": "topic:orders=read"},
        {"allow": [7]},
        {"allow": ["stage:q=write"]},
    ],
)
def test_an_entry_with_a_wrong_field_makes_the_file_invalid(path: str, change: dict[str, Any]) -> None:
    make(path)
    content = json.loads(Path(path).read_text())
    content["tokens"][0].update(change)
    with pytest.raises(InvalidArgument, match="entry 1"):
        tokens.load(json.dumps(content).encode())
    del content["tokens"][0][next(iter(change))]
    content["tokens"].append(content["tokens"][0])
    with pytest.raises(InvalidArgument):
        tokens.load(json.dumps(content).encode())


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"7", b"null", b'{"version": 1}', b'{"version": 1, "tokens": {}}', b"\xff", b"[" * 90_000]
)
def test_what_is_no_tokens_file_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument):
        tokens.load(data)


def test_what_is_dumped_is_loaded_again(path: str) -> None:
    make(path, expires=5_000.25)
    tokens.create(path, "worker", ["queue:mail*=take,read", "registry:a/b/=write"], now=2.5, certificate="CN=worker-7")
    _, found = tokens.read(path)
    assert tokens.load(tokens.dump(found)) == found
    assert [token.expires for token in found.by_id.values()] == [5_000.25, None]


def test_a_crash_while_writing_leaves_the_old_file(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(path)
    before = Path(path).read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(InvalidArgument, match="No space left on device"):
        make(path, "second")
    assert Path(path).read_bytes() == before
    assert os.listdir(os.path.dirname(path)) == ["tokens.json"]


def test_a_file_keeps_its_mode_and_a_link_stays_one(path: str, tmp_path: Path) -> None:
    make(path)
    os.chmod(path, 0o640)
    link = tmp_path / "elsewhere" / "link.json"
    link.parent.mkdir()
    link.symlink_to(path)
    make(str(link), "second")
    assert link.is_symlink()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o640
    assert [token.name for token in tokens.read(path)[1].by_id.values()] == ["ci", "second"]


def test_no_entry_is_lost_when_several_write_at_once(path: str) -> None:
    ready = threading.Barrier(8)

    def add(number: int) -> None:
        ready.wait()
        for each in range(5):
            make(path, f"n{number}-{each}")

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tokens.read(path)[1].by_id) == 40


def test_revoking_names_one_token_by_its_id_or_its_name(path: str) -> None:
    first, _ = make(path)
    second, _ = make(path)
    with pytest.raises(InvalidArgument, match="several tokens have the name 'ci'"):
        tokens.revoke(path, "ci")
    with pytest.raises(InvalidArgument, match="no token with the id or name 'cd'"):
        tokens.revoke(path, "cd")
    assert tokens.revoke(path, first.id) == first
    assert tokens.revoke(path, "ci") == second
    assert not tokens.read(path)[1].by_id


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": ""}, "invalid name"),
        ({"name": "a\nb"}, "invalid name"),
        ({"allow": []}, "at least one grant"),
        ({"allow": ["topic:orders"]}, "is not a grant"),
        ({"certificate": "worker-7"}, "CN=NAME"),
        ({"allow": ["topic:a=read"] * 1_001}, "grants for one token"),
    ],
)
def test_a_token_that_cannot_be_is_not_written(path: str, arguments: dict[str, Any], words: str) -> None:
    given = {"name": "ci", "allow": ORDERS, **arguments}
    with pytest.raises(InvalidArgument, match=words):
        tokens.create(path, given.pop("name"), given.pop("allow"), now=0.0, **given)
    assert not os.path.exists(path)


# Certificates.


def test_a_certificate_stands_for_an_entry_and_a_token_takes_precedence(path: str) -> None:
    _, secret = make(path)
    worker, _ = tokens.create(path, "worker", ["queue:mail=take"], now=0.0, certificate="CN=worker-7")
    host, _ = tokens.create(path, "host", ["queue:mail=put"], now=0.0, certificate="SAN=worker-7.example")
    gate = Gate(path, NAMES)
    common, alternative = "x509_common_name", "x509_subject_alternative_name"
    assert gate.identify({}, {common: [b"worker-7"]}).token == worker
    assert gate.identify({}, {alternative: [b"other", b"worker-7.example"], common: [b"worker-7"]}).token == host
    token = gate.identify(bearer(secret), {common: [b"worker-7"]}).token
    assert token is not None
    assert token.name == "ci"
    for identities in ({}, {common: [b"worker-8"]}, {common: [b"worker-7.example"]}, {alternative: [b"worker-7"]}):
        with pytest.raises(Unauthenticated):
            gate.identify({}, identities)
    for name in (b"\xff", b"CN=worker-7", b""):
        with pytest.raises(Unauthenticated):
            gate.identify({}, {common: [name]})
    with pytest.raises(Unauthenticated):
        gate.identify(bearer("wrong"), {common: [b"worker-7"]})
    with pytest.raises(InvalidArgument, match="has the entry"):
        tokens.create(path, "again", ORDERS, now=0.0, certificate="CN=worker-7")


# Without a file.


def test_without_a_file_everybody_may_do_everything_but_what_only_the_server_does() -> None:
    gate = Gate(None, NAMES)
    assert gate.is_open
    caller = gate.identify(bearer("whatever"))
    assert caller is ANYONE
    assert gate.is_valid(caller)
    assert not gate.refresh()
    gate.check(caller, "topic.trim", {"topic": "orders"})
    gate.check(caller, "registry.commit", {"put": {"any/key": ""}})
    with pytest.raises(NotPermitted):
        gate.check(caller, "registry.commit", {"put": {"upkeep/h/janitor": ""}})


def test_a_caller_of_an_open_server_is_nobody_on_one_with_a_file(path: str) -> None:
    make(path)
    gate = Gate(path, NAMES)
    assert not gate.is_valid(ANYONE)
    with pytest.raises(Unauthenticated):
        gate.check(ANYONE, "server.ping", {})
