"""`pxrs token` as people and scripts use it: real processes, real output."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from pxrs.server.auth import tokens
from pxrs.testing import forked


def pxrs(*arguments: str, auth: Path | None = None) -> subprocess.CompletedProcess[str]:
    """auth: the tokens file, as the environment has it."""
    environment = {key: value for key, value in os.environ.items() if key != "PXRS_AUTH"}
    if auth is not None:
        environment["PXRS_AUTH"] = str(auth)
    return forked.run_text("pxrs.cli", arguments, env=environment)


@pytest.fixture
def auth(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def test_create_prints_the_token_alone_and_stores_its_hash(auth: Path) -> None:
    made = pxrs("token", "create", "--auth", str(auth), "--name", "ci", "--allow", "topic:orders=read,write")
    assert made.returncode == 0, made.stderr
    token = made.stdout.removesuffix("\n")
    assert token.startswith("pxrs_")
    assert "\n" not in token
    found = tokens.read(str(auth))[1].find(token)
    assert found is not None
    assert made.stderr == (
        f"{found.id} (ci): this token is shown only now; it permits topic:orders=read, topic:orders=write\n"
    )
    assert token not in auth.read_text()
    assert stat.S_IMODE(auth.stat().st_mode) == 0o600


def test_list_and_revoke_for_people_and_for_machines(auth: Path) -> None:
    for name, *options in (
        ("ci", "--allow", "hub=read", "--expires", "30d"),
        ("worker", "--allow", "queue:mail*=take", "--allow", "group:billing=member", "--certificate", "CN=worker-7"),
    ):
        made = pxrs("token", "create", "--name", name, *options, "--json", auth=auth)
        assert made.returncode == 0, made.stderr
        assert (json.loads(made.stdout)["token"] is None) == (name == "worker")
    rows = [json.loads(line) for line in pxrs("token", "list", "--json", auth=auth).stdout.splitlines()]
    assert [row.keys() for row in rows] == [{"id", "name", "certificate", "created", "expires", "allow"}] * 2
    assert [(row["name"], row["certificate"]) for row in rows] == [("ci", None), ("worker", "CN=worker-7")]
    assert rows[1]["allow"] == ["queue:mail*=take", "group:billing=member"]
    assert rows[0]["expires"] > rows[0]["created"]
    shown = pxrs("token", "list", auth=auth).stdout
    for text in ("worker [CN=worker-7]", "queue:mail*=take group:billing=member", rows[0]["id"]):
        assert text in shown
    assert pxrs("token", "revoke", rows[0]["id"], auth=auth).stdout == f"revoked {rows[0]['id']} (ci)\n"
    revoked = json.loads(pxrs("token", "revoke", "worker", "--json", auth=auth).stdout)
    assert revoked == rows[1]
    assert pxrs("token", "list", "--json", auth=auth).stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("create", "--name", "x", "--allow", "topic:orders=fly"), 2, "choose from describe, read, write, admin"),
        (("create", "--name", "x", "--allow", "orders"), 2, "write KIND:NAME=ACTION"),
        (("create", "--name", "x"), 2, "--allow"),
        (("create", "--allow", "hub=read"), 2, "--name"),
        (("create", "--name", "x", "--allow", "hub=read", "--expires", "tomorrow"), 2, "90s, 5m, 12h, 7d or 2w"),
        (("create", "--name", "x", "--allow", "hub=read", "--expires", "0d"), 2, "is not above 0 and up to 36500d"),
        (("create", "--name", "x", "--allow", "hub=read", "--certificate", "x"), 2, "CN=NAME or SAN=NAME"),
        (("list",), 2, "make it with `pxrs token create`"),
        (("revoke", "x"), 2, "No such file or directory"),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do_and_makes_no_file(
    auth: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = pxrs("token", *arguments, auth=auth)
    assert result.returncode == code
    assert words in " ".join(result.stderr.replace("│", " ").split()), result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not auth.exists()


def test_the_file_must_be_given() -> None:
    result = pxrs("token", "list")
    assert result.returncode == 2
    assert "--auth" in result.stderr


def test_every_command_has_a_help() -> None:
    shown = pxrs("token", "--help").stdout
    for command in ("create", "list", "revoke"):
        assert command in shown
        assert "--auth" in pxrs("token", command, "--help").stdout
