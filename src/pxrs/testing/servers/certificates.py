"""Certificates for servers on loopback, and for their clients."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from pxrs.launching import HOST


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files of one authority, of a server at 127.0.0.1 and localhost, and of a client named pxrs."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path

    def client_context(self) -> ssl.SSLContext:
        """Return a context that trusts the authority and presents the client's certificate."""
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_cert_chain(self.client_cert, self.client_key)
        return context


def certificates(directory: Path) -> Certificates:
    """Write a new authority with a server and a client certificate into `directory`."""
    import trustme

    authority = trustme.CA()
    server = authority.issue_cert(HOST, "localhost")
    client = authority.issue_cert("pxrs@localhost", common_name="pxrs")
    ca = directory / "ca.pem"
    ca.write_bytes(authority.cert_pem.bytes())
    pairs = []
    for name, leaf in (("server", server), ("client", client)):
        cert, key = directory / f"{name}.pem", directory / f"{name}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        key.touch(mode=0o600)  # libpq refuses a key that others may read
        key.write_bytes(_pkcs8(leaf.private_key_pem.bytes()))
        pairs += [cert, key]
    return Certificates(ca, *pairs)


def _pkcs8(key_pem: bytes) -> bytes:
    """Rewrite a key as PKCS 8: the only form that ZooKeeper reads, and one that all the others do."""
    from cryptography.hazmat.primitives import serialization as s

    key = s.load_pem_private_key(key_pem, password=None)
    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
