"""`pxrs upkeep`: does the upkeep of a hub if elected, or for a single round, or shows which process is the janitor."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pxrs.cli.command import Group
from pxrs.cli.exits import exit_codes
from pxrs.cli.monitoring import MetricsListen, monitored, refuse_metrics
from pxrs.cli.options import AskedAt, At, Json, RegistryUrl, open_hub, refuse_server
from pxrs.cli.terminal import echo, seconds_field, tell_error
from pxrs.metrics.health import Beat, Readiness, Verdict
from pxrs.waiting import SignalEvent
from pxrs.wording import counted, microseconds, printable, rfc3339

if TYPE_CHECKING:
    from pxrs.hub import Hub
    from pxrs.upkeep.janitor import UpkeepStatus
    from pxrs.upkeep.records import RoundReport

app = typer.Typer(cls=Group)  # it has options of its own
_LOOK_S: Final = 1.0
"""How often the running process checks whether there is something new to print."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@app.callback(invoke_without_command=True)
@exit_codes()
def run(
    context: typer.Context,
    at: AskedAt = None,
    registry: RegistryUrl = None,
    once: Annotated[bool, typer.Option("--once", help="Do one round now, whoever is the janitor, and end.")] = False,
    metrics_listen: MetricsListen = None,
    as_json: Json = False,
) -> None:
    """Do the upkeep of a hub until Ctrl-C or SIGTERM: retention, and removing what deleted topics and queries have
    left.

    Every process with a producer or consumer of a topic with a retention may be elected as the janitor. This command is
    for hubs whose processes take no part in that (pxrs.open(..., upkeep=False)), or where no process runs for long.
    Several may run: one is elected. With --once the exit code is 1 if something failed.
    """
    if context.invoked_subcommand is not None:
        return
    if at is None:
        raise typer.BadParameter("give --at DIRECTORY or PXRS_AT", param_hint="--at")
    if once:
        refuse_metrics(context, "--once ends by itself; --metrics-listen is for upkeep that goes on")
    refuse_server(
        at, "pxrs upkeep", "the server does the upkeep of its hub, and no client may; `pxrs upkeep status` shows it"
    )
    with open_hub(at, registry, needs_log=True, may_be_missing=not once) as hub:
        if once:
            report = hub.run_upkeep()
            _print_round(report, as_json)
            if report.errors:
                raise typer.Exit(1)
            return
        _serve(hub, as_json, metrics_listen)


@app.command()
def status(at: At, registry: RegistryUrl = None, as_json: Json = False) -> None:
    """Show which process does the upkeep of a hub, since when, and the result of the last round."""
    with open_hub(at, registry, needs_log=True) as hub:
        found = hub.upkeep()
    if as_json:
        typer.echo(json.dumps(_plain(found)))
        return
    echo(f"janitor     {found.janitor or 'none now'}")
    if found.since is not None:
        echo(f"since       {_time(found.since)}")
    if found.reason:
        echo(printable(f"problem     {found.reason}"))
    last = found.last_round
    echo(f"last round  {'none is known' if last is None else f'{_time(last.ended_at)}, took {last.took_s:g} s'}")
    for subject, error in found.errors.items():
        echo(printable(f"failed      {subject}: {error}"))


def _serve(hub: Hub, as_json: bool, metrics_listen: str | None) -> None:
    """Run until a signal comes."""
    stop = SignalEvent()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in _SIGNALS}
    beat, ready = Beat("the loop of the command"), Readiness("waiting for the registry: no janitor is known yet")

    def tell(text: str) -> None:
        echo(json.dumps({"metrics": text}) if as_json else text)

    try:
        with monitored(metrics_listen, live=beat.verdict, ready=ready.verdict, tell=tell):
            _follow(hub, as_json, stop, beat, ready)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(hub: Hub, as_json: bool, stop: SignalEvent, beat: Beat, ready: Readiness) -> None:
    """Print each change of the role, and each round that removed something or failed."""
    hub.start_upkeep()
    shown: tuple[str, str] | None = None
    told: RoundReport | None = None
    is_over = False
    while not is_over:
        is_over = stop.wait(_LOOK_S)
        found = hub.upkeep()
        beat.beat()
        ready.set(_readiness(found))
        if (found.role, found.janitor) != shown and found.role != "idle":
            shown = found.role, found.janitor
            echo(json.dumps(_plain(found)) if as_json else _role_text(found))
        last = found.last_round
        if found.role != "candidate" and last is not None and last != told and (last.removed or last.errors):
            told = last
            _print_round(last, as_json)


def _readiness(found: UpkeepStatus) -> Verdict:
    """Ready if this process does the upkeep, as far as it may, or another one that is alive; not during an outage."""
    is_done = found.role in ("elected", "sole", "apart") or (found.role == "candidate" and bool(found.janitor))
    is_done = is_done and not found.is_held_up
    reason = "" if is_done else f"its role is {found.role}{f': {found.reason}' if found.reason else ''}"
    return Verdict(is_done, reason, {"role": found.role, "janitor": found.janitor or None})


def _role_text(found: UpkeepStatus) -> str:
    if found.role == "candidate":
        return f"candidate: the janitor is {found.janitor or 'not known'}"
    return printable(f"{found.role}{f': {found.reason}' if found.reason else ''}")


def _print_round(report: RoundReport, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_plain_round(report)))
        return
    for topic, starts in report.removed.items():
        places = ", ".join(f"{partition} begins at {start}" for partition, start in starts.items())
        echo(f"{topic}: removed messages; partition {places}")
    for subject, error in report.errors.items():
        tell_error(f"{subject} failed: {error}")
    if not report.errors:
        topics = counted(len(report.removed), "topic")
        echo(f"{_time(report.ended_at)} a round took {report.took_s:g} s and removed messages of {topics}")


def _plain(found: UpkeepStatus) -> dict[str, Any]:
    last = None if found.last_round is None else _plain_round(found.last_round)
    names = {"role": found.role, "janitor": found.janitor or None, "problem": found.reason or None}
    return {**names, **seconds_field("since", found.since), "last_round": last}


def _plain_round(report: RoundReport) -> dict[str, Any]:
    ended = seconds_field("ended", report.ended_at)
    return {**ended, "took_s": report.took_s, "removed": report.removed, "errors": report.errors}


def _time(seconds: float) -> str:
    time_us = microseconds(seconds)
    return (None if time_us is None else rfc3339(time_us)) or f"{seconds:g} s after 1970"
