"""Makes the pictures of docs/web.md: every page of `pxrs web` with the data of a small hub, in `docs/images`.

    make screenshots

Needs Chromium. The hub is real: producers, members of groups that come, go and fail, and a queue with dead letters. The
streaming queries are records as a Spark driver writes them: a Spark of its own would take a minute.
"""

from __future__ import annotations

import io
import json
import random
import runpy
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pxrs
from pxrs.cluster.broker.context import BrokerSettings
from pxrs.publishing.records import Manifest
from pxrs.testing.browser import Browser
from pxrs.testing.clusters import small_cluster
from pxrs.testing.waiting import eventually
from pxrs.web.access import ActionToken
from pxrs.web.serving import WebServer

IMAGES = Path(__file__).parent / "images"
DESKTOP, PHONE = (1280, 860), (390, 844)
RUN_S = 22.0
COUNTRIES = ("DE", "FR", "NL", "PL", "SE")


BILLING = """
import json
import time


def book(message):
    order = json.loads(message.value)
    time.sleep(0.001)
    if message.partition == 5 and message.offset == 60:
        raise ValueError(f"order {order['order']} has no customer")
"""


def handle(message: pxrs.Message) -> None:
    time.sleep(0.001)


def loaded(file: Path) -> Callable[[pxrs.Message], None]:
    """The handler in a file of its own, which tracebacks name."""
    file.write_text(BILLING)
    book: Callable[[pxrs.Message], None] = runpy.run_path(str(file))["book"]
    return book


