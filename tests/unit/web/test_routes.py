"""The addresses of the page: true numbers, messages as bytes that are never HTML, no answer without its headers."""

from __future__ import annotations

import base64
import random
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

import pxrs
from pxrs.testing.many_groups import add_group
from pxrs.web import browse
from pxrs.web.guard import HEADERS
from pxrs.web.routes import ASSETS
from pxrs.web.serving import WebServer
from tests.unit.web.asking import Answer, ask, get, post, server

HOSTILE = b"""<script>alert(1)</script>"'><img src=x onerror=alert(1)>\x00\xff"""
FILES = Path(pxrs.__file__).parent / "web" / "assets"


@pytest.fixture(scope="module")
def hub() -> Iterator[pxrs.Hub]:
    with pxrs.open("memory:") as made:
        made.create_topic("orders", 4)
        with made.producer("orders") as out:
            for number in range(100):
                out.send(f'{{"n":{number}}}', key=f"k{number % 10}", headers=[("<b>name</b>", HOSTILE)])
        add_group(made.registry, "billing", made.topics())
        made.create_queue("mails").put_many([HOSTILE, b"b", b"c"])
        yield made


@pytest.fixture(scope="module")
def page(hub: pxrs.Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    with server(hub, tmp_path_factory.mktemp("token")) as made:
        yield made


def check_headers(answer: Answer) -> None:
    for name, value in HEADERS:
        assert answer.headers[name.decode()] == value.decode()
    assert "set-cookie" not in answer.headers
    assert "access-control-allow-origin" not in answer.headers
    assert "server" not in answer.headers


def test_every_file_of_the_page_is_served_and_no_other(page: WebServer) -> None:
    assert {path.name for path in FILES.iterdir()} == set(ASSETS)
    for name, kind in ASSETS.items():
        answer = ask(page, "GET", f"/assets/{name}")
        assert (answer.status, answer.headers["content-type"], answer.body) == (200, kind, (FILES / name).read_bytes())
        check_headers(answer)
    assert ask(page, "GET", "/").body == (FILES / "index.html").read_bytes()
    for name in ("..", "%2e%2e%2frouting.py", "..%2froutes.py", "nothing.js", "app.js/x"):
        assert ask(page, "GET", f"/assets/{name}").status == 404


def test_the_scripts_make_no_html_from_data_and_load_nothing_from_elsewhere() -> None:
    for path in FILES.iterdir():
        text = path.read_text()
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
            assert forbidden not in text, (path.name, forbidden)
        urls = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)) - {"http://www.w3.org"}
        assert not urls, (path.name, urls)
    html = (FILES / "index.html").read_text()
    assert "<style" not in html
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=", html)


def test_the_overview_has_the_numbers_of_the_hub(hub: pxrs.Hub, page: WebServer) -> None:
    found = get(page, "/api/overview")
    assert [(row["topic"], row["partitions"], row["messages"]) for row in found["topics"]] == [("orders", 4, 100)]
    (group,) = found["groups"]
    described = hub.group("billing").describe()
    assert (group["lag"], group["members"], group["partitions"]) == (described.lag, 1, 4)
    (queue,) = found["queues"]
    depth = hub.queue("mails").depth()
    assert [queue[name] for name in ("ready", "in_flight", "delayed", "dead")] == [
        depth.ready,
        depth.in_flight,
        depth.delayed,
        depth.dead,
    ]


def test_messages_are_found_by_offset_time_key_and_partition(hub: pxrs.Hub, page: WebServer) -> None:
    topic = hub.topic("orders")
    wanted = {(m.partition, m.offset) for number in range(4) for m in topic.messages(number) if m.key == b"k3"}
    found = get(page, "/api/topics/orders/messages?key=k3&limit=100")
    assert {(row["partition"], row["offset"]) for row in found["messages"]} == wanted
    assert found["next"] == {}
    (number,) = {partition for partition, _ in wanted}
    found = get(page, f"/api/topics/orders/messages?partition={number}&offset=5&limit=3")
    assert [row["offset"] for row in found["messages"]] == [5, 6, 7]
    assert found["next"] == {str(number): 8}
    assert len(get(page, "/api/topics/orders/messages?limit=20")["messages"]) == 20
    first = next(iter(topic.messages(number, 0)))
    later = get(page, f"/api/topics/orders/messages?partition={number}&time={first.timestamp / 1e6 + 3600}")
    assert later["messages"] == []
    earlier = get(page, f"/api/topics/orders/messages?partition={number}&time={first.timestamp / 1e6 - 1}&limit=1")
    assert [row["offset"] for row in earlier["messages"]] == [0]


