"""What holds for every test: the same seed, one thread, no network, and nothing left installed in torch or in the interpreter."""

from __future__ import annotations

import gc
import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# two processes that compile the same loss at once have taken each other's half-made files
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}"
os.environ["NANSCOPE_CACHE"] = "off"  # what this machine's user had diagnosed is nobody's to read or to write here
os.environ["COLUMNS"] = "118"  # what is printed is as wide wherever the tests run

import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from torch.nn.modules import module
from torch.optim import optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode

torch.set_num_threads(1)  # the tensors are tiny: on a busy machine a second thread makes a test 20 times slower

NIGHTLY = os.environ.get("NANSCOPE_NIGHTLY") == "1"  # a long search; what it finds is pinned as an example of its test

hypothesis.settings.register_profile("nanscope", deadline=None, max_examples=60, print_blob=True, derandomize=True, database=None)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=5000, print_blob=True, database=None)
hypothesis.settings.load_profile("nightly" if NIGHTLY else "nanscope")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--accept` takes what test_golden.py and test_screenshots.py see as what it is to be."""
    parser.addoption("--accept", action="store_true", help="write the golden outputs anew instead of comparing with them")


BACKWARD = torch.autograd.backward
TRACE, PROFILE = sys.gettrace(), sys.getprofile()  # a coverage tool may have installed its own


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked `nightly` is left out, unless it is night."""
    late = [] if NIGHTLY else [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=late)
    items[:] = [item for item in items if NIGHTLY or not item.get_closest_marker("nightly")]


def pytest_collection_finish() -> None:
    """What was imported stays: a collection of garbage, and trainers ask for many, need not go through all of it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """And goes as it would have."""
    gc.unfreeze()


def left_installed() -> list[str]:
    """Name everything that is installed in torch or the interpreter and should not be there between two tests."""
    found = {
        "a dispatch mode": _get_current_dispatch_mode() is not None,
        "a function mode": bool(_get_current_function_mode_stack()),
        "a global module hook": any(
            bool(getattr(module, name))
            for name in (
                "_global_forward_hooks",
                "_global_forward_pre_hooks",
                "_global_forward_hooks_always_called",
                "_global_forward_hooks_with_kwargs",
                "_global_backward_hooks",
                "_global_backward_pre_hooks",
            )
        ),
        "a global optimizer hook": bool(optimizer._global_optimizer_pre_hooks) or bool(optimizer._global_optimizer_post_hooks),
        "a wrapper of torch.autograd.backward": torch.autograd.backward is not BACKWARD
        or BACKWARD.__module__ != "torch.autograd"
        or hasattr(BACKWARD, "__wrapped__"),
        "a trace function": sys.gettrace() is not TRACE,
        "a profile function": sys.getprofile() is not PROFILE,
        "no_grad": not torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "another default dtype": torch.get_default_dtype() is not torch.float32,
    }
    return [name for name, installed in found.items() if installed]


@pytest.fixture(autouse=True)
def nothing_stays_installed() -> Iterator[None]:
    """Every test begins with the same seed, and neither inherits nor leaves a hook, a mode or a tracer."""
    assert left_installed() == [], "left by somebody before this test"
    torch.manual_seed(0)
    yield
    assert left_installed() == [], "left by this test"


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values the tape knows of when each backward pass begins that is recognised."""
    from nanscope.watching.recording import Recording

    counted: list[int] = []
    original = Recording.recognised

    def recognised(*args: object, tape: Any, **kwargs: object) -> Recording:
        counted.append(tape.numbered)
        return original(*args, tape=tape, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Recording, "recognised", staticmethod(recognised))
    return counted
