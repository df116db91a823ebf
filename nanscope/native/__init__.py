"""The frameworks' own loss functions, as installed, on the batches and settings that `framework_loss` takes: the two can be compared.

    native_loss("trl.dapo", inputs, beta=0.04)            # GRPOTrainer._compute_loss of the installed TRL
    framework_loss("trl.dapo", inputs, beta=0.04).loss    # nanscope's objective under the same settings

Notable: the loss functions are the framework's, unchanged. What an adapter adds is what the framework's trainer would have put around the
call (config object, batch keys, counts of one rank), and its docstring says so. A setting that is left out has the framework's default.
Frameworks are imported when a loss is asked for, never before; what one of them raises for a batch passes through.
"""

from __future__ import annotations

import importlib.metadata

from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import LOSSES, framework_settings
from nanscope.frameworks.rows import Setting
from nanscope.native import liger, nemo_rl, openrlhf, skyrl, trl, verl
from nanscope.native.adapter import Adapter
from nanscope.objective.settings import LossInputs

ADAPTERS: tuple[Adapter, ...] = (trl.ADAPTER, liger.ADAPTER, verl.ADAPTER, skyrl.ADAPTER, openrlhf.ADAPTER, nemo_rl.ADAPTER)


def native_loss(key: str, inputs: LossInputs, **settings: Setting) -> Tensor:
    """Return the loss that the installed framework computes, a scalar whose gradient flows to `inputs.log_probs`.

    Raises NanscopeError: `framework-not-installed` if the framework does not import here, `no-native-loss` if there is no way to call
    this loss or this setting, and as `framework_loss` for keys, settings and values that are not known.
    """
    framework_settings(key, **settings)
    adapter = next((one for one in ADAPTERS if key in one.keys), None)
    if adapter is None:
        raise NanscopeError(f"{key} has no adapter: there are {', '.join(_all_keys())}", slug="no-native-loss")
    failure = import_failure(adapter)
    if failure is not None:
        message = f"{key} needs {adapter.distribution} {LOSSES[key].version}, which does not import here: {failure}"
        raise NanscopeError(message, slug="framework-not-installed")
    return adapter.call(key.partition(".")[2], inputs, settings)


def native_keys() -> tuple[str, ...]:
    """Return the keys of `framework_loss` whose framework has an adapter and imports here. The first call imports those frameworks."""
    return tuple(key for adapter in ADAPTERS if import_failure(adapter) is None for key in adapter.keys)


def installed() -> dict[str, str]:
    """Return the installed version of each framework that has an adapter, by the prefix of its keys; nothing is imported."""
    found: dict[str, str] = {}
    for adapter in ADAPTERS:
        try:
            found[adapter.prefix] = importlib.metadata.version(adapter.distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def import_failure(adapter: Adapter) -> str | None:
    """Return in one line why a framework's loss functions do not import here, None if they do."""
    try:
        adapter.load()
    except Exception as error:  # noqa: BLE001 - the import of a framework runs anybody's code
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _all_keys() -> tuple[str, ...]:
    return tuple(key for adapter in ADAPTERS for key in adapter.keys)
