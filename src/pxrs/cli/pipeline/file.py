"""The pipelines of a Python file."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path
from typing import Final

from pxrs.errors import InvalidPipeline, MissingDependency
from pxrs.spark.pipeline import Pipeline, check_together, collecting

_MODULE: Final = "pxrs_pipeline_file"
"""The name under which the file is imported."""


def load(file: Path) -> list[Pipeline]:
    """The pipelines that a file defines, in the order of their definition, without those that it imports. Raises
    InvalidPipeline, MissingDependency."""
    if importlib.util.find_spec("pyspark") is None:
        raise MissingDependency.of_extra("a pipeline", "pyspark", "spark")
    if not file.is_file():
        raise InvalidPipeline(f"there is no file {file}")
    folder = str(file.absolute().parent)
    sys.path.insert(0, folder)
    # Spark's Python workers import what the file imports, and read this variable.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    spec = importlib.util.spec_from_file_location(_MODULE, file.absolute())
    if spec is None or spec.loader is None:
        raise InvalidPipeline(f"{file} is no Python file: its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(module)  # workers cannot import the file itself under this name
    with collecting() as collected:
        try:
            spec.loader.exec_module(module)
        except InvalidPipeline as error:
            raise InvalidPipeline(f"{error}{_line(error, file)}") from error
        except (Exception, SystemExit) as error:  # errors of the file's own code
            reason = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
            raise InvalidPipeline(f"{file} cannot be loaded: {reason}{_line(error, file)}") from error
    pipelines = [each for each in collected if getattr(each.function, "__module__", _MODULE) == _MODULE]
    if not pipelines:
        raise InvalidPipeline(f"{file} defines no pipeline: put @pipeline(source=..., sink=...) before a function")
    check_together(pipelines)
    return pipelines


def _line(error: BaseException, file: Path) -> str:
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == str(file.absolute())]
    return "".join(f" ({file}, line {each.lineno})" for each in frames[-1:])
