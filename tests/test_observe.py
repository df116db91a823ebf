"""Cases: what a file says of an origin that its program does not hold is read with care. What rules make of cases: test_incidents.py."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from nanscope.errors import SnapshotError
from nanscope.locate.location import Phase
from nanscope.locate.observe import gradient_observation, made_observation
from nanscope.program.program import Program
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.verdict.diagnose import diagnose, examine

SEEN = made_observation("_softmax", torch.tensor([[0.5, math.nan]]), 1, None, "layers.1 (Attention)", Phase.FORWARD)
JUNK: list[Any] = [None, 3, -1.5, math.inf, "x", "", [], [1], {}, {"a": 1}, [[1, 2]], True, "\x1b[31m", "</script>"]


def snapshot(seen: dict[str, Any]) -> Snapshot:
    """A step of which only this was observed."""
    return Snapshot(7, 0, Program((), (), -1), {}, None, {}, Reached(math.nan, 3, 3), observed=seen)


def test_an_observation_comes_back_as_it_was() -> None:
    """Through JSON, too."""
    case, _, problem = examine(snapshot(json.loads(json.dumps(SEEN))))
    assert (case.phase, case.place.op, case.place.index, case.place.shape) == (Phase.FORWARD, "_softmax", (0, 1), (1, 2))
    assert math.isnan(case.place.value) and case.place.module == "layers.1 (Attention)" and case.place.role == "attention" and not problem
    seen = {"outside": True, "clip": "inf", "location": gradient_observation("linalg_vector_norm", "w", torch.tensor([1e30]), 0, None)}
    case = examine(snapshot(seen))[0]
    assert (case.phase, case.place.role, case.facts.clip) == (Phase.BACKWARD, "grad", "inf")


@pytest.mark.parametrize("junk", JUNK, ids=repr)
@pytest.mark.parametrize("key", [*SEEN["location"]["origin"], "headroom_bits", "limit_nats", "file", "line", "source"])
def test_anything_in_an_observation_is_read_or_refused(key: str, junk: Any) -> None:
    """One clear error, or fields that hold what they say."""
    seen = json.loads(json.dumps(SEEN))
    seen["location"]["origin"][key] = junk
    try:
        place = diagnose(snapshot(seen)).origin
    except SnapshotError as error:
        assert "\n" not in str(error)
        return
    assert all(type(n) is int for n in (*place.index, *place.shape)) and isinstance(place.value, float)
    assert all(text is None or isinstance(text, str) for text in (place.variable, place.expression, place.role, place.file, place.module))
    assert place.masked is None or isinstance(place.masked, bool)
    assert place.headroom is None or isinstance(place.headroom, float)


@pytest.mark.parametrize("junk", JUNK, ids=repr)
@pytest.mark.parametrize("key", ["location", "rows", "clip", "optimizer", "weight", "suspect", "allreduce", "spike"])
def test_anything_beside_it_too(key: str, junk: Any) -> None:
    """The same for what stands beside the location."""
    try:
        assert diagnose(snapshot({**SEEN, key: junk})).sentence
    except SnapshotError as error:
        assert "\n" not in str(error)