def test_the_last_messages_are_the_newest_of_all_partitions(hub: pxrs.Hub, page: WebServer) -> None:
    hub.create_topic("uneven", 4)
    with hub.producer("uneven") as out:
        for number in range(30):
            out.send(str(number), partition=1)
    found = get(page, "/api/topics/uneven/messages?limit=20")
    assert [row["offset"] for row in found["messages"]] == list(range(10, 30))
    found = get(page, "/api/topics/uneven/messages?offset=0&limit=20")
    assert [row["offset"] for row in found["messages"]] == list(range(20))
    assert found["next"] == {"1": 20}
    hub.delete_topic("uneven")


def test_the_last_messages_are_those_before_the_end_also_if_they_are_large(
    hub: pxrs.Hub, page: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browse, "READ_BYTES", 100_000)
    hub.create_topic("large", 1)
    with hub.producer("large") as out:
        for _ in range(30):
            out.send(b"x" * 30_000)
            out.flush()
    offsets = [row["offset"] for row in get(page, "/api/topics/large/messages?limit=20")["messages"]]
    assert offsets
    assert offsets == list(range(30 - len(offsets), 30))
    hub.delete_topic("large")


def test_a_page_of_a_topic_with_very_many_partitions_reads_some_of_them(hub: pxrs.Hub, page: WebServer) -> None:
    """Each partition that is read stays open, and costs file descriptors."""
    hub.create_topic("wide", 200)
    with hub.producer("wide") as out:
        for number in range(100, 200):
            out.send(b"x", partition=number)
    for query in ("", "offset=0", "time=0"):
        found = get(page, f"/api/topics/wide/messages?limit=100&{query}")
        assert [len(found["messages"]), found["left_out"]] == [browse.WHOLE_MAX, 100 - browse.WHOLE_MAX]
    hub.delete_topic("wide")


def test_names_of_groups_that_are_not_there_are_not_remembered(page: WebServer) -> None:
    for number in range(30):
        assert ask(page, "GET", f"/api/groups/nobody-{number}").status == 404
        assert ask(page, "GET", f"/api/groups/nobody-{number}/timeline").status == 404
    assert list(page.observer.groups.by_name) == ["billing"]


def test_a_search_for_a_key_goes_on_where_it_ended(page: WebServer) -> None:
    rows, offset = [], 0
    while True:
        found = get(page, f"/api/topics/orders/messages?key=k3&offset={offset}&limit=3")
        rows += [row["offset"] for row in found["messages"]]
        if not found["next"]:
            break
        ((_, offset),) = found["next"].items()
    assert len(rows) == len(set(rows)) == 10


def test_bytes_of_messages_and_items_are_sent_as_base64_in_json(page: WebServer) -> None:
    for path in ("/api/topics/orders/messages?limit=1&partition=0", "/api/queues/mails/items?state=ready"):
        answer = ask(page, "GET", path)
        assert answer.headers["content-type"] == "application/json"
        assert b"<script" not in answer.body
        check_headers(answer)
    (item, *_) = get(page, "/api/queues/mails/items?state=ready")["items"]
    assert base64.b64decode(item["value"]["base64"]) == HOSTILE
    (message,) = get(page, "/api/topics/orders/messages?limit=1&partition=0")["messages"]
    assert message["headers"][0]["name"] == "<b>name</b>"


def test_a_long_value_is_cut(hub: pxrs.Hub, page: WebServer) -> None:
    hub.create_topic("large", 1)
    with hub.producer("large") as out:
        out.send(b"x" * 500_000)
    answer = ask(page, "GET", "/api/topics/large/messages")
    (message,) = answer.json["messages"]
    assert message["value"]["bytes"] == 500_000
    assert len(answer.body) < 60_000
    hub.delete_topic("large")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/topics/none", 404),
        ("/api/groups/none", 404),
        ("/api/queues/none", 404),
        ("/api/groups/..%2f..%2fqueues", 404),
        ("/api/topics/none/messages", 404),
        ("/api/topics/orders/messages?partition=9", 400),
        ("/api/topics/orders/messages?offset=x", 400),
        ("/api/topics/orders/messages?offset=1e400", 400),
        ("/api/queues/mails/items?state=other", 400),
        ("/api/groups/billing/timeline?hours=nan", 400),
        ("/api/groups/billing/timeline?hours=1000", 400),
        ("/nothing", 404),
        ("/api/actions/retry", 405),
    ],
)
def test_what_is_not_there_or_not_a_number_is_an_error_with_a_text(page: WebServer, path: str, status: int) -> None:
    answer = ask(page, "GET", path)
    assert answer.status == status
    check_headers(answer)


