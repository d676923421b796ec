"""Which staging place belongs to a log of this process."""

from __future__ import annotations

from pxrs.log.contract import Log
from pxrs.publishing.staging.contract import HasStaging, StagingStore
from pxrs.publishing.staging.directory import DirectoryStaging


def staging_of(log: Log) -> StagingStore | None:
    """Where rows for this log are staged; None if it has no such place: it is in no directory, and in no cluster."""
    if isinstance(log, HasStaging):
        return log.staging
    return None if log.folder is None else DirectoryStaging(str(log.folder))
