"""Names and calls with which the tests of permissions ask for decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pxrs.remote import wire
from pxrs.server.auth.decisions import is_permitted
from pxrs.server.auth.permissions import Grants

ORDERS, SECRET_TOPIC = "a" * 31 + "1", "a" * 31 + "2"
MAIL, SECRET_QUEUE, NEW_QUEUE = "b" * 31 + "1", "b" * 31 + "2", "b" * 31 + "3"


class FixedNames:
    """Topics `orders` and `secret`, queues `mail` and `secret`."""

    def once(self) -> FixedNames:
        return self

    def topic(self, id: str) -> str | None:
        return {ORDERS: "orders", SECRET_TOPIC: "secret"}.get(id)

    def queue(self, id: str) -> str | None:
        return {MAIL: "mail", SECRET_QUEUE: "secret"}.get(id)


NAMES = FixedNames()


def may(grants: list[str] | Grants, call: str, **arguments: Any) -> bool:
    found = grants if isinstance(grants, Grants) else Grants.parse(grants)
    return is_permitted(found, NAMES, call, arguments)


def may_commit(
    grants: list[str],
    *,
    expect: Mapping[str, int] = {},
    put: Mapping[str, bytes] = {},
    ephemeral: Mapping[str, bytes] = {},
    delete: list[str] = [],  # noqa: B006 - never changed
) -> bool:
    return may(
        grants,
        "registry.commit",
        expect=dict(expect),
        put={key: wire.text_of(value) for key, value in put.items()},
        ephemeral={key: wire.text_of(value) for key, value in ephemeral.items()},
        delete=delete,
    )