def test_hostile_names_are_answered_as_json(page: WebServer) -> None:
    name = quote("<img src=x onerror=alert(1)>", safe="")
    for kind in ("topics", "groups", "queues"):
        answer = ask(page, "GET", f"/api/{kind}/{name}")
        assert answer.status in (400, 404, 409)
        assert answer.headers["content-type"] == "application/json"
        check_headers(answer)


def test_another_host_is_refused_before_anything_is_read(page: WebServer) -> None:
    answer = ask(page, "GET", "/api/overview", Host="evil.example")
    assert answer.status == 421
    assert b"orders" not in answer.body
    check_headers(answer)


def test_a_fuzz_of_the_routes_finds_no_failure(page: WebServer, hub: pxrs.Hub) -> None:
    """Whatever is asked, the answer has no server error and all its headers, and nothing changes."""
    chosen = random.Random(17)
    kinds = ("topics", "groups", "queues", "assets", "actions", "queries", "overview", "session", "", "x")
    names = ("orders", "billing", "mails", "", "..", "%00", "%ff", "a" * 300, "%2e%2e", "<x>", "%22", "_events", "-1")
    tails = ("", "/messages", "/timeline", "/items", "/preview", "//", "/messages/x")
    values = (
        "",
        "0",
        "-1",
        "1e9",
        "99999999999999999999",
        "nan",
        "inf",
        "x",
        "%00",
        "k3",
        "ready",
        "dead",
        "0x10",
        "%F0",
    )
    fields = ("partition", "offset", "time", "key", "limit", "state", "after", "hours", "zz")
    before = (hub.topics(), hub.groups(), hub.queue("mails").depth())
    for _ in range(250):
        query = "&".join(f"{chosen.choice(fields)}={chosen.choice(values)}" for _ in range(chosen.randrange(4)))
        parts = [part for part in (chosen.choice(kinds), chosen.choice(names)) if part]
        path = "/api/" + "/".join(parts) + chosen.choice(tails) + (f"?{query}" if query else "")
        path = path.replace("<", "%3C").replace(">", "%3E")
        if chosen.random() < 0.7:
            answer = ask(page, chosen.choice(("GET", "GET", "HEAD", "PUT", "OPTIONS")), path)
        else:
            given = chosen.choice([{}, [], None, 1, {"group": 1}, {"group": "billing", "confirmed": True}, {"ids": {}}])
            answer = post(page, path, given, chosen.choice([None, "", "wrong", "ü", "x" * 5_000]))
        assert answer.status < 500, (path, answer)
        check_headers(answer)
    assert (hub.topics(), hub.groups(), hub.queue("mails").depth()) == before


def test_bytes_that_are_no_http_end_the_connection(page: WebServer) -> None:
    import socket

    host, _, port = page.address.rpartition(":")
    for sent in (b"\x16\x03\x01\x02\x00" * 20, b"GET / HTTP/1.1\r\n" + b"a: " + b"b" * 100_000, b"GET\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(sent + b"\r\n\r\n")
            answer = connection.recv(65_536)
            assert not answer or answer.startswith(b"HTTP/1.1 4")
    assert get(page, "/api/session") == {"has_actions": True, "is_open": True, "has_cluster": False}


def test_the_time_of_a_message_is_in_seconds(hub: pxrs.Hub, page: WebServer) -> None:
    (message,) = get(page, "/api/topics/orders/messages?limit=1&partition=0&offset=0")["messages"]
    stored = next(iter(hub.topic("orders").messages(0)))
    assert message["time"] * 1e6 == pytest.approx(stored.timestamp, abs=1)


def test_a_page_that_is_read_only_has_the_commands_that_decide_about_failed_messages(tmp_path: Path) -> None:
    def reject(message: object) -> None:
        raise ValueError("no")

    with pxrs.open(tmp_path / "my hub") as hub:
        hub.create_topic("t", 1)
        with hub.producer("t") as out:
            out.send(b"x")
        with hub.consumer("t", "g", until="end") as inbox, pytest.raises(pxrs.errors.PartitionsPaused):
            inbox.run(reject)
        hub.create_queue("q", pxrs.ConsumeOnce()).put("x")
        with hub.transaction() as tx:
            assert tx.take("q", timeout=30) is not None
            tx.rollback("no")
        with server(hub) as page:
            at = f"--at '{hub.url}'"
            (row,) = get(page, "/api/groups/g")["rows"]
            assert row["paused"]["commands"] == [f"pxrs group retry g t 0 {at}", f"pxrs group skip g t 0 {at}"]
            assert get(page, "/api/queues/q")["retry"] == f"pxrs queue dead retry q {at}"
            texts = " ".join(each["text"] for each in get(page, "/api/overview")["attention"])
    assert f"`pxrs group describe g {at}` shows how to continue" in texts
    assert f"see `pxrs queue dead list q {at}`, then `pxrs queue dead retry q {at}`" in texts
