"""Which processes a local cluster consists of, and at which ports they listen. Nothing here does I/O.

The plan is kept as `cluster.json` in the directory of the cluster, so that a second `pxrs cluster up` on the directory
starts the same nodes at the same ports, with their data.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Final

from pxrs.errors import InvalidArgument

FILE: Final = "cluster.json"
FORMAT: Final = 1
ETCD_PORTS: Final = 3
"""etcd listens for clients, for other members, and for questions after its health."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The ports of a local cluster, all on loopback."""

    brokers: tuple[int, ...]
    storage: tuple[int, ...]
    etcd: tuple[int, ...]
    """ETCD_PORTS of them; none if the cluster uses a registry that runs already."""
    registry: str | None = None
    """The address of that registry, without a password; None if the cluster has its own etcd."""

    @property
    def address(self) -> str:
        """For clients: every broker."""
        return "pxrs://" + ",".join(f"127.0.0.1:{port}" for port in self.brokers)

    def dump(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def parse(cls, text: str, where: str) -> Plan:
        """Raises InvalidArgument. where: the file, for the error."""
        try:
            found = json.loads(text)
            if found["format"] != FORMAT:
                raise InvalidArgument(
                    f"{where} was written by another version of pxrs (format {found['format']}): give another --dir"
                )
            brokers, storage, etcd = (
                tuple(int(port) for port in found[name]) for name in ("brokers", "storage", "etcd")
            )
            return cls(brokers, storage, etcd, found["registry"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"{where} is not the plan of a cluster ({error!r}): give another --dir") from error


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asks for. None: as before, or the default."""

    brokers: int | None = None
    storage: int | None = None
    port: int | None = None
    """The port of the first broker; the others follow it."""
    registry: str | None = None
    """The address of a registry that runs already, without a password."""


BROKERS_DEFAULT: Final = 2
STORAGE_DEFAULT: Final = 3


def planned(wish: Wish, before: Plan | None, free_ports: Callable[[int], list[int]]) -> Plan:
    """The plan for a wish. before: the one in the directory. Storage nodes and brokers that were there keep their
    ports; those beyond the wished number are not started, and their data stay. Raises InvalidArgument."""
    if before is not None and before.registry != wish.registry:
        had = "an etcd of its own" if before.registry is None else before.registry
        given = "no --registry was given" if wish.registry is None else f"--registry is {wish.registry}"
        raise InvalidArgument(
            f"the cluster in this directory uses {had} as its registry, but {given}: give another --dir"
        )
    old = before or Plan((), (), (), wish.registry)
    count = wish.brokers or len(old.brokers) or BROKERS_DEFAULT
    if wish.port is not None:
        if wish.port + count > 65_536:
            raise InvalidArgument(
                f"--port {wish.port}: {count} brokers need ports up to {wish.port + count - 1}; give a lower one"
            )
        brokers = tuple(range(wish.port, wish.port + count))
    else:
        brokers = _extended(old.brokers, count, free_ports)
    storage = _extended(old.storage, wish.storage or len(old.storage) or STORAGE_DEFAULT, free_ports)
    etcd = () if wish.registry is not None else _extended(old.etcd, ETCD_PORTS, free_ports)
    return replace(old, brokers=brokers, storage=storage, etcd=etcd)


def _extended(ports: tuple[int, ...], count: int, free_ports: Callable[[int], list[int]]) -> tuple[int, ...]:
    return (*ports[:count], *free_ports(max(0, count - len(ports))))


def remembered(plan: Plan, before: Plan | None) -> Plan:
    """The plan to be kept: with the ports of storage nodes that are not started this time."""
    if before is None:
        return plan
    return replace(plan, storage=plan.storage + before.storage[len(plan.storage) :])
