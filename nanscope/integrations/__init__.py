"""Other people's doors: each is imported only by who asks for it.

nanscope.integrations.Callback()       the `callbacks=` of a transformers or TRL trainer; LightningCallback, AccelerateTracker
nanscope.integrations.WandB()          the `trackers=` of `nanscope.watch`; TensorBoard, MLflow, Trackio, Prometheus, OpenTelemetry, Live
nanscope.integrations.Logged(logger)   the logger of torchtitan, SkyRL, verl, or one of your own
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanscope.errors import NanscopeError

if TYPE_CHECKING:
    from nanscope.integrations.accelerate import AccelerateTracker
    from nanscope.integrations.lightning import LightningCallback
    from nanscope.integrations.live import Live
    from nanscope.integrations.logged import Logged
    from nanscope.integrations.mlflow import MLflow
    from nanscope.integrations.opentelemetry import OpenTelemetry
    from nanscope.integrations.prometheus import Prometheus
    from nanscope.integrations.tensorboard import TensorBoard
    from nanscope.integrations.trackio import Trackio
    from nanscope.integrations.transformers import Callback
    from nanscope.integrations.wandb import WandB

__all__ = [
    "AccelerateTracker", "Callback", "LightningCallback", "Live", "Logged", "MLflow", "OpenTelemetry", "Prometheus", "TensorBoard",
    "Trackio", "WandB",
]  # fmt: skip

# name: the file that has it, and what is to be installed for it
_WHERE = {
    "Callback": ("transformers", "transformers"),
    "LightningCallback": ("lightning", "lightning"),
    "AccelerateTracker": ("accelerate", "accelerate"),
    "WandB": ("wandb", "wandb"),
    "TensorBoard": ("tensorboard", "tensorboard"),
    "MLflow": ("mlflow", "mlflow"),
    "Trackio": ("trackio", "trackio"),
    "Prometheus": ("prometheus", "prometheus-client"),
    "OpenTelemetry": ("opentelemetry", "opentelemetry-sdk"),
    "Live": ("live", ""),
    "Logged": ("logged", ""),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'nanscope.integrations' has no attribute {name!r}")
    module, package = _WHERE[name]
    try:
        return getattr(import_module(f"nanscope.integrations.{module}"), name)
    except ModuleNotFoundError as error:
        missing = (error.name or package).partition(".")[0]
        message = f"nanscope.integrations.{name} needs {missing}, which is not installed: pip install {package}"
        raise NanscopeError(message, slug="door-not-installed") from None
