"""Every public call while the server does not answer ends within its limit."""

from __future__ import annotations

import pytest

from pxrs.copying import copier
from pxrs.errors import ReadFailed, RegistryUnavailable
from pxrs.testing.proxy import Proxy
from tests.integration.server.conftest import Running
from tests.integration.waits import COPY_S, World, check_calls


def test_every_public_call_ends_within_its_limit_while_the_server_does_not_answer(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "RETRY_S_MAX", COPY_S)
    host, _, port = running.address.rpartition(":")
    with Proxy(host, int(port)) as proxy:
        url = f"pxrs://{proxy.host}:{proxy.port}?timeout=1&patience=2"
        ended = check_calls(World(url, None, timeout_s=1.0, patience_s=2.0), proxy.stall, proxy.restore)
    for name, kind, limit in (
        ("TopicHandle.read", ReadFailed, "given up after 2 s (`patience` of the address)"),
        ("Registry.get", RegistryUnavailable, "given up after 1 s (`timeout` of the address)"),
    ):
        error = ended[name]
        assert isinstance(error, kind)
        assert limit in str(error)
        assert "`pxrs ping`" in str(error)
