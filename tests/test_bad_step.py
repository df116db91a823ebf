"""A bad step in short, from a snapshot and from the head of its file."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import leaf, record
from seen import NAN
from test_logbook import bad

from nanscope.errors import SnapshotError
from nanscope.locate.observe import observe
from nanscope.snapshot.bad_step import BadStep
from nanscope.snapshot.file import save
from nanscope.snapshot.observation import Came, Kind, Observation, Origin, Phase
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.watching.afterwards import arrived

CAME = arrived("w", torch.tensor([NAN]))
MODULE = Observation(phase=Phase.FORWARD, origin=Origin("module", variable="logits"), outside=True)
WEIGHT = Observation(phase=Phase.WEIGHTS, origin=Origin("parameter", variable="w"), outside=True)
SPIKE = Observation(kind=Kind.SPIKE, phase=Phase.FORWARD, origin=Origin("exp", file="/home/me/loss.py", line=3), outside=True)

CASES: dict[str, tuple[Snapshot, BadStep]] = {
    "arrived": (bad(3, observation=CAME, found=CAME), BadStep(3, came=Came.REDUCED)),
    "module": (bad(3, observation=MODULE, found=MODULE), BadStep(3, came=Came.MODEL, site="logits module")),
    "weights": (bad(3, observation=WEIGHT, found=WEIGHT), BadStep(3, came=Came.WEIGHTS, site="w parameter")),
    "consequence": (bad(4, rank=7, consequence_of=3), BadStep(4, 7, came=Came.WEIGHTS, of=3)),
    "suspect": (bad(3, observation=SPIKE, found=SPIKE), BadStep(3, came=Came.MADE, site="loss.py:3 exp", suspect=True)),
    "spoilt": (
        bad(3, 2, observation=SPIKE, update=2, reached=Reached(NAN, 3, 3, 4, 1)),
        BadStep(3, update=2, part=2, site="loss.py:3 exp", spoilt=True, suspect=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_head_says_what_the_snapshot_says(tmp_path: Path, name: str) -> None:
    """How it came, where it was made, and what follows from it."""
    snapshot, expected = CASES[name]
    assert BadStep.of_snapshot(snapshot) == expected
    assert BadStep.read(save(snapshot, tmp_path)) == expected


def test_what_the_program_of_the_file_holds_is_told_by_where_it_was_located(tmp_path: Path) -> None:
    """The file keeps the place in short, since only running it would show it again."""
    recorded = record(lambda x: torch.exp(x + 200.0).sum(), leaf(2, 3))
    found = observe(recorded.location, recorded.trace)  # type: ignore[arg-type]
    told = BadStep.read(save(recorded.snapshot(found=found), tmp_path))
    assert told.came is Came.MADE and told.site.startswith("test_bad_step.py:") and told.site.endswith(" exp")


def spoil(path: Path, change: Any) -> Path:
    """Write another description into the head of a file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + length])
    about = json.loads(head["__metadata__"]["nanscope"])
    change(about)
    head["__metadata__"]["nanscope"] = json.dumps(about)
    raw = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])
    return path


@pytest.mark.parametrize("name", ["arrived", "module", "weights", "consequence"])
def test_a_file_of_an_earlier_release_says_as_much_as_it_can(tmp_path: Path, name: str) -> None:
    """What it observed tells how it came, and no place."""
    snapshot, expected = CASES[name]
    path = spoil(save(snapshot, tmp_path), lambda about: [about.pop(key) for key in ("came", "site")])
    assert BadStep.read(path) == replace(expected, site="")


@pytest.mark.parametrize("key", ["step", "rank", "came", "reached", "observed", "consequence_of", "part", "update"])
@pytest.mark.parametrize("value", [[1], "text", math.inf])
def test_a_hostile_head_is_one_clear_error(tmp_path: Path, key: str, value: Any) -> None:
    """And never anything else."""
    path = spoil(save(CASES["arrived"][0], tmp_path), lambda about: about.update({key: value}))
    with pytest.raises(SnapshotError, match="the description is damaged"):
        BadStep.read(path)
