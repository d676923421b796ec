"""The page in a real browser: true numbers of a running hub, a live timeline, data that is never run, and actions.

One browser and one hub for all of it. Without Chromium these tests are skipped: the one test server that may be missing
in CI too, because no package index has it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import pxrs
from pxrs.publishing.records import Manifest
from pxrs.testing.browser import Browser, chromium
from pxrs.testing.waiting import eventually
from pxrs.web.access import ActionToken
from pxrs.web.serving import WebServer

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine: apt-get install chromium")

HOSTILE = '<img src=x onerror="window.ran=1"><script>window.ran=1</script><b id=injected>'
TOKEN = "a-token-of-the-browser-test"
CELLS = """[...document.querySelectorAll('[aria-label="%s"] tbody tr')].map(
    (row) => [...row.children].map((cell) => cell.innerText))"""


class Setting(NamedTuple):
    hub: pxrs.Hub
    page: WebServer
    browser: Browser

    def show(self, path: str, title: str) -> None:
        self.browser.evaluate(f"location.hash = {json.dumps(path)}")
        self.browser.wait(f"document.querySelector('h1[data-shown]').innerText.includes({json.dumps(title)})")

    def rows(self, table: str) -> list[list[str]]:
        found: list[list[str]] = self.browser.evaluate(CELLS % table)
        return found

    def tiles(self) -> dict[str, str]:
        pairs = (
            "[...document.querySelectorAll('.tile')].map((tile) => [...tile.children].map((each) => each.innerText))"
        )
        script = f"Object.fromEntries({pairs})"
        found: dict[str, str] = self.browser.evaluate(script)
        return found


def pausing(message: pxrs.Message) -> None:
    if message.partition == 0 and message.offset == 2:
        raise ValueError(HOSTILE)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder: Path = tmp_path_factory.mktemp("web")
    (folder / "token").write_text(TOKEN)
    with pxrs.open(folder / "hub") as hub:
        hub.create_topic("orders", 4)
        with hub.producer("orders") as out:
            for number in range(40):
                out.send(HOSTILE, key=f"{HOSTILE}{number}", partition=number % 4, headers=[(HOSTILE, HOSTILE.encode())])
        queue = hub.create_queue("mails", pxrs.ConsumeOnce())
        queue.put_many([HOSTILE, "b", "c", "d"])
        with suppress(ValueError), hub.transaction() as taken:
            taken.take("mails")
            taken.take("mails")
            raise ValueError(HOSTILE)
        eventually(lambda: queue.depth().dead == 2)
        topic = hub.topic("orders")
        manifest = Manifest(7, [], {f"billing/{topic.id}": {"0": [0, 10]}}, is_published=True, at=time.time())
        hub.registry.commit(put={f"spark/{topic.id}/app-{HOSTILE.encode().hex()}": manifest.dump()})
        consumer = hub.consumer("orders", "billing", name=HOSTILE)
        thread = threading.Thread(target=consumer.run, args=(pausing,), daemon=True)
        thread.start()
        eventually(lambda: settled(hub, 1))
        with WebServer(hub, "127.0.0.1:0", ActionToken(folder / "token")) as page, Browser() as browser:
            browser.open(page.url)
            browser.wait("document.querySelector('[aria-label=Groups] tbody')")
            yield Setting(hub, page, browser)
            assert browser.evaluate("window.ran") is None
            assert browser.evaluate("document.getElementById('injected')") is None
            blocked = [problem for problem in browser.problems if "status of 403" not in problem]
            assert blocked == [], "a script failed, or the policy has blocked something"
        consumer.close()
        thread.join()


def settled(hub: pxrs.Hub, members: int) -> bool:
    try:
        found = hub.group("billing").describe()
    except pxrs.errors.UnknownGroup:
        return False
    owners = {row.owner for row in found.partitions if row.is_owner_there}
    is_read = all(row.lag == 0 or row.paused for row in found.partitions)
    return len(found.partitions) == 4 and len(owners) == members and is_read and any(r.paused for r in found.partitions)


def test_the_overview_shows_true_numbers_and_what_needs_attention(setting: Setting) -> None:
    setting.show("#/", "Overview")
    described = setting.hub.group("billing").describe()
    assert described.lag == 8
    setting.browser.wait(f"({CELLS % 'Groups'})[0][3] === '{described.lag}'")
    assert [row[:5] for row in setting.rows("Groups")] == [["billing", "1", "4", "8", "1 paused"]]
    assert [row[:3] for row in setting.rows("Topics")] == [["orders", "4", "40"]]
    assert [row[:5] for row in setting.rows("Queues")] == [["mails", "2", "0", "0", "2"]]
    attention = setting.browser.text("#attention")
    assert "1 of 4 partitions paused" in attention
    assert "2 dead letters" in attention


def test_a_topic_shows_its_offsets_and_hostile_messages_as_text(setting: Setting) -> None:
    setting.show("#/topics/orders", "orders")
    setting.browser.wait("document.querySelectorAll('[aria-label=Messages] tbody tr').length === 20")
    bounds = setting.hub.topic("orders").bounds(range(4))
    assert [row[:4] for row in setting.rows("Partitions")] == [
        [str(number), str(each.start), str(each.end), str(each.end - each.start)] for number, each in bounds.items()
    ]
    assert setting.rows("Readers")[0] == ["billing", "1", "8"]
    message = setting.rows("Messages")[0]
    assert message[3].startswith("<img src=x onerror=")
    assert message[4] == HOSTILE
    assert (
        setting.browser.evaluate("document.querySelector('[aria-label=Messages] details pre').textContent") == HOSTILE
    )
    assert setting.browser.evaluate("document.querySelectorAll('main img, main script').length") == 0
    setting.browser.click("[data-view=hex]")
    setting.browser.wait("document.querySelector('[aria-label=Messages] pre').innerText.includes('3c 69 6d 67')")
    search = "const form = document.getElementById('search'); form.elements.how.value = 'offset';"
    search += "form.elements.what.value = '3'; form.elements.partition.value = '2'; form.requestSubmit();"
    setting.browser.evaluate(f"(() => {{ {search} }})()")
    setting.browser.wait("document.querySelectorAll('[aria-label=Messages] tbody tr').length === 7")
    assert [row[:2] for row in setting.rows("Messages")] == [["2", str(offset)] for offset in range(3, 10)]


def test_a_group_shows_owners_epochs_lag_and_the_error_of_a_paused_partition(setting: Setting) -> None:
    setting.show("#/groups/billing", "billing")
    described = setting.hub.group("billing").describe()
    rows = setting.rows("Ownership of partitions")
    # topic, partition, one column for the member, then epoch, checkpoint, end, lag
    assert [[row[1], row[2], *row[3:7]] for row in rows] == [
        [str(n) for n in (each.partition, each.epoch, each.epoch, each.checkpoint, each.end, each.lag)]
        for each in described.partitions
    ]
    assert [row[8] for row in rows] == ["paused" if each.paused else "owned" for each in described.partitions]
    assert [row[0].split("\n")[0] for row in setting.rows("Members")] == [f"{HOSTILE} leader"]
    paused = setting.browser.text("#paused")
    assert HOSTILE in paused
    assert "in pausing" in paused


def test_a_rebalance_is_on_the_timeline_within_2_s(setting: Setting) -> None:
    """Up to three times, until one was shown in time: other tests may keep the machine busy for a moment."""
    setting.show("#/groups/billing", "billing")
    took_s = [rebalance(setting, "worker-2")]
    while min(took_s) >= 2.0 and len(took_s) < 3:
        took_s.append(rebalance(setting, f"worker-{len(took_s) + 2}"))
    assert min(took_s) < 2.0, took_s


def rebalance(setting: Setting, name: str) -> float:
    """A second member joins; how long after it owns its partitions the page shows it, as a picture and in words."""
    second = setting.hub.consumer("orders", "billing", name=name)
    thread = threading.Thread(target=second.run, args=(pausing,), daemon=True)
    thread.start()
    try:
        eventually(lambda: settled(setting.hub, 2))
        began = time.monotonic()
        bars = f"#timeline rect[data-member={name}]"
        setting.browser.wait(f"document.querySelector('{bars}')")
        setting.browser.wait(f"({CELLS % 'Members'}).length === 2")
        setting.browser.wait("document.querySelector('#timeline [data-event=\"partition.handed_over\"]')")
        setting.browser.wait(f"({CELLS % 'Events'}).some((row) => row[2].includes('{name}'))")
        took_s = time.monotonic() - began
        shown: list[str] = setting.browser.evaluate(
            f"[...document.querySelectorAll('{bars}')].map((bar) => bar.dataset.epoch)"
        )
        described = setting.hub.group("billing").describe()
        assert shown == [str(row.epoch) for row in described.partitions if row.owner_name == name]
        return took_s
    finally:
        second.close()
        thread.join()


def test_a_queue_shows_its_items_and_dead_letters_are_retried_with_the_token_alone(setting: Setting) -> None:
    setting.show("#/queues/mails", "mails")
    depth = setting.hub.queue("mails").depth()
    tiles = setting.tiles()
    shown = [tiles[name] for name in ("ready", "in flight", "delayed", "dead")]
    assert shown == [str(n) for n in (depth.ready, depth.in_flight, depth.delayed, depth.dead)]
    (first, *_) = setting.rows("Items")
    assert HOSTILE in first[4]
    without = act(setting, {"queue": "mails", "confirmed": True})
    assert (without["status"], setting.hub.queue("mails").depth()) == (403, depth), "no permission, no effect"
    for token, ending in (("wrong-wrong-wrong-wrong", ".problem"), (TOKEN, "#preview")):
        setting.browser.click("[data-action=requeue]")
        setting.browser.wait("document.querySelector('#token')")
        setting.browser.evaluate(f"document.querySelector('#token').value = {token!r}")
        setting.browser.click("#confirm")
        setting.browser.wait(f"document.querySelector({json.dumps(ending)})")
        assert setting.hub.queue("mails").depth() == depth
    assert setting.browser.text("#preview") == "Put 2 dead letters of mails back into the queue, as if never delivered."
    setting.browser.click("#confirm")
    setting.browser.wait("document.querySelector('.done')")
    setting.browser.wait("document.querySelector('.tiles').innerText.includes('ready\\n4')")
    assert setting.hub.queue("mails").depth() == pxrs.Depth(ready=4, delayed=0, in_flight=0, dead=0)


def act(setting: Setting, given: dict[str, object]) -> dict[str, Any]:
    """Post an action from the page itself, without a token."""
    options = {"method": "POST", "headers": {"Content-Type": "application/json"}, "body": json.dumps(given)}
    script = f"fetch('/api/actions/requeue', {json.dumps(options)}).then((answer) => ({{status: answer.status}}))"
    found: dict[str, Any] = setting.browser.evaluate(script)
    return found


def test_the_queries_page_shows_the_last_batch(setting: Setting) -> None:
    setting.show("#/queries", "Streaming queries")
    setting.browser.wait("document.querySelector('[aria-label=Queries] tbody')")
    ((query, group, reads, writes, batch, rows, state, *_),) = setting.rows("Queries")
    assert (query, group.strip(), reads.strip()) == (HOSTILE.encode().hex(), "billing", "orders")
    assert (writes.strip(), batch, rows, state) == ("orders", "7", "10", "published")


def test_pages_fit_a_phone(setting: Setting) -> None:
    setting.browser.resize(390, 844, is_phone=True)
    try:
        pages = {
            "#/": "Overview",
            "#/topics/orders": "orders",
            "#/groups/billing": "billing",
            "#/queues/mails": "mails",
        }
        for path, title in {**pages, "#/queries": "Streaming queries"}.items():
            setting.show(path, title)
            assert setting.browser.evaluate("document.documentElement.scrollWidth") <= 390
        cells = "[...document.querySelectorAll('[aria-label=Queries] td')]"
        setting.browser.wait(f"{cells}.length")
        assert setting.browser.evaluate(f"{cells}.every((cell) => cell.getBoundingClientRect().right <= 390)")
    finally:
        setting.browser.resize(1280, 900)


def evaluate(setting: Setting, script: str) -> Any:
    """script: uses the functions of dom.js as `dom`."""
    return setting.browser.evaluate(f"import('/assets/dom.js').then((dom) => ({script}))")


@pytest.mark.parametrize(
    "text",
    ['{"id":12345678901234567890,"a":[1.0,{},[],"x\\"{,"],"a":-0.10e5,"b":null}', "[]", '"text"', "7", "[[1],2]"],
)
def test_json_is_shown_with_its_own_numbers_and_keys(setting: Setting, text: str) -> None:
    shown = evaluate(setting, f"dom.written(new TextEncoder().encode({json.dumps(text)}), 'json', true)")
    assert shown.replace("\n", "").replace(" ", "") == text, "nothing but white space is added"
    assert (shown.count("\n") > 0) is (text not in ("[]", '"text"', "7"))


def test_json_that_is_nested_very_deeply_is_shown_as_it_is(setting: Setting) -> None:
    script = "(() => { const text = '['.repeat(15000) + ']'.repeat(15000); return dom.indented(text) === text; })()"
    assert evaluate(setting, script)


def test_a_time_without_a_zone_is_utc_wherever_the_visitor_is(setting: Setting) -> None:
    setting.browser.call("Emulation.setTimezoneOverride", timezoneId="America/New_York")
    try:
        noon = 1769860800000
        for text in ("2026-01-31T12:00", "2026-01-31 12:00:00", "2026-01-31 12:00:00Z", "2026-01-31T13:00:00+01:00"):
            assert evaluate(setting, f"dom.instant({text!r})") == noon, text
        assert evaluate(setting, f"dom.moment({noon} / 1000)") == "2026-01-31 12:00:00Z"
    finally:
        setting.browser.call("Emulation.setTimezoneOverride", timezoneId="")


def test_a_name_that_is_no_unicode_text_and_an_address_that_is_no_page_break_nothing(setting: Setting) -> None:
    assert evaluate(setting, r"dom.link('topics', 'a\ud800').getAttribute('href')") == "#/topics/a%EF%BF%BD"
    for path in ("#/constructor", "#/__proto__/x", "#/nothing"):
        setting.show("#/queries", "Streaming queries")
        setting.show(path, "Overview")


def test_spans_of_time_are_rounded_down(setting: Setting) -> None:
    spans = {0.04: "0.0 s", 59: "59 s", 119.7: "1 min 59 s", 3_700: "1 h 1 min", 151_200: "1 d 18 h", 604_800: "7 d"}
    assert [evaluate(setting, f"dom.span({seconds})") for seconds in spans] == list(spans.values())
