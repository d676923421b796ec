"""Why a first connection failed, if TLS is the reason: what gRPC says of that is hard to understand, or nothing at all.

| client | server | what gRPC reports | what is raised |
|---|---|---|---|
| trusts another authority | TLS | CERTIFICATE_VERIFY_FAILED | InvalidUrl |
| has another name for the server than its certificate | TLS | Hostname Verification Check failed | InvalidUrl |
| TLS | no TLS | WRONG_VERSION_NUMBER | InvalidUrl |
| no TLS | TLS | Socket closed | InvalidUrl |
| no certificate, or one of another authority | wants one | Socket closed | Unauthenticated |

"Socket closed" may also come from a server that has just ended. So then another connection is made, which speaks TLS
and nothing else, to see what is there.
"""

from __future__ import annotations

import re
import socket
import ssl
from enum import Enum
from typing import Final

from pxrs.errors import InvalidUrl, PxrsError, Unauthenticated
from pxrs.remote.client.settings import Settings

PROBE_S_MAX: Final = 2.0
_UNTRUSTED: Final = re.compile(r"CERTIFICATE_VERIFY_FAILED:? ?([^()]*?)(?:: OK)?(?: \([A-Z]+\))?$|(Hostname Verif.*)\.")
"""In what gRPC says of a certificate that it does not trust; one of its groups is the reason."""


class _Found(Enum):
    """What a handshake without a certificate of the client has met."""

    TLS = "TLS"
    WANTS_CERTIFICATE = "TLS, and the server has then closed the connection"
    UNKNOWN = "anything else"


def refusal(why: str, target: str, settings: Settings) -> PxrsError | None:
    """The error to raise instead of trying again; None if TLS is not the reason, or it is not known to be.

    why: what gRPC said of the failed connection to `target`"""
    if settings.certificates is not None:
        if (untrusted := _UNTRUSTED.search(why)) is not None:
            reason = untrusted[1] or untrusted[2]
            return InvalidUrl(
                f"{settings.shown}: the certificate of the server {target} is not trusted: {reason}. It must be issued "
                "for this host name, by an authority that this client trusts: pass its certificate as ca_file=FILE"
            )
        if "WRONG_VERSION_NUMBER" in why:
            return InvalidUrl(
                f"{settings.shown}: the server {target} does not use TLS: start it with --tls-cert and --tls-key, or "
                "remove tls, ca_file, cert_file and key_file from the address"
            )
    if "Socket closed" not in why:
        return None
    found = _probe(target)
    if settings.certificates is None:
        if found is _Found.UNKNOWN:
            return None
        return InvalidUrl(
            f"{settings.shown}: the server {target} uses TLS, but the address does not: add ?tls=true, or "
            "?ca_file=FILE with the certificate of its authority"
        )
    if found is not _Found.WANTS_CERTIFICATE:
        return None
    told = "requires a client certificate"
    if settings.certificates.cert is not None:
        told = "rejected the certificate of this client"
    return Unauthenticated(
        f"{settings.shown}: the server {target} {told}: pass one issued by the authority of its --tls-client-ca, as "
        "cert_file=FILE and key_file=FILE"
    )


def _probe(target: str) -> _Found:
    host, _, port = target.rpartition(":")
    host = host.strip("[]")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent over this connection
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), PROBE_S_MAX) as raw,
            context.wrap_socket(raw, server_hostname=host) as secured,
        ):
            secured.settimeout(PROBE_S_MAX)
            try:
                return _Found.TLS if secured.recv(1) else _Found.WANTS_CERTIFICATE
            except TimeoutError:
                return _Found.TLS
            except ssl.SSLError:  # the alert "certificate required"
                return _Found.WANTS_CERTIFICATE
    except OSError:
        return _Found.UNKNOWN
