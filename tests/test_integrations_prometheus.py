"""Prometheus's client itself: the samples of a registry."""

from __future__ import annotations

from pathlib import Path

import pytest
from doors import STEPS, train

import nanscope

client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")


def test_the_last_step_is_in_the_gauges(tmp_path: Path) -> None:
    """As they are scraped: valid names, one sample each, alerts counted."""
    registry = client.CollectorRegistry()
    train([nanscope.integrations.Prometheus(registry)], tmp_path, fault=True)
    assert registry.get_sample_value("nanscope_step") == STEPS and registry.get_sample_value("nanscope_bad_steps") == 3
    assert registry.get_sample_value("nanscope_alerts_total") == 1
    assert b"nanscope_headroom_nats " in client.generate_latest(registry)


def test_names_are_such_that_it_takes_them(tmp_path: Path) -> None:
    """Of several optimizers and ranks, too."""
    registry = client.CollectorRegistry()
    nanscope.integrations.Prometheus(registry).log(1, {"nanscope/rank3.actor/AdamW of Critic/kl": 0.5})
    assert registry.get_sample_value("nanscope_rank3_actor_AdamW_of_Critic_kl") == 0.5


def test_a_second_run_goes_on_with_the_same_gauges(tmp_path: Path) -> None:
    """A registry refuses two metrics of one name, and a process may train more than once."""
    registry = client.CollectorRegistry()
    for _ in range(2):
        train([nanscope.integrations.Prometheus(registry)], tmp_path, fault=True)
    assert registry.get_sample_value("nanscope_alerts_total") == 2 and registry.get_sample_value("nanscope_step") == STEPS
