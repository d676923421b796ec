"""Every command with `--at pxrs://HOST:PORT`: works as on the directory, or says where to run it instead."""

from __future__ import annotations

import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.cli.exits import EXIT_FINAL, EXIT_USAGE
from pxrs.hub import Hub
from pxrs.server.auth import tokens
from pxrs.server.serving import ServerSettings, serving
from pxrs.testing import forked
from pxrs.testing.command import Call, Result, run_here
from pxrs.testing.servers.certificates import certificates
from pxrs.testing.waiting import eventually

pytestmark = pytest.mark.sampled(2, of="module")

NOBODY = "pxrs://127.0.0.1:1?timeout=0.3"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """In a directory, with the upkeep that a server does."""
    with pxrs.open(tmp_path / "data") as hub:
        hub.start_upkeep()
        yield hub


@pytest.fixture
def at(hub: Hub) -> Iterator[str]:
    with serving(hub) as url:
        yield url


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """A command in this process; `stdin` is what it reads."""
    for name in ("PXRS_AT", "PXRS_REGISTRY", "PXRS_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        return run_here(monkeypatch, capfd, arguments).unwrapped()

    return call


@pytest.fixture
def done(call: Call, at: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A command that must succeed, with the server in PXRS_AT; what it prints."""

    def done(*arguments: str, stdin: str = "") -> str:
        monkeypatch.setenv("PXRS_AT", at)
        found = call(*arguments, stdin=stdin)
        assert found.code == 0, found
        return found.out

    return done


def test_topics_and_messages(done: Callable[..., str], call: Call, at: str, hub: Hub) -> None:
    assert done("topic", "create", "orders", "--partitions", "2") == "made orders with 2 partitions\n"
    assert "is there already" in done("topic", "create", "orders", "--partitions", "2", "--exist-ok")
    differs = call("topic", "create", "orders", "--partitions", "3", "--exist-ok")
    assert (differs.code, "partitions is 2, and 3 was asked for (TopicDiffers)" in differs.errors) == (1, True)
    lines = '{"k":"ann","v":1}\n{"k":"bob","v":2}\n'
    assert done("send", "orders", "--key", "k", stdin=lines) == "sent 2 messages to orders\n"
    assert sorted(json.loads(line)["key"] for line in done("tail", "orders", "--json").splitlines()) == ["ann", "bob"]
    assert sum(hub.topic("orders").log.ends()) == 2
    (listed,) = map(json.loads, done("topic", "list", "--json").splitlines())
    assert listed == {"topic": "orders", "partitions": 2, "messages": 2}
    assert json.loads(done("topic", "describe", "orders", "--json"))["id"] == hub.topic("orders").id
    assert "(UnknownTopic)" in call("send", "ordres", stdin="x\n").errors
    assert done("topic", "delete", "orders", "--yes") == "removed orders and its 2 messages\n"
    assert hub.topics() == []


def test_groups(done: Callable[..., str], call: Call, at: str) -> None:
    done("topic", "create", "orders", "--partitions", "1")
    done("send", "orders", stdin="a\nb\nc\n")
    done("group", "import-checkpoint", "billing", "1", "--topic", "orders")
    (found,) = map(json.loads, done("group", "list", "--json").splitlines())
    assert (found["group"], found["lag"]) == ("billing", 2)
    with pxrs.open(at) as hub, hub.consumer("orders", "billing") as inbox:
        assert [message.value for message in inbox.poll(2, timeout=30)] == [b"b", b"c"]
        active = call("group", "reset", "billing", "--to", "earliest", "--yes")
        assert (active.code, "(GroupActive)" in active.errors) == (1, True)
    done("group", "reset", "billing", "--to", "earliest", "--yes")
    described = json.loads(done("group", "describe", "billing", "--json"))
    assert [each["lag"] for each in described["partitions"]] == [3]
    done("group", "delete", "billing", "--yes")
    assert done("group", "list", "--json") == ""


def test_queues(done: Callable[..., str], at: str) -> None:
    assert done("queue", "create", "mail", "--policy", "consume-once") == "made queue mail\n"
    assert done("queue", "put", "mail", "to ann", "to bob") == "put 2 items into mail\n"
    assert done("queue", "take", "mail").endswith("to ann\n")
    with pxrs.open(at) as hub, hub.transaction() as tx:
        assert tx.take("mail", timeout=30) is not None
        tx.rollback("no such address")
    (dead,) = map(json.loads, done("queue", "dead", "list", "mail", "--json").splitlines())
    assert dead["value"] == "to bob"
    done("queue", "dead", "retry", "mail", dead["id"])
    assert json.loads(done("queue", "depth", "mail", "--json"))["ready"] == 1
    assert [json.loads(line)["queue"] for line in done("queue", "list", "--json").splitlines()] == ["mail"]
    done("queue", "delete", "mail", "--yes")
    assert done("queue", "list", "--json") == ""


def test_registered_sources(done: Callable[..., str], tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as shop:
        shop.execute("create table events (id integer primary key, body text)")
        shop.execute("insert into events (body) values ('hello')")
    database = f"sqlite:///{tmp_path}/shop.db"
    columns = ("--table", "events", "--value-column", "body", "--partitions", "1")
    done("source", "add", "events", "--sql-table", database, *columns)
    assert "events" in done("source", "list")
    assert done("tail", "events").endswith("hello\n")
    done("source", "remove", "events", "--yes")
    assert done("source", "list", "--json") == ""


def test_upkeep_shows_the_server_as_the_janitor(done: Callable[..., str], hub: Hub) -> None:
    done("topic", "create", "orders", "--retention", "100")
    hub.run_upkeep()
    found = json.loads(done("upkeep", "status", "--json"))
    assert found["janitor"] == hub.upkeep().janitor != ""
    assert found["last_round"]["errors"] == {}


def test_the_registry_behind_the_server_is_shown(done: Callable[..., str], at: str) -> None:
    done("queue", "create", "mail")
    keys = [json.loads(line)["key"] for line in done("registry", "scan", at, "--json").splitlines()]
    assert "queues/mail" in keys
    assert json.loads(done("registry", "get", at, "queues/mail", "--json"))["key"] == "queues/mail"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("upkeep", "--once"), "run `pxrs upkeep` on the server's host, with the hub's directory"),
        (("upkeep",), "run `pxrs upkeep` on the server's host, with the hub's directory"),
        (("registry", "adopt"), "run `pxrs registry adopt` with the hub's directory, where it is"),
    ],
    ids=["upkeep --once", "upkeep", "registry adopt"],
)
def test_what_a_client_cannot_do_says_where_to_run_it(
    call: Call, at: str, arguments: tuple[str, ...], words: str
) -> None:
    found = call(*arguments, "--at", at)
    assert found.code == EXIT_USAGE
    assert words in found.errors
    assert at in found.errors


def test_a_log_is_checked_where_its_files_are(call: Call, at: str) -> None:
    found = call("check", at)
    assert found.code == EXIT_USAGE
    assert found.errors == (
        f"{at}: a log is checked where its files are: run `pxrs check` on the server's host, with the hub's directory "
        "(InvalidUrl)"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("topic", "create", "t"),
        ("topic", "list"),
        ("topic", "delete", "t", "--yes"),
        ("send", "t"),
        ("tail", "t"),
        ("group", "list"),
        ("queue", "create", "q"),
        ("queue", "list"),
        ("source", "list"),
        ("upkeep", "status"),
        ("registry", "adopt"),
        ("worker", "json:dumps", "--queue", "q"),
    ],
    ids=" ".join,
)
def test_a_registry_beside_a_server_is_refused(call: Call, at: str, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    found = call(*arguments, "--at", at, "--registry", f"sqlite:///{tmp_path}/none.db")
    assert found.code == EXIT_USAGE
    assert "the server has the registry of its hub: give none" in found.errors
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("arguments", [("topic", "list"), ("send", "t"), ("queue", "list"), ("group", "list")], ids=str)
def test_a_server_that_is_not_there_is_one_line(call: Call, arguments: tuple[str, ...]) -> None:
    found = call(*arguments, "--at", NOBODY)
    assert found.code == 1
    assert found.errors.startswith("pxrs://127.0.0.1:1: no server answers: 127.0.0.1:1: Connection refused")
    assert "is `pxrs serve` running there?" in found.errors


def test_a_server_serves_no_server(call: Call, at: str) -> None:
    found = call("serve", at)
    assert (found.code, "give the hub's directory" in found.errors) == (EXIT_USAGE, True)


# Tokens.


@pytest.fixture
def guarded(hub: Hub, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The address of a server with tokens, and one that permits to read the topic `orders`."""
    hub.create_topic("orders", partitions=1)
    hub.create_topic("secrets", partitions=1)
    auth = str(tmp_path / "tokens.json")
    _, secret = tokens.create(auth, "reader", ["topic:orders=read"], now=1.0)
    assert secret is not None
    with serving(hub, ServerSettings(auth=auth)) as url:
        yield url, secret


def test_a_token_that_is_missing_or_wrong_is_one_line_that_says_how_to_give_one(
    call: Call, guarded: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at, secret = guarded
    for token in (None, "pxrs_wrong"):
        if token is not None:
            monkeypatch.setenv("PXRS_TOKEN", token)
        found = call("topic", "list", "--at", at)
        assert found.code == 1
        assert at in found.errors
        given = "neither is given" if token is None else "PXRS_TOKEN is set"
        assert f"Clients take it from PXRS_TOKEN or ?token_file=FILE in the address; {given}" in found.errors
        assert found.errors.endswith("(Unauthenticated)")
        assert secret not in found.errors
        assert "pxrs_wrong" not in found.errors


def test_what_a_token_does_not_permit_is_one_line_without_the_token(
    call: Call, guarded: tuple[str, str], tmp_path: Path
) -> None:
    at, secret = guarded
    (tmp_path / "token").write_text(secret)
    at = f"{at}?token_file={tmp_path}/token"
    assert json.loads(call("topic", "list", "--at", at, "--json").out)["topic"] == "orders"
    deletes = ("topic", "delete", "orders", "--yes")
    for arguments in (("send", "orders"), ("tail", "secrets"), ("tail", "nothing"), deletes):
        found = call(*arguments, "--at", at, stdin="x\n")
        assert found.code == 1
        assert found.errors.endswith("(NotPermitted)")
        assert secret not in found.errors


# pxrs ping.


def test_ping_measures_round_trips_and_shows_the_server(call: Call, at: str) -> None:
    found = call("ping", "--at", at, "--count", "20", "--json")
    (plain,) = found.rows()
    assert plain["server"] == f"pxrs {pxrs.__version__}"
    assert (plain["at"], plain["round_trips"], plain["tls"], plain["access"]) == (at, 20, False, "granted")
    assert 0 < plain["min_ms"] <= plain["median_ms"] <= plain["p99_ms"] < 60_000
    shown = call("ping", "--at", at, "--count", "1").out
    assert f"{at}: 1 round trip: min " in shown
    assert f"server  pxrs {pxrs.__version__}, instance {plain['instance']}, protocol 1\n" in shown
    assert "access  granted\n" in shown


def test_ping_of_a_server_that_refuses_the_token_says_so(call: Call, guarded: tuple[str, str]) -> None:
    at, _ = guarded
    found = call("ping", "--at", at, "--count", "3")
    assert found.code == 0
    assert f"{at}: 3 round trips: min " in found.out
    assert "access  refused: " in found.out
    (plain,) = call("ping", "--at", at, "--json").rows()
    assert (plain["access"], plain["server"]) == ("refused", None)
    assert "PXRS_TOKEN" in plain["problem"]


def test_ping_of_a_server_that_does_not_answer_ends_with_1(call: Call) -> None:
    found = call("ping", "--at", "pxrs://127.0.0.1:1", "--timeout", "0.3")
    assert found.code == 1
    assert found.errors.startswith("pxrs://127.0.0.1:1: no server answers: ")
    assert found.errors.endswith("(RegistryUnavailable)")


def test_ping_needs_a_server(call: Call, tmp_path: Path) -> None:
    found = call("ping", "--at", str(tmp_path))
    assert (found.code, "is no server: give pxrs://HOST:PORT" in found.errors) == (2, True)


def test_ping_over_tls(call: Call, hub: Hub, tmp_path: Path) -> None:
    import grpc

    pytest.importorskip("trustme")
    ours = certificates(tmp_path)
    pair = ours.server_key.read_bytes(), ours.server_cert.read_bytes()
    mutual = grpc.ssl_server_credentials([pair], ours.ca.read_bytes(), require_client_auth=True)
    with serving(hub, ServerSettings(credentials=mutual)) as at:
        own = f"cert_file={ours.client_cert}&key_file={ours.client_key}"
        (plain,) = call("ping", "--at", f"{at}?ca_file={ours.ca}&{own}", "--json").rows()
        assert (plain["tls"], plain["access"]) == (True, "granted")
        without = call("ping", "--at", f"{at}?ca_file={ours.ca}")
        assert (without.code, "needs a certificate of the client" in without.errors) == (1, True)


def test_an_error_of_tls_is_one_line_and_nothing_of_grpcs_own(hub: Hub, tmp_path: Path) -> None:
    import grpc

    pytest.importorskip("trustme")
    ours, theirs = (certificates(folder) for folder in (tmp_path / "ours", tmp_path / "theirs") if not folder.mkdir())
    pair = ours.server_key.read_bytes(), ours.server_cert.read_bytes()
    with serving(hub, ServerSettings(credentials=grpc.ssl_server_credentials([pair]))) as at:
        environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        # A new interpreter: gRPC reads the variable when it is first used, perhaps before this process was forked.
        command = [sys.executable, "-m", "pxrs.cli", "topic", "list", "--at", f"{at}?ca_file={theirs.ca}"]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == EXIT_USAGE, "the address names the wrong authority"
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    assert "is not trusted" in ran.stderr


# Workers.


def test_workers_handle_a_topic_of_a_server(done: Callable[..., str], at: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "def handle(message):\n"
        "    with open('handled', 'a') as file:\n"
        "        file.write(message.value.decode() + '\\n')\n"
    )
    done("topic", "create", "orders", "--partitions", "2")
    done("send", "orders", stdin="".join(f"{number}\n" for number in range(20)))
    options = ("--topic", "orders", "--group", "billing", "--processes", "2", "--until-end")
    ran = forked.run_text("pxrs.cli", ("worker", "shop:handle", *options, "--at", at), cwd=tmp_path, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert sorted(map(int, (tmp_path / "handled").read_text().split())) == list(range(20))


def test_a_worker_takes_the_items_of_a_queue_of_a_server_until_it_is_stopped(at: str, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "post.py").write_text("def deliver(tx, item):\n    tx.put('sent', item.value)\n")
    hub.create_queue("mail").put_many(["a", "b", "c"])
    sent = hub.create_queue("sent")
    worker = forked.Forked("pxrs.cli", ("worker", "post:deliver", "--queue", "mail", "--at", at), cwd=tmp_path)
    try:
        eventually(lambda: sent.depth().ready == 3)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    finally:
        worker.kill()
    assert hub.queue("mail").depth().ready == hub.queue("mail").depth().in_flight == 0


def test_a_worker_whose_token_is_refused_ends(guarded: tuple[str, str], tmp_path: Path) -> None:
    at, _ = guarded
    options = ("--topic", "orders", "--group", "billing")
    ran = forked.run_text("pxrs.cli", ("worker", "json:dumps", *options, "--at", at), cwd=tmp_path, timeout=120)
    assert ran.returncode == EXIT_FINAL
    assert "(Unauthenticated)" in ran.stderr or "PXRS_TOKEN" in ran.stderr
