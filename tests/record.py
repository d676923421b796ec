"""Writes down what moving code must not change, as JSON: `PYTHONHASHSEED=0 python -m tests.record > before.json`.

`python -m tests.record --compare before.json` prints the differences and exits with 1 if there are any. The record
holds every public name with its signature and module, the names of loggers, `--help` of each command, the codes of
errors, the tables of metrics and events, the bytes of each golden format, and, for seeds of each simulator, a hash of
the schedule. Names of classes are left out of schedules, so that a class may be renamed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import inspect
import io
import json
import logging
import os
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PUBLIC = ("pxrs", "pxrs.errors", "pxrs.registry", "pxrs.sources", "pxrs.spark", "pxrs.testing")
CLASS_NAME = re.compile(r"\b[A-Z]\w*[a-z]\w*\b")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
TRACE_MAX = 10_000_000


def modules() -> list[str]:
    """The names of all modules of pxrs, which are imported."""
    import pxrs

    found = [each.name for each in pkgutil.walk_packages(pxrs.__path__, "pxrs.") if not each.name.endswith("__main__")]
    for name in found:
        importlib.import_module(name)
    return found


def signature(value: Any) -> str:
    try:
        return ADDRESS.sub("", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return ""


def public_names() -> dict[str, str]:
    found = {}
    for module_name in PUBLIC:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", None) or [each for each in vars(module) if not each.startswith("_")]:
            value = getattr(module, name)
            if inspect.ismodule(value):
                continue
            where = f"{module_name}.{name}"
            found[where] = f"{getattr(value, '__module__', type(value).__name__)} {signature(value)}"
            if inspect.isclass(value):
                for member in sorted({each for each in dir(value) if not each.startswith("_")}):
                    found[f"{where}.{member}"] = signature(getattr(value, member))
    return found


def helps() -> dict[str, str]:
    from typer.main import get_command

    from pxrs.cli.app import app

    found = {}

    def walk(command: Any, path: tuple[str, ...], parent: Any) -> None:
        with command.context_class(command, parent=parent, info_name=path[-1], terminal_width=100) as context:
            found[" ".join(path)] = command.get_help(context)
            for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
                walk(command.get_command(context, name), (*path, name), context)

    walk(get_command(app), ("pxrs",), None)
    return found


def error_codes() -> dict[str, str]:
    from pxrs import errors

    def below(kind: type) -> Iterator[type]:
        yield kind
        for each in kind.__subclasses__():
            yield from below(each)

    return {f"{each.__module__}.{each.__qualname__}": getattr(each, "code", "") for each in below(errors.PxrsError)}


def tables() -> dict[str, list[str]]:
    from pxrs.events import names
    from pxrs.metrics import table

    return {
        "events": sorted(repr(each) for each in vars(names).values() if isinstance(each, names.Kind)),
        "metrics": sorted(repr(each) for each in vars(table).values() if isinstance(each, table.Metric)),
    }


def golden() -> dict[str, str]:
    files = sorted(path for path in (ROOT / "tests/golden").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def schedules(seeds: int) -> dict[str, str]:
    from pxrs.testing.simulator.cluster_simulation import ClusterSimulation
    from pxrs.testing.simulator.queue_simulation import QueueSimulation
    from pxrs.testing.simulator.simulation import Simulation

    found = {}
    for kind, make in (("groups", Simulation), ("clusters", ClusterSimulation), ("queues", QueueSimulation)):
        for seed in range(seeds):
            simulation: Any = make(seed, trace=TRACE_MAX)
            with contextlib.redirect_stdout(io.StringIO()):
                simulation.run()
            events = simulation.environment.events if kind == "groups" else simulation.events
            text = "\n".join(CLASS_NAME.sub("", each) for each in events)
            found[f"{kind} {seed}"] = f"{len(events)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return found


def record(seeds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"public": public_names(), "help": helps()}
    modules()
    loggers = sorted(name for name in logging.root.manager.loggerDict if name.split(".")[0] == "pxrs")
    return found | {
        "loggers": dict.fromkeys(loggers, ""),
        "codes": error_codes(),
        "tables": {f"{kind} {each}": "" for kind, rows in tables().items() for each in rows},
        "golden": golden(),
        "schedules": schedules(seeds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000)
    parser.add_argument("--compare", type=Path)
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        raise SystemExit("set PYTHONHASHSEED=0: representations of sets are part of the record")
    logging.disable()
    found = record(given.seeds)
    if given.compare is None:
        sys.stdout.write(json.dumps(found, indent=1, sort_keys=True) + "\n")
        return 0
    before = json.loads(given.compare.read_text())
    differences = [
        f"{part}: {key}\n  - {before[part].get(key)}\n  + {found[part].get(key)}\n"
        for part in sorted(found)
        for key in sorted({*before[part], *found[part]})
        if before[part].get(key) != found[part].get(key)
    ]
    sys.stdout.write("".join(differences) or "equal\n")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
