"""Classes that a configuration names as ``module:Class``: a method of one's own in a file of one's own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from .config import ConfigError


def made_from(
    key: str, path: str, options: Mapping[str, Any], *, known: Collection[str], members: Collection[str]
) -> Any:
    """An object of the class that ``path`` names, made with ``options``.

    The module may lie in the working directory; see :func:`carry` for processes that do not find it there.

    Args:
        key: of the configuration.
        path: ``module:Class``.
        options: keyword arguments of the class.
        known: the short names that the key takes as well, for the error.
        members: what the object must have.

    Raises:
        ConfigError: no such module or class, arguments that it does not take, or members that it lacks.
    """
    module_name, colon, class_name = path.partition(":")
    if not colon or not module_name or not class_name:
        close = get_close_matches(path, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}, or module:Class"
        raise ConfigError(f"{key}={path!r} does not exist; {hint}")
    module = _module(key, module_name)
    kind = getattr(module, class_name, None)
    if not isinstance(kind, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        close = get_close_matches(class_name, classes, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{key}={path}: {module.__file__} has no class {class_name}{hint}")
    try:
        made = kind(**options)
    except Exception as error:
        raise ConfigError(f"{key}={path}: {class_name}(**{dict(options)}) failed: {error}") from error
    missing = [name for name in members if not hasattr(made, name)]
    if missing:
        raise ConfigError(
            f"{key}={path}: {class_name} lacks {', '.join(missing)}; see docs/write-an-algorithm.md"
        )
    return made


def _module(key: str, name: str) -> ModuleType:
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}: there is no module {error.name!r} in {here} or among what is installed; name a file "
            "beside you without its .py, or install its package"
        ) from error
    except Exception as error:
        raise ConfigError(f"{key}: the module {name} cannot be imported: {error!r}") from error
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
    return module


def carry(*objects: object) -> None:
    """Send the modules of classes of one's own along with their objects, to processes that lack them.

    Called when Ray runs: importing it earlier would settle where it listens.
    """
    from ray import cloudpickle

    for member in objects:
        module = sys.modules[type(member).__module__]
        if module.__name__.partition(".")[0] != "rl_algorithms":
            cloudpickle.register_pickle_by_value(module)
