"""`pxrs new`: which names it takes, what it writes and prints, and that nothing is left when it fails.

`tests/acceptance/test_new_project.py` runs the commands of the projects."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

import pxrs
from pxrs.cli.new import command
from pxrs.testing.command import Call, Result, run_here

KINDS = pytest.mark.parametrize("options", [(), ("--queue",)], ids=["topic", "queue"])


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """A command in this process, in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Result:
        return run_here(monkeypatch, capfd, arguments).unwrapped()

    return call


def texts(folder: Path) -> Iterator[tuple[str, str]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield str(path.relative_to(folder)), path.read_text()


@KINDS
def test_a_project_has_a_handler_its_tests_and_what_it_needs(
    call: Call, tmp_path: Path, options: tuple[str, ...]
) -> None:
    assert call("new", "my-shop", *options).code == 0
    project = dict(texts(tmp_path / "my-shop"))
    assert project.keys() == {
        *(".gitignore", "README.md", "pyproject.toml", "requirements.txt"),
        *("my_shop/__init__.py", "my_shop/handlers.py", "tests/test_handlers.py"),
    }
    assert "from my_shop.handlers import handle" in project["tests/test_handlers.py"]
    assert "pxrs worker my_shop.handlers:handle " in project["README.md"]
    assert [path.name for path in tmp_path.iterdir()] == ["my-shop"]


@KINDS
def test_no_placeholder_is_left_in_a_project(call: Call, tmp_path: Path, options: tuple[str, ...]) -> None:
    call("new", "shop", *options)
    assert [name for name, text in texts(tmp_path / "shop") if "{{" in text or "}}" in text] == []


@KINDS
def test_what_to_type_next_is_what_the_readme_says(call: Call, tmp_path: Path, options: tuple[str, ...]) -> None:
    printed = call("new", "shop", *options).out.splitlines()
    readme = (tmp_path / "shop" / "README.md").read_text().splitlines()
    commands = [line.removeprefix("$ ") for line in readme if line.startswith("$ ")]
    assert [line.strip() for line in printed if line.startswith("  ")] == ["cd shop", *commands]
    assert len(commands) >= 7


def test_the_folder_of_a_project_has_the_permissions_of_any_new_folder(call: Call, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        call("new", "shop")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "shop").stat().st_mode) == 0o750


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "a letter first"),
        ("2shop", "a letter first"),
        ("_shop", "a letter first"),
        ("shop-", "a letter or digit last"),
        ("my shop", "use up to 50 letters"),
        ("my.shop", "use up to 50 letters"),
        ("../shop", "use up to 50 letters"),
        ("größe", "use up to 50 letters"),
        ("s" * 51, "use up to 50 letters"),
        ("class", "a keyword of Python"),
        ("json", "a module of Python's standard library"),
        ("tests", "the project's own folder of tests"),
        ("pxrs", "is installed already, in "),
        ("pyarrow", "is installed already, in "),
    ],
)
def test_a_name_that_cannot_be_imported_or_hides_a_module_is_refused(
    call: Call, tmp_path: Path, name: str, says: str
) -> None:
    found = call("new", name)
    assert found.code == 2
    assert says in found.errors.replace("│ ", "")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_is_left_as_it_is(call: Call, tmp_path: Path) -> None:
    mine = tmp_path / "shop" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    found = call("new", "shop")
    assert found.code == 1
    assert found.errors.startswith("shop exists already and is not an empty folder: choose another name, or remove it")
    assert dict(texts(tmp_path)) == {"shop/mine.txt": "mine"}


@pytest.mark.parametrize("kind", ["file", "link to an empty folder"])
def test_what_is_no_folder_is_left_as_it_is(call: Call, tmp_path: Path, kind: str) -> None:
    place, other = tmp_path / "shop", tmp_path / "other"
    other.mkdir()
    place.write_text("mine") if kind == "file" else place.symlink_to(other)
    assert call("new", "shop").code == 1
    assert list(other.iterdir()) == []
    assert place.is_file() or place.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"shop", "other"}


def test_an_empty_folder_is_filled(call: Call, tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    assert call("new", "shop").code == 0
    assert (tmp_path / "shop" / "shop" / "handlers.py").is_file()


def test_nothing_is_left_when_a_file_cannot_be_written(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def fail_at_the_last(path: Path, *arguments: object, **options: object) -> int:
        if path.name == "test_handlers.py":
            raise OSError(28, "No space left on device", str(path))
        return write(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", fail_at_the_last)
    found = call("new", "shop")
    assert (found.code, "No space left on device" in found.errors) == (1, True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_put_there_meanwhile_stays_and_nothing_else_is_left(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def late(path: Path, target: Path) -> Path:
        target.mkdir()
        (target / "mine.txt").write_text("mine")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    assert call("new", "shop").code == 1
    assert dict(texts(tmp_path)) == {"shop/mine.txt": "mine"}


CHECKOUT = "file:///home/ann/pxrs"
WHEEL = "file:///home/ann/pxrs/dist/pxrs-0.2.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("recorded", "line"),
    [
        ({"url": WHEEL, "archive_info": {}}, f"pxrs @ {WHEEL}"),
        ({"url": CHECKOUT, "dir_info": {}}, f"pxrs @ {CHECKOUT}"),
        ({"url": CHECKOUT, "dir_info": {"editable": True}}, f"--editable {CHECKOUT}"),
        (
            {"url": "https://example.org/pxrs.git", "vcs_info": {"vcs": "git", "commit_id": "0a1b2c"}},
            "pxrs @ git+https://example.org/pxrs.git@0a1b2c",
        ),
        (None, f"pxrs=={pxrs.__version__}"),
    ],
    ids=["wheel", "checkout", "editable", "git", "index"],
)
def test_pxrs_is_required_from_where_it_was_installed(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: dict[str, object] | None, line: str
) -> None:
    text = None if recorded is None else json.dumps(recorded)
    monkeypatch.setattr(command, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    call("new", "shop")
    required = (tmp_path / "shop" / "requirements.txt").read_text().splitlines()
    assert [each for each in required if not each.startswith("#")] == [line, "pytest>=8"]


def test_pxrs_that_is_not_installed_is_required_from_its_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(command, "distribution", missing)
    assert command.requirement() == f"pxrs @ {Path(pxrs.__file__).parents[2].as_uri()}"
