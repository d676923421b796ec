"""The settings of queues on the command line: their options, how they are shown, and `pxrs queue alter`."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

import pxrs
from pxrs.cli.amounts import duration
from pxrs.cli.dead_letters import Name
from pxrs.cli.options import Json, MaybeAt, RegistryUrl, open_hub
from pxrs.cli.terminal import seconds_field
from pxrs.queue.handle import QueueHandle
from pxrs.queue.policy import Backoff, Policy
from pxrs.queue.policy import dump as plain_setting

POLICY_HELP: Final = "How often an item may be delivered."
Times = Annotated[int | None, typer.Option(help="With --policy consume-times: then it is a dead letter.")]
Pause = Annotated[
    float | None, typer.Option(metavar="DURATION", parser=duration(), help="With --backoff fixed: how long.")
]
First = Annotated[
    float | None,
    typer.Option(metavar="DURATION", parser=duration(), help="With --backoff exponential: how long the first time."),
]
Factor = Annotated[float | None, typer.Option(help="With --backoff exponential: so much longer each time.")]
Cap = Annotated[
    float | None,
    typer.Option(metavar="DURATION", parser=duration(), help="With --backoff exponential: never longer than this."),
]
Jitter = Annotated[
    float | None, typer.Option(help="With --backoff exponential: up to this part of it shorter or longer, at random.")
]


class PolicyName(StrEnum):
    AT_LEAST_ONCE = "at-least-once"
    CONSUME_ONCE = "consume-once"
    CONSUME_TIMES = "consume-times"


class BackoffName(StrEnum):
    FIXED = "fixed"
    EXPONENTIAL = "exponential"


def alter(
    queue: Name,
    at: MaybeAt = None,
    policy: Annotated[PolicyName | None, typer.Option(help=POLICY_HELP)] = None,
    times: Times = None,
    backoff: Annotated[BackoffName | None, typer.Option(help="How long an item waits that came back.")] = None,
    no_backoff: Annotated[bool, typer.Option("--no-backoff", help="An item that came back does not wait.")] = False,
    pause: Pause = None,
    first: First = None,
    factor: Factor = None,
    cap: Cap = None,
    jitter: Jitter = None,
    registry: RegistryUrl = None,
    as_json: Json = False,
) -> None:
    """Change the policy or the backoff of a queue. Whether it is FIFO is fixed.

    Every process uses the change for the items that it takes a second later or more. What was delivered of an item
    counts as before."""
    changes: pxrs.QueueChanges = {}
    if policy is not None or times is not None:
        changes["policy"] = policy_of(PolicyName.CONSUME_TIMES if policy is None else policy, times)
    wait = backoff_of(backoff, {"pause": pause, "first": first, "factor": factor, "cap": cap, "jitter": jitter})
    if wait is not None and no_backoff:
        raise typer.BadParameter("--backoff and --no-backoff exclude each other")
    if wait is not None or no_backoff:
        changes["backoff"] = wait
    if not changes:
        raise typer.BadParameter("give what to change: --policy, --times, --backoff or --no-backoff")
    with open_hub(at, registry) as hub:
        handle = hub.alter_queue(queue, **changes)
    if as_json:
        typer.echo(json.dumps(plain_settings(handle)))
        return
    wait_text = "none" if handle.backoff is None else words(handle.backoff)
    typer.echo(f"queue {queue} has policy {words(handle.policy)} and backoff {wait_text} now")


def policy_of(name: PolicyName, times: int | None) -> Policy:
    if (name is PolicyName.CONSUME_TIMES) != (times is not None):
        raise typer.BadParameter("--policy consume-times and --times K go together")
    if times is not None:
        return pxrs.ConsumeTimes(times)
    return pxrs.ConsumeOnce() if name is PolicyName.CONSUME_ONCE else pxrs.AtLeastOnce()


def backoff_of(name: BackoffName | None, options: dict[str, float | None]) -> Backoff | None:
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        kind = BackoffName.FIXED if option == "pause" else BackoffName.EXPONENTIAL
        if kind is not name:
            raise typer.BadParameter(f"--{option} goes with --backoff {kind}")
    if name is None:
        return None
    if name is BackoffName.EXPONENTIAL:
        return pxrs.ExponentialBackoff(**given)
    if not given:
        raise typer.BadParameter("--backoff fixed needs --pause DURATION")
    return pxrs.FixedBackoff(**given)


def plain_settings(handle: QueueHandle) -> dict[str, Any]:
    return {
        "queue": handle.name,
        "id": handle.settings.id,
        "policy": plain_setting(handle.policy),
        "fifo": handle.is_fifo,
        "backoff": None if handle.backoff is None else plain_setting(handle.backoff),
        **seconds_field("created", handle.settings.created),
    }


def words(setting: Policy | Backoff) -> str:
    found = plain_setting(setting)
    kind = found.pop("kind")
    return f"{kind} ({', '.join(f'{key} {value:g}' for key, value in found.items())})" if found else str(kind)
