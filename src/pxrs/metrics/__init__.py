"""Metrics: what producers, consumers, queues, upkeep, the server and Spark queries count, and how it is exported.

    table.py          every metric: name, kind, unit, labels (docs/metrics.md)
    instruments.py    the counts of this process, which other packages add to
    prometheus.py     the counts in the format of Prometheus, through `prometheus-client`
    otel.py           the counts as instruments of OpenTelemetry, where a program has configured that
    reports.py        the counts of a worker process, sent to its supervisor
    endpoint.py       /metrics, /healthz and /readyz over HTTP; health.py: what the last two answer

A program with an endpoint of its own adds the counts of pxrs to it:

    prometheus_client.REGISTRY.register(pxrs.metrics.collector())

A program without one has `with pxrs.metrics.serve("127.0.0.1:9464"):`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pxrs.metrics.table import TABLE, Metric

if TYPE_CHECKING:
    from pxrs.metrics.endpoint import Endpoint
    from pxrs.metrics.prometheus import Collector

__all__ = ["TABLE", "Metric", "collector", "serve"]


def collector() -> Collector:
    """The counts of this process as a collector of `prometheus_client`. Raises MissingDependency."""
    from pxrs.metrics.prometheus import Collector

    return Collector()


def serve(listen: str) -> Endpoint:
    """An HTTP endpoint with the counts of this process, started. Close it, or use it in a `with` block.

    listen: HOST:PORT, or a port on 127.0.0.1; port 0 chooses a free one, see `Endpoint.address`. Raises
            MissingDependency if `prometheus-client` is not installed, and InvalidArgument."""
    from pxrs.metrics.endpoint import Endpoint
    from pxrs.metrics.prometheus import Exposition

    return Endpoint(listen, Exposition().render).start()
