"""The option ``app``: a module of the application, whose function registers its functions with a worker."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import replication
from replication.errors import ConfigError

if TYPE_CHECKING:
    from replication.follower.worker import Worker


def no_module(name: str) -> str:
    """Return the message for a module that does not exist."""
    return f"there is no module {name}, neither here nor installed"


def register_app(app: str, worker: Worker) -> None:
    """Import MODULE and call NAME of ``MODULE[:NAME]`` with ``worker``; the current directory is searched first."""
    module_name, colon, name = app.partition(":")
    name = name if colon else "register"
    if not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise ConfigError(f"app: {app!r} is not of the form MODULE or MODULE:NAME, with dots for slashes")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"app: {module_name} needs {error.name}, which is not installed") from error
        near = f"; did you mean {module_name.removesuffix('.py')}?" if Path(module_name).is_file() else ""
        raise ConfigError(f"app: {no_module(module_name)}{near}") from error
    except Exception as error:
        raise ConfigError(f"app: {module_name} cannot be imported: {_describe(error)}") from error
    if not callable(register := getattr(module, name, None)):
        raise ConfigError(f"app: {module_name} ({module.__file__}) has no function {name}")
    if inspect.iscoroutinefunction(register):
        raise ConfigError(f"app: {module_name}:{name} must be a plain function: it is called before the reactor runs")
    try:
        inspect.signature(register).bind(worker)
    except TypeError as error:
        raise ConfigError(f"app: {module_name}:{name} must take one argument, the worker: {error}") from error
    try:
        register(worker)
    except Exception as error:
        raise ConfigError(f"app: {module_name}:{name} failed: {_describe(error)}") from error


def _describe(error: Exception) -> str:
    """Return the error of an application in one line, with the last place in the application's own folder."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__} in {error.filename}, line {error.lineno}: {error.msg}"
    not_the_application = ("<", *(f"{Path(inspect.getfile(each)).parent}{os.sep}" for each in (replication, importlib)))
    frames = [
        each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(not_the_application)
    ]
    text = " ".join(str(error).split())
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if not frames:
        return what
    last = [each for each in frames if Path(each.filename).is_relative_to(Path(frames[0].filename).parent)][-1]
    return f"{what} ({last.filename}, line {last.lineno})"
