"""Draws a chart of the run: rates, lag, and the owners of partitions. Needs matplotlib, which is imported only here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

from pxrs.cli.demo.samples import Mark, Sample, Span, rate, tenures
from pxrs.errors import MissingDependency

# Colours that colour-blind people can distinguish.
SENT, HANDLED, READ = "#7f7f7f", "#0072b2", "#d55e00"
OWNERS: Final = ("#56b4e9", "#009e73", "#e69f00")
_INK, _FAINT = "#333333", "#dddddd"
_WIDTH_S: Final = 1.0
_BATCH_WIDTH_S: Final = 3.0
"""Seconds over which the rate of Spark is averaged, because Spark writes a checkpoint only once for each batch."""


def draw(
    path: Path,
    title: str,
    subtitle: str,
    samples: Sequence[Sample],
    marks: Sequence[Mark],
    spans: Sequence[Span] = (),
) -> None:
    """Save the chart. Raises MissingDependency."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency.of_extra("the chart", "matplotlib", "demo") from error
    figure = Figure(figsize=(11, 8), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    speeds, lags, owners = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 3.4))
    _speeds(speeds, samples)
    _lags(lags, samples)
    _owners(owners, samples)
    for span in spans:
        style = {"facecolor": "none", "edgecolor": _INK, "alpha": 0.35, "hatch": "///", "linewidth": 0}
        owners.axvspan(span.begin_s, span.end_s, label=span.text, **style)
    for axes in (speeds, lags, owners):
        _dress(axes, marks, {span.text for span in spans})
    _name_marks(speeds, marks)
    owners.set_xlabel("seconds since the workers were started")
    owners.set_xlim(samples[0].at_s, samples[-1].at_s)
    figure.suptitle(f"{title}\n", fontsize=15, fontweight="bold", color=_INK)
    figure.text(0.5, 0.947, subtitle, ha="center", fontsize=10, color="#555555")
    figure.savefig(path, format="png")


def _speeds(axes: Any, samples: Sequence[Sample]) -> None:
    times = [sample.at_s for sample in samples]
    at, values = rate(times, [sample.sent for sample in samples], _WIDTH_S)
    axes.fill_between(at, values, color=SENT, alpha=0.18, linewidth=0)
    axes.plot(at, values, color=SENT, linewidth=1.4, label="sent by the producers")
    at, values = rate(times, [sample.handled for sample in samples], _WIDTH_S)
    axes.plot(at, values, color=HANDLED, linewidth=1.8, label="handled by the workers")
    if samples[-1].read is not None:
        at, values = rate(times, [sample.read or 0 for sample in samples], _BATCH_WIDTH_S)
        label = f"read by Spark (mean of {_BATCH_WIDTH_S:g} s)"
        axes.plot(at, values, color=READ, linewidth=1.8, label=label)
    axes.set_ylabel("messages per second")
    # Spark first reads what was sent while it started. That peak would make the rest of the chart flat, so it is cut.
    top = 2.2 * max(value for line in axes.lines[:2] for value in line.get_ydata())
    peak = max(values)
    if peak > top:
        rises_at = next(when for when, value in zip(at, values, strict=True) if value > top)
        text = f"catches up: {peak:.0f} in a second "
        axes.annotate(text, (rises_at, 0.93 * top), ha="right", va="center", fontsize=9, color=READ)
    axes.set_ylim(0, min(top, 1.08 * max(peak, top / 2.2)))


def _lags(axes: Any, samples: Sequence[Sample]) -> None:
    times = [sample.at_s for sample in samples]
    handled = [sample.sent - sample.handled for sample in samples]
    axes.plot(times, handled, color=HANDLED, linewidth=1.8, label="the workers")
    if samples[-1].read is not None:
        read = [sample.sent - (sample.read or 0) for sample in samples]
        axes.plot(times, read, color=READ, linewidth=1.8, drawstyle="steps-post", label="Spark, its slowest query")
    axes.set_ylabel("lag, in messages")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)


def _owners(axes: Any, samples: Sequence[Sample]) -> None:
    found = tenures(samples)
    names = sorted({tenure.owner for tenure in found})
    for name, colour in zip(names, OWNERS, strict=False):
        its = [tenure for tenure in found if tenure.owner == name]
        axes.barh(
            [tenure.partition for tenure in its],
            [tenure.end_s - tenure.begin_s for tenure in its],
            left=[tenure.begin_s for tenure in its],
            height=0.72,
            color=colour,
            edgecolor="white",
            linewidth=0.8,
            label=name,
        )
    partitions = len(samples[-1].owners)
    axes.set_yticks(range(partitions))
    axes.set_ylim(partitions - 0.4, -0.6)
    axes.set_ylabel("owner of partition")


def _dress(axes: Any, marks: Sequence[Mark], last: Collection[str]) -> None:
    """last: entries of the legend that are no owners."""
    axes.grid(axis="x", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for mark in marks:
        axes.axvline(mark.at_s, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
    # The legend is beside the axes, so that it covers nothing; entries that are no owners come last.
    entries = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda entry: entry[1] in last)
    axes.legend(*zip(*entries, strict=True), loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _name_marks(axes: Any, marks: Sequence[Mark]) -> None:
    """Write the names of the marks above the first panel, on several levels so that they do not overlap."""
    for number, mark in enumerate(marks):
        axes.annotate(
            mark.text,
            (mark.at_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3 + 13 * (number % 2)),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=_INK,
        )
