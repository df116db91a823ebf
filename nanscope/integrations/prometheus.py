"""Prometheus: the numbers of the last step as gauges, and how often something was found as a counter.

with nanscope.watch(trainer, trackers=[nanscope.integrations.Prometheus()]): ...   # prometheus_client.start_http_server(9000) serves them
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

ABOUT = "Of the last step that nanscope has watched"
ALERTS = "What nanscope has found, and what it said was about to happen"


class Prometheus:
    """A tracker of `nanscope.watch`. registry: where the gauges are, those of an earlier run, too; without it that of the process."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._made: dict[str, Any] = {}
        self._alerts = self._of(Counter, "nanscope_alerts", ALERTS)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Set the gauges."""
        for name, value in {"nanscope/step": float(step), **scalars}.items():
            self._of(Gauge, re.sub(r"\W", "_", name), ABOUT).set(value)

    def alert(self, title: str, text: str) -> None:
        """Count it: a gauge holds no words."""
        self._alerts.inc()

    def artifact(self, path: Path) -> None:
        """Nothing: Prometheus keeps no files."""

    def _of(self, kind: type[Counter] | type[Gauge], name: str, about: str) -> Any:
        if name not in self._made:
            known = getattr(self._registry, "_names_to_collectors", {})  # a registry refuses a second one of a name
            self._made[name] = known.get(name) or kind(name, about, registry=self._registry)
        return self._made[name]
