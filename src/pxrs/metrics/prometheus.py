"""Counts in the format of Prometheus, through `prometheus-client` (the extra `metrics`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any, Final, NamedTuple

from pxrs.errors import MissingDependency
from pxrs.metrics.instruments import Distribution, Series, Snapshot, snapshot
from pxrs.metrics.table import BUCKETS_S, TABLE

try:
    import prometheus_client
    from prometheus_client import core
    from prometheus_client.exposition import choose_encoder
except ImportError as error:
    raise MissingDependency.of_extra("the page of metrics for Prometheus", error.name, "metrics") from error

_BOUNDS: Final = (*map(prometheus_client.utils.floatToGoString, BUCKETS_S), "+Inf")


class Part(NamedTuple):
    """Counts of one process, to be exported beside those of others."""

    labels: dict[str, str]
    """Labels that all its series get besides their own. All parts have the same names of these."""
    counts: Snapshot


def _of_this_process() -> Iterable[Part]:
    return (Part({}, snapshot()),)


class Collector(prometheus_client.registry.Collector):  # type: ignore[misc]
    """A collector for a registry of `prometheus_client`."""

    def __init__(self, read: Callable[[], Iterable[Part]] = _of_this_process) -> None:
        """read: gives what is exported, when somebody asks; by default the counts of this process."""
        self._read = read

    def describe(self) -> Iterator[core.Metric]:
        """No series: `CollectorRegistry.register` would otherwise read everything to learn the names."""
        return iter(())

    def collect(self) -> Iterator[core.Metric]:
        parts = list(self._read())
        for name, metric in TABLE.items():
            present = [(part.labels, part.counts[name]) for part in parts if name in part.counts]
            if not present:
                continue
            added = list(present[0][0])
            family = _KINDS[metric.kind](metric.prometheus, metric.text, labels=[*added, *metric.labels])
            for labels, series in present:
                _add(family, list(labels.values()), series)
            yield family


_KINDS: Final = {
    "counter": core.CounterMetricFamily,
    "gauge": core.GaugeMetricFamily,
    "histogram": core.HistogramMetricFamily,
}


def _encodable(label: str) -> str:
    """A label that UTF-8 can hold: a name in a record of the registry may be any text that JSON can hold, also half of
    a surrogate pair, with which nothing could be exported."""
    return label.encode(errors="backslashreplace").decode()


def _add(family: Any, added: list[str], series: Iterable[Series]) -> None:
    for labels, value in series:
        values = [*added, *map(_encodable, labels)]
        if isinstance(value, Distribution):
            buckets = list(zip(_BOUNDS, map(float, accumulate(value.counts)), strict=True))
            family.add_metric(values, buckets, sum_value=value.sum)
        else:
            family.add_metric(values, value)


class Exposition:
    """The text of /metrics: the counts, and processor time, memory and open files of this process."""

    def __init__(self, read: Callable[[], Iterable[Part]] = _of_this_process) -> None:
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(Collector(read))
        prometheus_client.ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The text, and its content type. accept: the header of the request, by which one of two formats is chosen."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
