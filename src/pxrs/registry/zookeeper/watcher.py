"""Watches over whole subtrees, made of ZooKeeper's one-shot watches on single nodes.

The problem: kazoo 2.11 has no persistent watches. A watch on a node's children causes one event, when a child is
created or deleted; a watch on a node's data causes one event, when the data is written or the node deleted. A reconnect
removes all watches. A change between an event and the next watch must not be missed (R2).

Invariants:
- Under every watched prefix each folder has a watch on its children and each key has one on its data, or the event of
  that watch is in the queue `_jobs`.
- After an event the thread first sets the ZooKeeper watch again ("arms" the node), then wakes the `Watch` handles. So a
  change after the scan of a woken user causes another event.
- After a reconnect all nodes are armed again, then every handle wakes. A lost connection wakes every handle too.
- A key that was deleted is not armed again: when it is created again, its folder has an event. A key that is watched by
  name, without its folder, is armed by `exists`, which sets a watch also on a node that does not exist.
- Only this thread arms nodes, so `_armed` needs no lock. kazoo's threads only put jobs into the queue.

The cost: one request for some hundred keys and one for each folder, when a watch is opened and after a reconnect; the
same for the nodes that had events. All children of a folder with an event are listed.

On failure: if arming fails, all nodes are armed again, after the next reconnect or after RETRY_S.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kazoo.exceptions import ConnectionLoss, KazooException, SessionExpiredError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState

from pxrs.errors import Closed, RegistryError, RegistryUnavailable
from pxrs.registry.watch import PrefixWatch
from pxrs.registry.zookeeper.client import Client
from pxrs.registry.zookeeper.layout import Layout
from pxrs.registry.zookeeper.session import Session

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""How long after an error other than a lost connection all nodes are armed again."""


@dataclass(frozen=True, slots=True)
class _Fired:
    path: str
    is_gone: bool


@dataclass(frozen=True, slots=True)
class _State:
    is_connected: bool


@dataclass(frozen=True, slots=True)
class _Open:
    prefixes: Sequence[str]
    done: Future[None] = field(default_factory=Future)


_Job = _Fired | _State | _Open | None


