"""OpenTelemetry metrics: the numbers of the last step as gauges, and how often something was found as a counter.

with nanscope.watch(trainer, trackers=[nanscope.integrations.OpenTelemetry()]): ...
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opentelemetry import metrics


class OpenTelemetry:
    """A tracker of `nanscope.watch`. provider: of meters; without it that of the process."""

    def __init__(self, provider: metrics.MeterProvider | None = None) -> None:
        self._meter = metrics.get_meter("nanscope", meter_provider=provider)
        self._gauges: dict[str, Any] = {}
        self._alerts = self._meter.create_counter("nanscope.alerts")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Set the gauges."""
        for name, value in {"nanscope/step": float(step), **scalars}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(name.replace("/", ".").replace(" ", "_"))
            self._gauges[name].set(value)

    def alert(self, title: str, text: str) -> None:
        """Count it, with what it is called."""
        self._alerts.add(1, {"nanscope.title": title})

    def artifact(self, path: Path) -> None:
        """Nothing: metrics hold no files."""
