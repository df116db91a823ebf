"""Finds the adapter of a framework, the file beside this one that bears the prefix of its keys, and calls the framework with it."""

from __future__ import annotations

from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec

from torch import Tensor

from nanscope.errors import NanscopeError, words_of
from nanscope.frameworks.losses import LOSSES, framework_settings
from nanscope.frameworks.rows import Setting
from nanscope.native.adapter import Adapter
from nanscope.objective.settings import LossInputs


def native_loss(key: str, inputs: LossInputs, **settings: Setting) -> Tensor:
    """Return the loss that the installed framework computes, a scalar whose gradient flows to `inputs.log_probs`.

    Raises NanscopeError: `framework-not-installed` if the framework does not import here, `no-native-loss` if there is no way to call
    this loss or this setting, and as `framework_loss` for keys, settings and values that are not known.
    """
    framework_settings(key, **settings)
    prefix, _, kind = key.partition(".")
    adapter = _adapter(prefix)
    if adapter is None:
        there = ", ".join(known for known in LOSSES if _adapter(known.partition(".")[0]) is not None)
        raise NanscopeError(f"{key} has no adapter: there are {there}", slug="no-native-loss")
    failure = import_failure(prefix)
    if failure is not None:
        message = f"{key} needs {adapter.distribution} {LOSSES[key].version}, which does not import here: {failure}"
        raise NanscopeError(message, slug="framework-not-installed")
    return adapter.call(kind, inputs, settings)


def native_keys() -> tuple[str, ...]:
    """Return the keys of `framework_loss` whose framework has an adapter and imports here. The first call imports those frameworks."""
    reached = [prefix for prefix in adapters() if import_failure(prefix) is None]
    return tuple(key for key in LOSSES if key.partition(".")[0] in reached)


def installed() -> dict[str, str]:
    """Return the installed version of each framework that has an adapter, by the prefix of its keys; nothing is imported."""
    found: dict[str, str] = {}
    for prefix, adapter in adapters().items():
        try:
            found[prefix] = metadata.version(adapter.distribution)
        except metadata.PackageNotFoundError:
            continue
    return found


def import_failure(prefix: str) -> str | None:
    """Return in one line why a framework's loss functions do not import here, None if they do. prefix: of its keys."""
    adapter = _adapter(prefix)
    if adapter is None:
        return "nanscope has no adapter for it"
    try:
        adapter.load()
    except Exception as error:  # noqa: BLE001 - the import of a framework runs anybody's code
        return words_of(error)
    return None


def adapters() -> dict[str, Adapter]:
    """Return the adapters by the prefix of their framework's keys."""
    prefixes = dict.fromkeys(key.partition(".")[0] for key in LOSSES)
    return {prefix: adapter for prefix in prefixes if (adapter := _adapter(prefix)) is not None}


@cache
def _adapter(prefix: str) -> Adapter | None:
    name = f"nanscope.native.{prefix}"
    return import_module(name).ADAPTER if find_spec(name) is not None else None
