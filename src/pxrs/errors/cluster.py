"""Errors of the cluster: brokers, storage nodes, and the copies of ledgers."""

from __future__ import annotations

from pxrs.errors.general import InvalidArgument, PxrsError
from pxrs.errors.log import AppendFailed, ReadFailed


class ClusterError(PxrsError):
    """The base of the errors of brokers and storage nodes."""

    code = "cluster"


class NodeUnreachable(ClusterError):
    """A storage node did not answer, or refused the request. A broker continues with the other nodes and replaces this
    one; check the node if it does not come back."""

    code = "cluster.node-unreachable"

    def __init__(self, node: str, why: str) -> None:
        self.node, self.why = node, why
        super().__init__(f"storage node {node}: {why}")


class WrongNode(NodeUnreachable):
    """Another storage node answers at the address: the expected node has moved, or was started with an empty or older
    disk and is now a new node. Nothing was stored or read. `found` is the node that answers."""

    code = "cluster.wrong-node"

    def __init__(self, node: str, found: str) -> None:
        self.found = found
        super().__init__(node, f"another node, {found}, answers at its address")


class NodeFull(NodeUnreachable):
    """The storage node accepts no more entries, because its disk is full or failed. Nothing was stored on it. Free
    space on the node, or add another node."""

    code = "cluster.node-full"


class LedgerRemoved(NodeUnreachable):
    """The storage node has removed this ledger as garbage, or may have lost a part of it with its disk, and accepts no
    more entries from the ledger's writer. The writer replaces the node in this ledger, as after any failure of the
    node, and ignores the node's earlier acknowledgements."""

    code = "cluster.ledger-removed"

    def __init__(self, node: str, ledger: str) -> None:
        self.ledger = ledger
        super().__init__(node, f"it has removed ledger {ledger}, or may have lost a part of it")


class LedgerFenced(ClusterError):
    """Another broker is recovering this ledger or has recovered it, so the node refuses entries with the recovery
    number of the caller. A writer stops at once. This error never means that the node has failed (C1). `recovery` is
    the recovery number that fences the ledger."""

    code = "cluster.ledger-fenced"

    def __init__(self, ledger: str, recovery: int) -> None:
        self.ledger, self.recovery = ledger, recovery
        super().__init__(f"ledger {ledger} is fenced by recovery {recovery}: another broker has taken the partition")


class EntryDiffers(ClusterError):
    """A storage node already has a different entry with this number in this ledger. Nothing was stored. This points to
    a damaged disk or a bug: report it, with the ledger and the entry."""

    code = "cluster.entry-differs"

    def __init__(self, ledger: str, entry: int) -> None:
        self.ledger, self.entry = ledger, entry
        super().__init__(f"entry {entry} of ledger {ledger} is already stored with different bytes")


class LedgerDamaged(ClusterError, ReadFailed):
    """Acknowledged entries cannot be read from any of their storage nodes. Nothing is skipped. Bring the nodes back; if
    they will never return, docs/cluster.md says how to continue without them."""

    code = "cluster.ledger-damaged"

    def __init__(self, ledger: str, entry: int, why: str) -> None:
        self.ledger, self.entry, self.why = ledger, entry, why
        super().__init__(f"entry {entry} of ledger {ledger}: {why}")


class PartitionUnavailable(ClusterError, AppendFailed, ReadFailed):
    """No broker can serve the partition at the moment: it is being recovered, or too few storage nodes answer. Nothing
    was stored. Try again; `why` gives the reason."""

    code = "cluster.partition-unavailable"

    def __init__(self, place: str, why: str) -> None:
        self.place, self.why = place, why
        super().__init__(f"{place} is not available: {why}; try again")


class NotEnoughNodes(ClusterError):
    """Too few storage nodes accept entries for an entry to be acknowledged. Start more storage nodes, or choose smaller
    quorums for a new topic. `needed` nodes of the `ensemble` must accept entries, and only `alive` do."""

    code = "cluster.not-enough-nodes"

    def __init__(self, needed: int, alive: int, ensemble: int) -> None:
        self.needed, self.alive, self.ensemble = needed, alive, ensemble
        super().__init__(
            f"{alive} of {needed} needed storage nodes accept entries ({ensemble} in the ensemble); start more storage "
            "nodes"
        )


class NodeFormatUnsupported(ClusterError, InvalidArgument):
    """A storage node's directory was written by another version of pxrs, in a format that this one does not know.
    Nothing was changed. Start the node with the version that wrote it, or a later one."""

    code = "cluster.node-format-unsupported"

    def __init__(self, directory: str, found: int, supported: int) -> None:
        self.directory, self.found, self.supported = directory, found, supported
        super().__init__(
            f"{directory} has format {found} and this version of pxrs knows formats up to {supported}: start the "
            "storage node with the version of pxrs that wrote the directory, or a later one"
        )


class InvalidPlacement(ClusterError, InvalidArgument):
    """A placement function is unknown, raised an error, or did not return enough distinct nodes out of those that it
    could choose from. The text says which, and what to do."""

    code = "cluster.invalid-placement"