class Watcher:
    """The thread that arms nodes and wakes handles. It starts with the first watch."""

    def __init__(
        self,
        layout: Layout,
        watches: Callable[[], list[PrefixWatch]],
        wake: Callable[[Iterable[str] | None], None],
    ) -> None:
        self._layout, self._watches, self._wake = layout, watches, wake
        self._session: Session | None = None
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._armed: set[str] = set()
        self._is_stale = False
        self._thread = threading.Thread(target=self._run, name="pxrs-zookeeper-watches", daemon=True)
        self._guard = threading.Lock()
        self._is_closed = False

    def open(self, session: Session, prefixes: Sequence[str]) -> None:
        """Return when every later change under these prefixes will cause a wake. Raises kazoo's errors. The wait is
        bounded, because each answer that the thread waits for has a time limit."""
        job = _Open(prefixes)
        with self._guard:
            if self._is_closed:
                raise Closed("the registry was closed")
            self._session = session
            if self._thread.ident is None:
                self._thread.start()
            self._jobs.put(job)
        job.done.result()

    def close(self, wait_s: float) -> None:
        with self._guard:
            self._is_closed = True
            self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(wait_s)

    def on_state(self, state: str) -> None:
        """Called on kazoo's connection thread."""
        if self._thread.ident is not None:
            self._jobs.put(_State(state == KazooState.CONNECTED))

    def on_event(self, path: str, is_gone: bool) -> None:
        """Called in kazoo's connection thread, so that it is queued before any answer that the server gave later."""
        if self._thread.ident is not None:
            self._jobs.put(_Fired(path, is_gone))

    # All below runs in the thread that arms.

    def _run(self) -> None:
        while True:
            jobs = self._next_jobs()
            opened = [job for job in jobs if isinstance(job, _Open)]
            if None in jobs:
                for job in opened:
                    job.done.set_exception(Closed("the registry was closed"))
                return
            self._follow(jobs)
            for job in opened:
                try:
                    self._arm(job.prefixes)
                except Exception as error:  # noqa: BLE001 - it is the caller's
                    job.done.set_exception(error)
                else:
                    job.done.set_result(None)

    def _next_jobs(self) -> list[_Job]:
        """All that is queued, at least one unless it is time to arm everything anew."""
        jobs: list[_Job] = []
        try:
            jobs.append(self._jobs.get(timeout=RETRY_S if self._is_stale else None))
            while True:
                jobs.append(self._jobs.get_nowait())
        except queue.Empty:
            return jobs

    def _follow(self, jobs: list[_Job]) -> None:
        """Arm the nodes of these events again, then wake the handles."""
        states = [job.is_connected for job in jobs if isinstance(job, _State)]
        fired = {job.path: job.is_gone for job in jobs if isinstance(job, _Fired)}
        if False in states:
            self._wake(None)
        self._is_stale |= bool(states)
        try:
            if self._is_stale:
                self._arm_everything()
            elif fired:
                self._arm_again(fired)
        except (ConnectionLoss, SessionExpiredError, Closed):
            self._is_stale = True  # the next reconnect puts a job into the queue, which arms everything
        except (KazooException, KazooTimeoutError, RegistryError) as error:
            log.warning("watches could not be set; waking their holders and trying again: %r", error)
            self._is_stale = True
            self._wake(None)
        except Exception:
            log.exception("watches could not be armed")
            self._is_stale = True
            self._wake(None)

    def _arm_everything(self) -> None:
        self._armed.clear()
        self._arm({watch.prefix for watch in self._watches()})
        self._is_stale = False
        self._wake(None)

    def _arm_again(self, fired: Mapping[str, bool]) -> None:
        self._armed -= fired.keys()
        names = {path: self._name(path) for path in fired}
        watches = self._watches()
        needed = [path for path, name in names.items() if any(watch.covers(name) for watch in watches)]
        if needed:
            client, named = self._connection(), self._named()
            keys = [path for path in needed if not self._layout.is_folder(path)]
            self._arm_keys(client, [path for path in keys if path in named or not fired[path]])
            self._arm_folders(client, [path for path in needed if self._layout.is_folder(path)])
        self._wake(names.values())

    def _arm(self, prefixes: Iterable[str]) -> None:
        client = self._connection()
        folders = [self._layout.folder(prefix) for prefix in prefixes if _is_prefix(prefix)]
        self._arm_keys(client, [self._layout.leaf(key) for key in prefixes if not _is_prefix(key)])
        self._arm_folders(client, folders, is_first=True)

    def _arm_keys(self, client: Client, paths: Iterable[str]) -> None:
        """Arm keys. One that is watched by name need not exist; others are found in their folder."""
        assert self._session is not None
        named = self._named()
        wanted = [path for path in paths if path not in self._armed]
        alone = [path for path in wanted if path in named]
        list(self._session.gather(lambda path: client.exists_async(path, watch=_by_line), alone))
        self._session.watch(client, [path for path in wanted if path not in named])
        self._armed.update(wanted)  # also nodes that do not exist: their event is in the queue

    def _named(self) -> set[str]:
        return {self._layout.leaf(each.prefix) for each in self._watches() if not _is_prefix(each.prefix)}

    def _arm_folders(self, client: Client, paths: list[str], is_first: bool = False) -> None:
        """Arm folders, and the keys and folders below them that are not armed.

        is_first: for a new watch. Then folders that are armed already are listed too, because nodes below them may not
                  be armed."""
        assert self._session is not None
        while paths:
            leaves: list[str] = []
            below: list[str] = []
            missing: list[str] = []
            listings = self._session.gather(lambda p: client.get_children_async(p, watch=_by_line), paths)
            for path, names in zip(paths, listings, strict=True):
                if names is None:
                    missing.append(path)
                    continue
                self._armed.add(path)
                keys, prefixes = self._layout.children(self._layout.prefix(path), names)
                leaves += map(self._layout.leaf, keys)
                below += map(self._layout.folder, prefixes)
            self._arm_keys(client, leaves)
            paths = [path for path in below if is_first or path not in self._armed]
            paths += self._arm_missing(client, missing)

    def _arm_missing(self, client: Client, paths: list[str]) -> list[str]:
        """Arm watched folders that do not exist: creating them causes an event. Returns those that exist now."""
        assert self._session is not None
        watched = {self._layout.folder(each.prefix) for each in self._watches() if _is_prefix(each.prefix)}
        roots = [path for path in paths if path in watched]
        stats = self._session.gather(lambda p: client.exists_async(p, watch=_by_line), roots)
        return [path for path, stat in zip(roots, stats, strict=True) if stat is not None]

    def _connection(self) -> Client:
        """The connection; ConnectionLoss if there is none, because a reconnect arms everything anyway."""
        assert self._session is not None
        try:
            return self._session.connected(self._session.clock.now())
        except RegistryUnavailable as error:
            raise ConnectionLoss from error

    def _name(self, path: str) -> str:
        """The key of a node. Of a folder, a name under its prefix, for `PrefixWatch.covers`."""
        if self._layout.is_folder(path):
            return f"{self._layout.prefix(path)};"
        return self._layout.key(path)


def _by_line(event: Any) -> None:
    """The callback that kazoo requires for a watch. It does nothing: `Line.on_event` has queued the event already."""


def _is_prefix(prefix: str) -> bool:
    """Whether this is a prefix; without a slash at its end it is a single key."""
    return prefix == "" or prefix.endswith("/")