class Scene:
    """A hub in which something happens."""

    def __init__(self, hub: pxrs.Hub, book: Callable[[pxrs.Message], None]) -> None:
        self.hub, self.book = hub, book
        self.is_over = threading.Event()
        self.producing: list[threading.Thread] = []
        """Those that end with `is_over`; members end with the hub."""
        self.chosen = random.Random(7)

    def begin(self) -> None:
        hub = self.hub
        for name, partitions in (("orders", 8), ("payments", 6), ("shipments", 4), ("clicks", 16), ("orders.dead", 2)):
            hub.create_topic(name, partitions, retention=7 * 86_400.0)
        for name, rate in (("orders", 400), ("payments", 150), ("shipments", 60), ("clicks", 2_000)):
            self.producing.append(self.run(self.produce, name, rate))
        self.work("orders", "billing", "billing-1", self.book)
        self.work("orders", "fulfilment", "fulfilment-1", handle)
        self.work("payments", "ledger", "ledger-1", handle)
        self.work("clicks", "sessions", "sessions-1", handle)
        self.work("orders", "enrich", "spark-driver", handle)
        with hub.producer("orders.dead") as out:
            out.send(b"{", key="customer-3", headers=[("pxrs-reason", b"it is no JSON")])
        with hub.consumer("shipments", "reports", name="reports-1") as gone:  # a group that nobody runs any more
            gone.poll(timeout=2.0)
            gone.commit()
        self.queues()
        self.producing.append(self.run(self.queries))

    def run(self, work: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        return thread

    def work(self, topic: str, group: str, name: str, handle: Callable[[pxrs.Message], None]) -> pxrs.Consumer:
        consumer = self.hub.consumer(topic, group, name=name)
        self.run(consumer.run, handle)
        return consumer

    def produce(self, topic: str, rate: int) -> None:
        with self.hub.producer(topic) as out:
            number = 0
            while not self.is_over.wait(0.1):
                for _ in range(max(1, rate // 10)):
                    number += 1
                    order = {"order": number, "country": self.chosen.choice(COUNTRIES), "total": number % 97 + 0.5}
                    out.send(json.dumps(order), key=f"customer-{number % 400}", headers=[("source", b"shop")])

    def queues(self) -> None:
        mails = self.hub.create_queue("mails", pxrs.ConsumeOnce())
        mails.put_many([json.dumps({"to": f"customer-{number}@example.org"}) for number in range(40)])
        mails.put_many([json.dumps({"to": "later@example.org"})] * 6, delay=3_600)
        self.hub.create_queue("invoices").put_many([json.dumps({"invoice": number}) for number in range(12)])

        def fail(item: pxrs.Item) -> None:
            raise ConnectionError(f"smtp.example.org refused {json.loads(item.value)['to']}: mailbox unavailable")

        for _ in range(4):
            try:
                with self.hub.transaction() as taken:
                    item = taken.take("mails")
                    if item is not None:
                        fail(item)
            except ConnectionError:
                continue

    def queries(self) -> None:
        orders, dead = self.hub.topic("orders"), self.hub.topic("orders.dead")
        target = self.hub.topic("shipments")
        number = 0
        while not self.is_over.wait(0.4 + self.chosen.random()):
            number += 1
            for group, topic, share in (("enrich", target, 1), ("enrich.dead-letters", dead, 20)):
                spans = {str(p): [number * 50, number * 50 + 50 // share] for p in range(8)}
                made = Manifest(number, [], {f"{group}/{orders.id}": spans}, is_published=True, at=time.time())
                self.hub.registry.commit(put={f"spark/{topic.id}/app-{group}": made.dump()})

    def move(self) -> None:
        """Members come and go, so that the timeline has something to show."""
        second = self.work("orders", "billing", "billing-2", self.book)
        time.sleep(RUN_S / 4)
        self.work("orders", "billing", "billing-3", self.book)
        time.sleep(RUN_S / 4)
        second.close()
        time.sleep(RUN_S / 4)
        self.work("orders", "billing", "billing-4", self.book)
        time.sleep(RUN_S / 4)
        eventually(lambda: any(row.paused for row in self.hub.group("billing").describe().partitions))


def save(browser: Browser, name: str) -> None:
    """As a PNG of at most 256 colours, if Pillow is there to make it smaller."""
    data = browser.screenshot()
    try:
        from PIL import Image
    except ImportError:
        pass
    else:
        out = io.BytesIO()
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        picture = picture.quantize(256, Image.Quantize.MEDIANCUT, kmeans=3, dither=Image.Dither.NONE)
        picture.save(out, "PNG", optimize=True)
        data = out.getvalue()
    (IMAGES / f"{name}.png").write_bytes(data)


def show(browser: Browser, path: str) -> None:
    browser.evaluate(f"location.hash = {path!r}")
    browser.wait("document.querySelector('[data-shown]')")
    browser.evaluate("new Promise((resolve) => setTimeout(resolve, 2200))")  # two refreshes, for the rates


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    folder = Path(tempfile.gettempdir()) / "shop"
    folder.mkdir()
    try:
        (folder / "token").write_text("not-used-for-the-pictures")
        with pxrs.open(folder / "hub") as hub:
            scene = Scene(hub, loaded(folder / "billing.py"))
            scene.begin()
            with WebServer(hub, "127.0.0.1:0", ActionToken(folder / "token")) as page, Browser(*DESKTOP) as browser:
                browser.open(page.url)
                scene.move()
                take(browser)
            scene.is_over.set()
            for thread in scene.producing:
                thread.join()
        take_cluster(folder / "cluster")
    finally:
        shutil.rmtree(folder)


PAGES = {
    "overview": ("#/", DESKTOP),
    "topic": ("#/topics/orders", (1280, 1100)),
    "group": ("#/groups/billing", (1280, 1220)),
    "queue": ("#/queues/mails", (1280, 760)),
    "queries": ("#/queries", (1280, 480)),
}


def take(browser: Browser) -> None:
    for name, (path, size) in PAGES.items():
        browser.resize(*size)
        for scheme, suffix in (("light", ""), ("dark", "-dark")):
            if suffix and name not in ("overview", "group"):
                continue
            browser.prefer(scheme)
            show(browser, path)
            save(browser, f"web-{name}{suffix}")
    browser.resize(*PHONE, is_phone=True)
    for name, (path, _) in PAGES.items():
        browser.prefer("dark" if name == "group" else "light")
        show(browser, path)
        save(browser, f"web-{name}-phone")


def take_cluster(folder: Path) -> None:
    """The page of a cluster, shortly after a storage node has died: its copies are not all made anew yet."""
    settings = BrokerSettings(copies_grace_s=3_600)
    with small_cluster(folder, nodes=5, brokers=2, settings=settings) as cluster, pxrs.open(cluster.url) as hub:
        for name, partitions in (("orders", 4), ("payments", 3)):
            hub.create_topic(name, partitions)
            with hub.producer(name) as out:
                for number in range(200):
                    out.send(b"x" * 500, partition=number % partitions)
        cluster.stop_node(1)
        with hub.producer("orders") as out:
            for number in range(40):
                out.send(b"y" * 500, partition=number % 4).result(30)
        with WebServer(hub, "127.0.0.1:0") as page, Browser(1280, 1180) as browser:
            browser.open(page.url)
            for scheme, suffix in (("light", ""), ("dark", "-dark")):
                browser.prefer(scheme)
                show(browser, "#/cluster")
                save(browser, f"web-cluster{suffix}")
            browser.resize(*PHONE, is_phone=True)
            browser.prefer("light")
            show(browser, "#/cluster")
            save(browser, "web-cluster-phone")


if __name__ == "__main__":
    main()
