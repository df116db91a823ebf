"""On a GPU: the watched run is the bare one to the bit, and what is said is true, with compiled losses, Triton, float8, graphs and streams."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from checks import CHECKS, MEASURED, Size

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("check", CHECKS)
def test_the_observer_changes_nothing_and_says_what_is_true(check: str, device: str) -> None:
    """On a CPU what is not CUDA's own, so that the code has run before a GPU sees it."""
    answer = CHECKS[check](device)
    assert answer.holds, answer.told


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("figure", MEASURED)
def test_what_is_measured_is_told(figure: str, device: str) -> None:
    """A time is no reason for a test to fail; a peak of memory is."""
    answer = MEASURED[figure](device, Size())
    assert answer.holds and answer.told, answer.told
