"""The counts as instruments of OpenTelemetry, where a program has configured a meter provider.

A library uses OpenTelemetry's API and leaves the rest to the program. `pxrs.open` calls `attach`: if the program has
imported `opentelemetry.metrics` by then, the instruments are made there. Nothing is imported otherwise, so a program
without OpenTelemetry pays nothing. Instruments made before a provider is set begin to work when it is set.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from pxrs.metrics.instruments import INSTRUMENTS, Distribution, Gauge, Histogram, Labels
from pxrs.metrics.table import BUCKETS_S, Metric

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, Observation

SCOPE: Final = "pxrs"
_lock: Final = threading.Lock()
_attached: set[int] = set()
"""Ids of the providers that have the instruments: one, unless a test sets another one."""


def attach(provider: Any = None) -> bool:
    """Make the instruments, once for each provider. Returns whether OpenTelemetry is there.

    provider: by default the global one, if the program has imported `opentelemetry.metrics`."""
    api = sys.modules.get("opentelemetry.metrics")
    if api is None:
        return False
    provider = api.get_meter_provider() if provider is None else provider
    with _lock:
        if id(provider) in _attached:
            return True
        _attached.add(id(provider))
    _make(provider.get_meter(SCOPE))
    return True


def _make(meter: Meter) -> None:
    for name, each in INSTRUMENTS.items():
        metric = each.metric
        if isinstance(each, Histogram):
            bounds = list(BUCKETS_S)
            made = meter.create_histogram(name, metric.unit, metric.text, explicit_bucket_boundaries_advisory=bounds)
            each.passed_to = _recorder(metric, made.record)
        elif isinstance(each, Gauge):
            meter.create_observable_gauge(name, [_observer(each)], metric.unit, metric.text)
        else:
            meter.create_observable_counter(name, [_observer(each)], metric.unit, metric.text)


def _attributes(metric: Metric, labels: Labels) -> dict[str, str]:
    return {metric.attribute(label): value for label, value in zip(metric.labels, labels, strict=True)}


def _recorder(metric: Metric, record: Callable[[float, dict[str, str]], None]) -> Callable[[float, Labels], None]:
    return lambda value, labels: record(value, _attributes(metric, labels))


def _observer(each: Any) -> Callable[[Any], Iterable[Observation]]:
    from opentelemetry.metrics import Observation

    def observe(_: Any) -> Iterable[Observation]:
        for labels, value in each.read():
            assert not isinstance(value, Distribution)
            yield Observation(value, _attributes(each.metric, labels))

    return observe
