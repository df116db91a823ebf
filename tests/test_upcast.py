"""A part of the model in float32: the smallest around an origin whose gradient overflows that heals the step."""

from __future__ import annotations

from collections import Counter

import torch
from recorded import record
from torch import Tensor

from nanscope.program.by_rows import execute_ends
from nanscope.replay.patch import Patch
from nanscope.replay.upcast import upcast_fp32


def inner(x: Tensor) -> Tensor:
    normed = (x.float() * 0.25).half()
    return normed * torch.full((4,), 300.0).half()


def outer(x: Tensor) -> Tensor:
    return inner(x.half() * 0.5).float().mul(400.0).sum()


def test_the_part_around_the_origin_is_made_wider() -> None:
    """Its casts to half are gone, what comes in is widened and what goes out cast back; what lies outside stays as it was."""
    recorded = record(outer, torch.ones(2, 4).requires_grad_())
    location = recorded.location
    assert location is not None and location.origin.op == "mul"
    variant = upcast_fp32(Patch(recorded.trace, location.origin))
    assert variant is not None and "inner" in variant.label
    run = execute_ends(variant.program, variant.tensors)
    assert all(bool(torch.isfinite(grad).all()) for grad in run.grads.values())
    before, after = (Counter(call.op for call in program.calls) for program in (recorded.program, variant.program))
    assert set(after - before) == {"aten._to_copy.default"} and not before - after
    casts = [call for call in variant.program.calls if call.name == "_to_copy" and _function(variant.program.site_of(call)) == "inner"]
    assert torch.float16 not in {arg for call in casts for _, arg in call.kwargs}


def _function(site: object) -> str:
    return str(getattr(site, "function", ""))


def test_a_line_that_heals_is_enough() -> None:
    """What follows the line was too large: nothing that was made before is touched."""
    recorded = record(lambda x: (x.half() * 0.5).mul(300.0).float().mul(300.0).sum(), torch.ones(2, 4).requires_grad_())
    location = recorded.location
    assert location is not None
    variant = upcast_fp32(Patch(recorded.trace, location.origin))
    assert variant is not None
    run = execute_ends(variant.program, variant.tensors)
    assert all(bool(torch.isfinite(grad).all()) for grad in run.grads.values())


def test_a_finite_origin_of_float32_is_left_alone() -> None:
    """There is nothing to be made wider."""
    recorded = record(lambda x: (x * 0.0).sqrt().sum(), torch.ones(2, 4).requires_grad_())
    location = recorded.location
    assert location is not None and upcast_fp32(Patch(recorded.trace, location.origin)) is None
