"""`pxrs check`: reads a log and reports what is wrong with it, and with --repair mends what can be mended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

import pxrs
from pxrs.cli.options import Json, Yes, confirm, refuse_server
from pxrs.cli.terminal import echo, tell_error
from pxrs.errors import PxrsError
from pxrs.model import is_internal
from pxrs.registry.address import parse
from pxrs.wording import counted, printable

if TYPE_CHECKING:
    from pxrs.log.directory.check import Finding
    from pxrs.log.directory.repair import Step

AUDITED_MAX: Final = 100
"""How many repairs of one run are recorded in the topic `_audit`."""


class _Found(NamedTuple):
    findings: list[Finding]
    messages: int
    bytes: int


def check(
    directory: Annotated[
        str, typer.Argument(metavar="DIRECTORY", envvar="PXRS_AT", help="The hub's directory; by default PXRS_AT.")
    ],
    repair: Annotated[
        bool, typer.Option("--repair", help="Say what could be done about the findings, ask, and do it.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Read every byte of a log, and report everything that is damaged, missing or inconsistent. Exit code 1 if anything
    is.

    Without --repair it changes nothing and takes no lock: run it at any time, beside producers and consumers. With
    --repair no byte is thrown away: what is replaced is kept beside its place, under a name that is printed.
    """
    from pxrs.log.directory.repair import plan

    refuse_server(directory, "pxrs check", "a log is checked where its files are")
    folder = parse(directory).directory()
    found = _read(folder)
    if not repair or not found.findings:
        _print(found, as_json)
        if found.findings:
            raise typer.Exit(1)
        return
    steps = plan(folder, found.findings)
    for step in steps:
        _print_step(step, None, as_json)
    possible = [step for step in steps if step.is_possible]
    if possible:
        lost = sum(step.lost for step in possible)
        confirm(f"Do {counted(len(possible), 'repair')}? {counted(lost, 'offset')} will have no messages.", yes)
        _audit(directory, _perform(possible, as_json))
        found = _read(folder)
    _print(found, as_json)
    if found.findings:
        raise typer.Exit(1)


def _read(directory: Path) -> _Found:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from pxrs.log.directory.check import check as check_log

    findings: list[Finding] = []
    messages = size = 0
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    err = Console(stderr=True)
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        for checked in check_log(directory):
            findings += checked.findings
            if not is_internal(checked.topic):  # those are checked too, and not counted: the user has sent none of them
                messages, size = messages + checked.messages, size + checked.bytes
            bar.update(task, description=f"{checked.topic}: {counted(messages, 'message')}")
    return _Found(findings, messages, size)


def _print(found: _Found, as_json: bool) -> None:
    if as_json:
        for finding in found.findings:
            typer.echo(json.dumps(finding._asdict()))
        typer.echo(json.dumps({"messages": found.messages, "bytes": found.bytes, "findings": len(found.findings)}))
        return
    for finding in found.findings:
        echo(printable(f"{finding.file} at byte {finding.position:,}: {finding.what}"))
    totals = counted(found.messages, "message"), counted(found.bytes, "byte"), counted(len(found.findings), "finding")
    typer.echo(", ".join(totals))


def _print_step(step: Step, done: str | None, as_json: bool) -> None:
    """done: what was done; None while it is only planned."""
    if as_json:
        about = {"action": step.action, "lost_offsets": step.lost, "is_possible": step.is_possible, "done": done}
        typer.echo(json.dumps({**step.finding._asdict(), **about}))
        return
    if done is None:
        echo(printable(f"{step.finding.file} at byte {step.finding.position:,}: {step.finding.what}"))
    echo(printable(f"  {'plan' if done is None else 'done'}: {step.action if done is None else done}"))


def _perform(steps: list[Step], as_json: bool) -> list[tuple[Finding, str]]:
    """Do all that can be done: a step that fails keeps none of the others from being done. Returns what was done."""
    done = []
    for step in steps:
        try:
            done.append((step.finding, step.perform()))
        except (PxrsError, OSError) as error:
            tell_error(f"{step.finding.file} was not repaired: {error}", type(error).__name__)
        else:
            _print_step(step, done[-1][1], as_json)
    return done


def _audit(directory: str, done: list[tuple[Finding, str]]) -> None:
    with pxrs.open(directory, upkeep=False) as hub:
        for finding, what in done[:AUDITED_MAX]:
            hub.record_audit("repair", what=what, topic=finding.topic, partition=finding.partition)
