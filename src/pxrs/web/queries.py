"""What the registry holds of streaming queries: the manifest of the last batch of each, and those seen before it.

A query that writes to topics leaves a manifest with each batch: its number, when it was committed, what it has read and
whether its rows are appended. The manifests are read again after a change. The registry keeps the last batch of a query
alone, so batches before it are those that this process has seen, up to `BATCHES_MAX`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from pxrs.errors import RegistryCorrupt
from pxrs.publishing.records import APP, MANIFESTS, Manifest, parts_of, query_of
from pxrs.registry.contract import Registry
from pxrs.web.watching import LateWatch

BATCHES_MAX: Final = 60
DEAD_LETTERS: Final = ".dead-letters"
"""The end of the name of the group in which a pipeline's query of dead letters reads."""


@dataclass(frozen=True, slots=True)
class SeenBatch:
    number: int
    at: float
    """When it was committed, in seconds since 1970."""
    rows: int
    """How many messages it has read."""


@dataclass(slots=True)
class SeenQuery:
    """A query, or a named writer, that has written to topics."""

    key: str
    manifest: Manifest
    batches: deque[SeenBatch] = field(default_factory=lambda: deque(maxlen=BATCHES_MAX))

    @property
    def name(self) -> str:
        return query_of(self.key).removeprefix(APP)

    @property
    def groups(self) -> list[str]:
        """The groups in which it reads."""
        return sorted({source.rpartition("/")[0] for source in self.manifest.ranges})

    @property
    def is_of_dead_letters(self) -> bool:
        """Whether this is the query of a pipeline that writes its dead letters."""
        return any(group.endswith(DEAD_LETTERS) for group in self.groups)

    @property
    def writes(self) -> list[str]:
        """The ids of the topics that its last batch has written to."""
        return sorted({part.topic for part in parts_of(self.key, self.manifest)})

    def add(self, manifest: Manifest) -> None:
        if not self.batches or self.batches[-1].number != manifest.batch:
            rows = sum(end - start for spans in manifest.ranges.values() for start, end in spans.values())
            self.batches.append(SeenBatch(manifest.batch, manifest.at, rows))
        self.manifest = manifest


class QueryBook:
    """Used under the observer's lock."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._watch = LateWatch(registry, MANIFESTS)
        self.by_key: dict[str, SeenQuery] = {}
        self.problems: list[str] = []
        self._is_due = True
        """The manifests have changed since they were last read, or the last try to read them failed."""

    def refresh(self, now: float) -> None:
        self._is_due = self._watch.wait(0) or self._is_due
        if not self._is_due:
            return
        found: dict[str, SeenQuery] = {}
        self.problems = []
        for entry in self._registry.scan(MANIFESTS):
            if entry.key.count("/") != 2:  # the registry's own id lies here too
                continue
            try:
                manifest = Manifest.load(entry)
                query = self.by_key.get(entry.key) or SeenQuery(entry.key, manifest)
                query.add(manifest)
                found[entry.key] = query
            except (RegistryCorrupt, ValueError, AttributeError) as error:
                self.problems.append(f"{entry.key}: {error}")
        self.by_key, self._is_due = found, False

    def close(self) -> None:
        self._watch.close()
