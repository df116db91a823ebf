"""Prometheus: the numbers of the last step as gauges, and how often something was found as a counter.

with nanscope.watch(trainer, trackers=[nanscope.integrations.Prometheus()]): ...   # prometheus_client.start_http_server(9000) serves them
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge


class Prometheus:
    """A tracker of `nanscope.watch`. registry: where the gauges are; without it that of the process."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}
        self._alerts = Counter("nanscope_alerts", "What nanscope has found, and what it said was about to happen", registry=registry)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Set the gauges."""
        for name, value in {"nanscope/step": float(step), **scalars}.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(re.sub(r"\W", "_", name), "Of the last step that nanscope has watched", registry=self._registry)
            self._gauges[name].set(value)

    def alert(self, title: str, text: str) -> None:
        """Count it: a gauge holds no words."""
        self._alerts.inc()

    def artifact(self, path: Path) -> None:
        """Nothing: Prometheus keeps no files."""
