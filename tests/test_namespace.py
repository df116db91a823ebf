"""What a function knows: only what stands in its own lines, wherever its neighbours begin and end."""

from __future__ import annotations

import ast
from pathlib import Path

import new
import pytest
from patching import RUN, patched

from nanscope.program.calls import Site
from nanscope.replay.namespace import _own
from nanscope.replay.statement import Statement

LOSS = """
def loss(log_probs, ref, mask):
    diff = ref - log_probs
    kl = {}k3(diff)
    return (kl * mask).sum() / mask.sum()
"""
ABOVE = """
def before(x, mask):
    total = x
    total = (x * mask).sum()
    total = total + 1
    return total
"""
METHODS = """
class Losses:
    def before(self, x, mask):
        total = x
        total = (x * mask).sum()
        total = total + 1
        return total
    @staticmethod
    def k3(x): return torch.exp(x) - x - 1
"""
CLOSURE = """
def loss(log_probs, ref, keep):
    def before(x, mask):
        total = x
        total = (x * mask).sum()
        total = total + 1
        return total
    def k3(x): return torch.exp(x) - x - 1
    return finish(k3(ref - log_probs), keep)

def finish(kl, mask):
    return (kl * mask).sum() / mask.sum()
"""
TAIL = """
def loss(log_probs, ref, mask):
    return finish(k3(ref - log_probs), mask)

def k3(diff):
    def before(x, mask):
        total = x
        total = (x * mask).sum()
        total = total + 1
        return total
    kl = torch.exp(diff) - diff - 1
    return kl

def finish(kl, mask):
    return (kl * mask).sum() / mask.sum()
"""
BELOW = """
def k3(x): return torch.exp(x) - x - 1
def after(
    x,
    mask,
    *, weight=1,
):
    return (x * mask).sum() * weight
"""
BRANCHES = """
if torch is None: mask = None
for mask in (): pass
with torch.no_grad(): mask = (
    1, 2)
class Mask: mask = 1
def k3(x): return torch.exp(x) - x - 1
"""
DECORATED = """
def same(function, mask=None):
    if mask is not None:
        function.mask = mask
    mask = function
    return function
@same
@same
def k3(x): return (torch.exp(x)
    - x - 1)
"""
LAST = """
def mean(x, mask): return (x * mask).sum() / mask.sum()
def k3(x): kl = torch.exp(x) - x - 1; return kl
def count(mask): return mask.sum(
    # all
    # of
    # it
)
"""
SEVERAL = """
def k3(x): return x * 0
def k3(x):
    # its own
    kl = torch.exp(x) - x - 1
    return kl
mask = (
    # none
    # yet
    # to
    # be
    None
)
"""
OWN = """
def before(x):
    total = x
    total = x.sum()
    total = total + 1
    return total
def loss(log_probs, ref, mask): diff = ref - log_probs; return ((torch.exp(diff) - diff - 1) * mask).sum() / mask.sum()
"""
PARAMETER = """
def before(x):
    total = x
    total = x.sum()
    total = total + 1
    return total
def k3(x, mask): return (torch.exp(x) - x - 1) * mask
def loss(log_probs, ref, mask): return k3(ref - log_probs, mask).sum() / mask.sum()
"""
CASES = {  # script, and whether the function of exp knows the mask
    "above": (ABOVE + "\ndef k3(x): return torch.exp(x) - x - 1\n" + LOSS.format(""), False),
    "methods": (METHODS + LOSS.format("Losses."), False),
    "closure": (CLOSURE, False),
    "tail": (TAIL, False),
    "below": (BELOW + LOSS.format(""), False),
    "branches": (ABOVE + BRANCHES + LOSS.format(""), False),
    "decorated": (DECORATED + LOSS.format(""), False),
    "last": (LAST + LOSS.format(""), False),
    "several": (ABOVE + SEVERAL + LOSS.format(""), False),
    "own": (OWN, True),
    "parameter": (PARAMETER, True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_function_knows_no_name_of_its_neighbours(name: str, tmp_path: Path) -> None:
    """A function that stands on one line is all of it; what is beside it is somebody else's, and so is the end of a block that began above.

    Each change is applied to the script: it runs, and stays healthy.
    """
    text, known = CASES[name]
    script = tmp_path / "script.py"
    script.write_text(f"import torch\n{text}{RUN}")
    (incident,) = new.watched(new.load(script), tmp_path / "runs").incidents
    fixes = {fix.id: fix for fix in incident.fixes if fix.proven and fix.diffs}
    assert ("mask_before_op" in fixes) is known, {fix.id: fix.diffs for fix in fixes.values()}
    for fix in fixes.values():
        copy = patched(script, fix, tmp_path / fix.id)
        ast.parse(copy.read_text())
        assert not new.watched(new.load(copy), tmp_path / fix.id / "runs").incidents


@pytest.mark.parametrize("far", [1 << 63, 50_000_000, -(1 << 63)])
def test_a_line_that_stands_far_away_takes_no_time(far: int) -> None:
    """A file may name any number: nobody goes through the lines between."""
    lines = ((4, "def loss(x):"), (5, "    y = x.exp("), (6, "    return y"), (far, "    z = y"))
    site = Site("train.py", 5, "loss", 8, 5, 15, source=lines)
    assert {number for number, _ in _own(site)} == {4, 5, 6}
    assert Statement.of(site) is None
