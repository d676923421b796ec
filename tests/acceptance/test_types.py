"""The public face is typed: what a program that uses pxrs sees under `mypy --strict`.

One run of mypy, with no configuration and with pxrs as an installed package, checks
- every Python snippet of README.md and docs/*.md, the examples, and the projects of `pxrs new`;
- mistakes that it must refuse;
- a module, made here, that asks mypy for the type of every public member.

pyarrow comes without types (no `py.typed`, no stubs), so to mypy `pa.Table` and the like are `Any`, in a user's program
as here. Of a member whose annotation names pyarrow, only that annotation is checked, by `typing.get_type_hints`.
"""

from __future__ import annotations

import ast
import collections.abc
import importlib
import inspect
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.cli.new.command import rendered

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CONTINUES = "Each program on this page continues the"
"""In a document whose snippets are parts of one program."""
WITHOUT_STUBS = 'Library stubs not installed for "pandas"  [import-untyped]'
"""What mypy says to a user of pandas who has not installed stubs for it."""
TESTING = ("fixtures", "waiting", "accounting", "registry_contract")
MODULES = ("pxrs", "pxrs.registry", "pxrs.sources", "pxrs.spark", *(f"pxrs.testing.{name}" for name in TESTING))
DUNDERS = ("__init__", "__call__", "__iter__", "__next__", "__len__", "__enter__", "__exit__", "__getitem__")
TIMEOUT_S = 600

MISTAKES = """
import pxrs
from pxrs import Hbu  # attr-defined

pxrs.opne("data")  # attr-defined
hub = pxrs.open("memory:")
hub.consumer("t", "g", leas_ttl=3)  # call-overload
hub.consumer("t", "g", lease_ttl="3")  # call-overload
hub.consumer("t", "g", ack="sometimes")  # call-overload
hub.consumer("t", "g", dead_letters=lambda: hub.producer("t"))  # call-overload
hub.consumer("t", "g", topic_names=dict)  # call-overload
hub.consumer("t", "g").seek(pxrs.TopicPartition("t", 0), 1)  # arg-type
hub.consumer(["t", "u"], "g").seek(0, 1)  # arg-type
hub.consumer(["t", "u"], "g", ack="sometimes")  # call-overload
for number in hub.consumer(["t", "u"], "g").assignment:
    number + 1  # operator
hub.producer("t", linger=1)  # call-arg
hub.producer("t", retain=print)  # call-arg
pxrs.Consumer(hub.topic("t").log, hub.registry, "g", dead_letters="dead")  # arg-type
options: pxrs.ConsumerOptions = {"lease_ttl": 3, "ack": "manual", "dead_letters": "dead"}  # typeddict-unknown-key
hub.transaction().take("q").value  # union-attr
"""


# What is public.


@dataclass(frozen=True)
class Member:
    """A function, method, property or field that users may touch."""

    where: str
    """As a user writes it: `pxrs.Hub.consumer`."""
    function: Callable[..., object] | None
    """None of a field."""
    is_bound: bool
    """Its first parameter is `self` or `cls`."""
    hint: object
    """Of a field."""
    module: str
    """In which its annotations are written."""


def public_objects() -> Iterator[tuple[str, object]]:
    for name in MODULES:
        module = importlib.import_module(name)
        for each in getattr(module, "__all__", None) or _own_names(module):
            yield f"{name}.{each}", getattr(module, each)
    for each, kind in vars(pxrs.errors).items():
        if isinstance(kind, type) and kind.__module__ == "pxrs.errors":
            yield f"pxrs.errors.{each}", kind


def _own_names(module: types.ModuleType) -> list[str]:
    """The functions and classes of a module that has no `__all__`."""
    return [
        name
        for name, each in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(each) or isinstance(each, type))
        and each.__module__ == module.__name__
    ]


def public_members() -> Iterator[Member]:
    for where, each in public_objects():
        if isinstance(each, type):
            yield from _members_of(where, each)
        elif inspect.isfunction(each):
            yield Member(where, each, False, None, each.__module__)
        elif typing.get_origin(each) is not None:  # an alias, such as Policy
            yield Member(where, None, False, each, "pxrs")


def _members_of(where: str, kind: type) -> Iterator[Member]:
    for base in kind.__mro__:
        if not base.__module__.startswith("pxrs"):
            continue
        for name, hint in hints_of(base, base.__module__, own=True).items():
            if not name.startswith("_"):
                yield Member(f"{where}.{name}", None, False, hint, base.__module__)
        for name, found in vars(base).items():
            if name.startswith("_") and name not in DUNDERS:
                continue
            if isinstance(found, classmethod | staticmethod):
                is_bound = isinstance(found, classmethod)
                yield Member(f"{where}.{name}", found.__func__, is_bound, None, found.__func__.__module__)
            elif isinstance(found, property | cached_property):
                function = found.fget if isinstance(found, property) else found.func
                yield Member(f"{where}.{name}", function, True, None, base.__module__)
            elif inspect.isfunction(found) and found.__module__.startswith("pxrs"):
                yield Member(f"{where}.{name}", found, True, None, found.__module__)


