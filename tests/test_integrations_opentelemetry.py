"""OpenTelemetry's SDK itself: what a reader of metrics collects."""

from __future__ import annotations

from pathlib import Path

import pytest
from doors import STEPS, train

import nanscope

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")


def test_a_reader_gets_the_last_step(tmp_path: Path) -> None:
    """Gauges, and a counter of what was found."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    train([nanscope.integrations.OpenTelemetry(MeterProvider([reader]))], tmp_path, fault=True)
    data = reader.get_metrics_data()
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    found = {metric.name: metric.data.data_points[0].value for metric in metrics}
    assert found["nanscope.step"] == STEPS and found["nanscope.bad_steps"] == 3 and found["nanscope.alerts"] == 1
    assert "nanscope.headroom_nats" in found
