"""`pxrs backup` and `pxrs restore`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import pxrs
from pxrs import registry as registries
from pxrs.address import is_missing, parse
from pxrs.cli.options import At, Json, RegistryUrl, open_hub, refuse_server
from pxrs.cli.terminal import echo, seconds_field, tell_error
from pxrs.errors import InvalidUrl
from pxrs.model import is_internal
from pxrs.wording import counted, printable

if TYPE_CHECKING:
    from pxrs.backup.making import MadeBackup, Progress, Tell
    from pxrs.backup.manifest import BackupManifest
    from pxrs.backup.restoring import Restored

_BESIDE = "a backup copies the hub's files"


def backup(
    at: At,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The folder of the backup, ideally on another disk.")],
    registry: RegistryUrl = None,
    as_json: Json = False,
) -> None:
    """Make a consistent backup of a hub while it is in use: topics, groups, queues and the state of Spark queries.

    If TARGET holds an earlier backup of the same hub, only new data is copied, and the earlier backup stays valid until
    the new one is complete. To resume an interrupted backup, run the command again. Exit code 1 if a damaged topic was
    skipped.
    """
    from pxrs.backup.making import make_backup

    refuse_server(at, "pxrs backup", _BESIDE)
    with open_hub(at, registry, needs_log=True) as hub, _progress() as tell:
        if hub.log.folder is None:
            raise InvalidUrl(f"{hub.url} has no directory, so there is nothing to back up: give a hub in a directory")
        home = hub.check_registry()
        address = parse(hub.log.folder / "registry" if registry is None else registry)
        store = None if is_missing(address) else hub.registry
        identity = "" if home is None else home.hub
        made = make_backup(hub.log.folder, identity, store, address.shown, Path(target), pxrs.__version__, tell)
        hub.record_audit("backup", target=target, **_counts(made.manifest))
    _print_backup(made, target, as_json)
    if made.manifest.left_out:
        raise typer.Exit(1)


def restore(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The folder of a backup.")],
    at: Annotated[
        str | None, typer.Option("--at", metavar="DIRECTORY", help="The directory of the new hub, empty or missing.")
    ] = None,
    registry: RegistryUrl = None,
    only_verify: Annotated[
        bool, typer.Option("--verify", help="Only verify every byte of the backup; restore nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Restore a backup into an empty directory and an empty registry, which may be of another kind than the original.

    Groups continue from their checkpoints, queues keep their items, and Spark queries continue after their last batch.
    The new hub has an id of its own, so the original may still be running. PXRS_AT has no effect here: --at must name
    the directory.
    """
    from pxrs.backup.restoring import refuse_used, verify
    from pxrs.backup.target import refuse_overlap

    if at is None and not only_verify:
        raise typer.BadParameter("give --at DIRECTORY, or --verify", param_hint="--at")
    if at is not None:
        refuse_server(at, "pxrs restore", "a restore writes the hub's files")
    with _progress() as tell:
        if at is None or only_verify:
            manifest = verify(Path(source), tell)
            _print_verified(manifest, source, as_json)
            return
        directory = parse(at).directory()
        refuse_overlap(directory, Path(source))
        refuse_used(directory)
        restored = _restore(Path(source), directory, registry, tell)
    with open_hub(at, registry, needs_log=True) as hub:
        hub.record_audit("restore", origin=source, **_counts(restored.manifest))
    _print_restored(restored, directory, as_json)


def _restore(source: Path, directory: Path, registry: str | None, tell: Tell) -> Restored:
    from pxrs.backup.restoring import refuse_used, verify
    from pxrs.backup.restoring import restore as restore_backup

    manifest = verify(source, tell)
    refuse_used(directory)  # verifying takes long
    address = parse(directory / "registry" if registry is None else registry)
    if address.scheme in ("memory", "pxrs"):
        raise InvalidUrl(f"{address.text} cannot be the registry of a restored hub: give a directory or a database")
    with registries.open(directory / "registry" if registry is None else registry) as store:
        return restore_backup(source, manifest, directory, store, address.shown, tell)


@contextlib.contextmanager
def _progress() -> Iterator[Tell]:
    """Shows how far the work is, on standard error if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    err = Console(stderr=True)
    with Bar(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def tell(progress: Progress) -> None:
            bar.update(task, description=progress.stage, completed=progress.done_bytes, total=progress.total_bytes)

        yield tell


def _print_backup(made: MadeBackup, target: str, as_json: bool) -> None:
    manifest = made.manifest
    if as_json:
        copied = {"copied_bytes": made.copied_bytes, "kept_bytes": made.kept_bytes}
        typer.echo(json.dumps({**_plain(manifest), "target": target, **copied, "left_out": manifest.left_out}))
        return
    echo(f"{target} holds a backup of {_contents(manifest)}")
    echo(f"copied {made.copied_bytes:,} bytes, {made.kept_bytes:,} were there already; registry: {manifest.moment}")
    for topic, what in manifest.left_out.items():
        tell_error(printable(f"topic {topic} is damaged and was skipped: {what}"))


def _print_verified(manifest: BackupManifest, source: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**_plain(manifest), "source": source, "is_whole": True}))
    else:
        echo(f"{source} is intact: a backup of {_contents(manifest)}")


def _print_restored(restored: Restored, directory: Path, as_json: bool) -> None:
    if as_json:
        found = {"directory": str(directory), "new_hub": restored.hub, "keys": restored.keys}
        typer.echo(json.dumps({**_plain(restored.manifest), **found, "groups_left_out": restored.groups_left_out}))
        return
    echo(f"restored hub {restored.hub[:8]} in {directory} from a backup of {_contents(restored.manifest)}")
    if restored.groups_left_out:
        names = ", ".join(restored.groups_left_out)
        echo(f"skipped groups whose topics are in another hub that shared the registry: {names}")


def _counts(manifest: BackupManifest) -> dict[str, int]:
    """How many topics and messages a backup has, not counting internal topics: the user has sent nothing to those."""
    topics = [topic for topic in manifest.topics if not is_internal(topic.name)]
    messages = sum(partition.end - partition.start for topic in topics for partition in topic.partitions)
    return {"topics": len(topics), "messages": messages}


def _contents(manifest: BackupManifest) -> str:
    found = _counts(manifest)
    parts = counted(found["topics"], "topic"), counted(found["messages"], "message"), counted(manifest.keys, "key")
    return f"{manifest.directory}: {', '.join(parts)}, {counted(manifest.bytes, 'byte')}"


def _plain(manifest: BackupManifest) -> dict[str, Any]:
    return {
        "backup": manifest.id,
        "hub": manifest.hub,
        **seconds_field("begun", manifest.begun_at),
        **seconds_field("ended", manifest.ended_at),
        **_counts(manifest),
        "bytes": manifest.bytes,
        "keys": manifest.keys,
        "registry": manifest.registry,
        "moment": manifest.moment,
    }
