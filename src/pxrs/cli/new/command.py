"""`pxrs new NAME`: write a small working project, with a handler, its tests and the commands that run it.

The files of the project are in `templates/`; `{{name}}`, `{{package}}` and `{{pxrs}}` in them are replaced. The project
is written into a temporary folder beside its place and then renamed: the folder NAME is either complete or not there.
"""

from __future__ import annotations

import json
import keyword
import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

import pxrs

NAME: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_-]{0,48}[A-Za-z0-9])?")
"""What is a name of a Python package with `_` for `-`, of a distribution, and of a consumer group."""
COMMAND: Final = re.compile(r"^\$ (.+)$", re.MULTILINE)
_FILES: Final = {
    ".gitignore": "shared/gitignore",
    "README.md": "{kind}/README.md",
    "pyproject.toml": "shared/pyproject.toml",
    "requirements.txt": "shared/requirements.txt",
    "{package}/__init__.py": "shared/package.py",
    "{package}/handlers.py": "{kind}/handlers.py",
    "tests/test_handlers.py": "{kind}/test_handlers.py",
}
"""The path in the project, and the path in `templates/` without its suffix `.tmpl`."""


def new(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The folder to create, and its Python package: in the package's name each - is a _."
        ),
    ],
    is_queue: Annotated[
        bool, typer.Option("--queue", help="A handler of the items of a work queue, not of the messages of a topic.")
    ] = False,
) -> None:
    """Write a small working project to start from: a handler, its tests, and a README with the commands that run it.

    The project is a new folder in the current directory. Afterwards the command prints what to type next.
    """
    package = package_of(name)
    folder = Path(name)
    is_empty = folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())
    if os.path.lexists(folder) and not is_empty:
        raise FileExistsError(f"{name} exists already and is not an empty folder: choose another name, or remove it")
    project = rendered("queue" if is_queue else "topic", name, package)
    _write(folder, project)
    typer.echo(f"created {name}: {package}/handlers.py, its tests, and README.md, which explains these commands\n")
    typer.echo("\n".join([f"  cd {name}", *(f"  {line}" for line in COMMAND.findall(project["README.md"]))]))


def package_of(name: str) -> str:
    """The name of the project's Python package. Raises BadParameter if it cannot be imported or hides another one."""
    if not NAME.fullmatch(name):
        raise typer.BadParameter(
            f"{name!r}: use up to 50 letters, digits, '-' or '_', a letter first and a letter or digit last"
        )
    package = name.replace("-", "_")
    if keyword.iskeyword(package):
        raise typer.BadParameter(f"{package} is a keyword of Python and cannot be imported: choose another name")
    if package in {"tests", *sys.stdlib_module_names}:
        where = "the project's own folder of tests" if package == "tests" else "a module of Python's standard library"
        raise typer.BadParameter(f"{package} is {where}: choose another name")
    found = find_spec(package)
    if found is not None and found.origin is not None:  # None: a folder of that name in the current directory
        raise typer.BadParameter(f"{package} is installed already, in {found.origin}: choose another name")
    return package


def rendered(kind: str, name: str, package: str) -> dict[str, str]:
    """The files of a project, by path. kind: "topic" or "queue"."""
    templates = files("pxrs.cli.new") / "templates"
    values = {"name": name, "package": package, "pxrs": requirement()}
    found = {}
    for path, template in _FILES.items():
        text = (templates / f"{template.format(kind=kind)}.tmpl").read_text(encoding="utf-8")
        for key, value in values.items():
            text = text.replace(f"{{{{{key}}}}}", value)
        found[path.format(package=package)] = text
    return found


def requirement() -> str:
    """The line of requirements.txt that installs the pxrs that runs here, from where it was installed: pip records that
    (PEP 610) if it was not a package index."""
    try:
        recorded = distribution("pxrs").read_text("direct_url.json")
    except PackageNotFoundError:  # it runs from a checkout by PYTHONPATH
        return f"pxrs @ {Path(pxrs.__file__).parents[2].as_uri()}"
    if recorded is None:
        return f"pxrs=={pxrs.__version__}"
    origin = json.loads(recorded)
    if source := origin.get("vcs_info"):
        return f"pxrs @ {source['vcs']}+{origin['url']}@{source['commit_id']}"
    if origin.get("dir_info", {}).get("editable"):
        return f"--editable {origin['url']}"
    return f"pxrs @ {origin['url']}"


def _write(folder: Path, project: Mapping[str, str]) -> None:
    """Write all files of the project, or leave nothing behind."""
    draft = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    try:
        for name, text in project.items():
            path = draft / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        draft.rename(folder)  # replaces an empty folder; fails if somebody has put a file there meanwhile
    finally:
        shutil.rmtree(draft, ignore_errors=True)