@cache
def tree_of(module: str) -> ast.Module:
    found = importlib.import_module(module)
    if module == "pxrs.errors":  # its classes have this name for their module, and are written in the files beside it
        files = sorted(Path(found.__file__ or "").parent.glob("*.py"))
        return ast.Module([node for file in files for node in ast.parse(file.read_text()).body], [])
    return ast.parse(inspect.getsource(found))


@cache
def namespace(module: str) -> dict[str, object]:
    """What the annotations of a module may name: also what it imports for the type checker alone."""
    found = importlib.import_module(module)
    names = dict(vars(found))
    for node in tree_of(module).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(node.body, []), module, "exec"), names)
    return names


def hints_of(found: Any, module: str, own: bool = False) -> dict[str, object]:
    names = namespace(module)
    if own:  # of a class, without those of its bases
        found = type(found.__name__, (), {"__annotations__": inspect.get_annotations(found)})
    return typing.get_type_hints(found, names, names, include_extras=True)


# What is wrong with an annotation.


def faults(hint: object) -> Iterator[str]:
    """Each `Any` in it, and each generic that says nothing of its arguments."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        yield "Any"
    elif origin is typing.Literal:
        return
    elif origin is collections.abc.Callable and parts and parts[0] is ...:
        yield "a Callable of any parameters"
    elif origin is not None and not parts and hint != tuple[()]:
        yield f"a bare {hint}"
    elif isinstance(hint, type) and origin is None and (hint is type or "__class_getitem__" in vars(hint)):
        yield f"a bare {hint.__name__}"
    for part in parts:
        for each in part if isinstance(part, list) else [part]:
            if each is not ...:
                yield from faults(each)


def faults_of(member: Member) -> Iterator[str]:
    if member.function is None:
        yield from (f"{member.where}: {fault}" for fault in faults(member.hint))
        return
    hints = hints_of(member.function, member.module)
    parameters = [*inspect.signature(member.function).parameters.values()][member.is_bound :]
    for name in [*(parameter.name for parameter in parameters), "return"]:
        if name not in hints:
            yield f"{member.where}: {name} is not annotated"
        else:
            yield from (f"{member.where}: {name} has {fault}" for fault in faults(hints[name]))


def test_no_public_signature_has_any_in_it() -> None:
    members = list(public_members())
    assert len(members) > 300, "the walk has found too little"
    assert [fault for member in members for fault in faults_of(member)] == []


def test_every_class_that_the_public_face_returns_is_public_too() -> None:
    """So that a user can annotate what a call has returned by a name of pxrs."""
    public = {each for _, each in public_objects() if isinstance(each, type)}
    missing = {
        f"{kind.__module__}.{kind.__qualname__}, of {member.where}"
        for member in public_members()
        for kind in classes_in(returned(member))
        if kind.__module__.startswith("pxrs.")
        and not kind.__module__.startswith("pxrs.testing.")
        and kind not in public
    }
    assert missing == set()


def returned(member: Member) -> object:
    if member.function is None:
        return member.hint
    return hints_of(member.function, member.module).get("return")


def classes_in(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        yield hint
    for part in typing.get_args(hint):
        for each in part if isinstance(part, list) else [part]:
            yield from classes_in(each)


def planted(table: dict[str, Any], calls: Callable[..., int], items: list, plain: Callable) -> Any:  # type: ignore[type-arg]
    """Everything that `faults_of` must find."""


def test_the_walk_finds_any_wherever_it_stands() -> None:
    found = list(faults_of(Member("planted", planted, False, None, __name__)))
    assert [fault.partition(": ")[2] for fault in found] == [
        "table has Any",
        "calls has a Callable of any parameters",
        "items has a bare list",
        "plain has a bare Callable",
        "return has Any",
    ]
    unannotated = Member("lambda", lambda given: given, False, None, __name__)
    assert list(faults_of(unannotated)) == ["lambda: given is not annotated", "lambda: return is not annotated"]


# What mypy says.


@dataclass(frozen=True)
class Told:
    """A line of mypy's answer."""

    file: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def snippets() -> Iterator[tuple[str, str, str]]:
    """The document, a module's name, and its text: each line as far down as it stands in the document."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        module = re.sub(r"\W", "_", path.stem.lower())
        found = [(text[: match.start(1)].count("\n"), match[1]) for match in BLOCK.finditer(text)]
        if CONTINUES in text:  # one program
            whole = ""
            for above, block in found:
                whole += "\n" * (above - whole.count("\n")) + block
            found = [(0, whole)]
        for number, (above, block) in enumerate(found):
            yield str(path.relative_to(ROOT)), f"snippet_{module}_{number}.py", "\n" * above + block


def questions() -> Iterator[tuple[str, str]]:
    """What a user may write to touch each public member, and lines that ask mypy for its type."""
    for where, each in public_objects():
        if inspect.isfunction(each) or typing.get_origin(each) is not None:
            yield where, f"reveal_type({where})"
        if not isinstance(each, type):
            continue
        yield f"{where}.__init__", f"reveal_type({where})"
        if not typing.is_typeddict(each):
            names = {member.where.rpartition(".")[2] for member in _members_of(where, each)} | attributes_of(each)
            for name in sorted(names - {"__init__"}):
                function = f"ask_{where}_{name}".replace(".", "_")
                yield f"{where}.{name}", f"def {function}(given: {where}) -> None: reveal_type(given.{name})"


def attributes_of(kind: type) -> set[str]:
    """The public attributes that its methods set, which have no annotation that can be seen at run time."""
    found = set()
    for base in kind.__mro__:
        if base.__module__.startswith("pxrs"):
            (written,) = (
                each
                for each in tree_of(base.__module__).body
                if isinstance(each, ast.ClassDef) and each.name == base.__name__
            )
            for node in ast.walk(written):
                is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if is_set and ast.unparse(node.value) == "self" and not node.attr.startswith("_"):
                    found.add(node.attr)
    return found


def write_new_project(folder: Path, kind: str) -> None:
    """The Python files of a project of `pxrs new`, under names that no other file in the folder has."""
    package = f"new_{kind}"
    for path, text in rendered(kind, "shop", package).items():
        if path.endswith(".py"):
            target = folder / path.replace("tests/test_", f"test_{package}_")
            target.parent.mkdir(exist_ok=True)
            target.write_text(text)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """What mypy says of all of it, in one run. Its cache is kept: the first run also reads the types of pyspark."""
    folder = tmp_path_factory.mktemp("types")
    names = {}
    for document, module, text in snippets():
        (folder / module).write_text(text)
        names[module] = document
    assert len(names) > 15, "the documents have more snippets than were found"
    (folder / "mistakes.py").write_text(MISTAKES)
    for kind in ("topic", "queue"):
        write_new_project(folder, kind)
    imports = [f"import {module}" for module in (*MODULES, "pxrs.errors")]
    (folder / "members.py").write_text("\n".join([*imports, *(question for _, question in questions())]))
    examples = sorted((ROOT / "examples").glob("*.py"))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", "--no-color-output"]
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "as-a-user")]
    command += [str(path) for path in [*sorted(folder.rglob("*.py")), *examples]]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    found = re.findall(r"^(.+?):(\d+): (error|note): (.*)$", run.stdout, re.MULTILINE)
    return [
        Told(names.get(Path(file).name, Path(file).name), int(line), kind, text) for file, line, kind, text in found
    ]


def test_every_snippet_example_and_new_project_passes_mypy_strict(told: list[Told]) -> None:
    ours = ("mistakes.py", "members.py")
    errors = [each for each in told if each.kind == "error" and each.text != WITHOUT_STUBS]
    assert "\n".join(str(each) for each in errors if each.file not in ours) == ""


def test_mypy_refuses_what_is_no_name_or_option_of_pxrs(told: list[Told]) -> None:
    expected = {
        (number, line.rpartition("# ")[2]) for number, line in enumerate(MISTAKES.splitlines(), 1) if "# " in line
    }
    found = [each for each in told if each.file == "mistakes.py" and each.kind == "error"]
    assert {(each.line, each.text.rpartition("[")[2].rstrip("]")) for each in found} == expected


def test_mypy_sees_every_public_member_without_any(told: list[Told]) -> None:
    """But where the annotation names pyarrow."""
    asked = [where for where, _ in questions()]
    answers = [each for each in told if each.file == "members.py"]
    assert [str(each) for each in answers if each.kind == "error"] == []
    first = len(MODULES) + 2
    types_of = {asked[each.line - first]: each.text for each in answers if each.text.startswith("Revealed type is")}
    assert types_of.keys() == set(asked)
    untyped = {where.removesuffix(".__init__") for where in typed_by_pyarrow()}
    found = {where: text for where, text in types_of.items() if re.search(r"\bAny\b", text)}
    assert {where: text for where, text in found.items() if where.removesuffix(".__init__") not in untyped} == {}


def typed_by_pyarrow() -> Iterator[str]:
    for member in public_members():
        hints = {"": member.hint} if member.function is None else hints_of(member.function, member.module)
        if any(map(names_pyarrow, hints.values())):
            yield member.where
            if member.function is None:  # a field of a tuple or dataclass is a parameter of its constructor
                yield member.where.rpartition(".")[0]


def names_pyarrow(hint: object) -> bool:
    """Also by a named tuple, which mypy shows with the types of its fields."""
    return any(
        kind.__module__.startswith("pyarrow")
        or (hasattr(kind, "_fields") and any(map(names_pyarrow, hints_of(kind, kind.__module__, own=True).values())))
        for kind in classes_in(hint)
    )
