"""Verifying the atlas sees a wrong cell, and says what it could not compare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanscope.atlas import atlas, cells, verify
from nanscope.atlas.cells import Atlas
from nanscope.atlas.faults import FAULTS
from nanscope.atlas.harm import Harm
from nanscope.frameworks.paths import LossPath

PLANTED = (
    # what a wrong row of the table would be: path, the settings that it would be computed with instead
    ("trl.dapo", {"delta": 4.0}),
    ("trl.dapo", {"beta": 0.04}),
    ("trl.vespo", {"use_vllm": True}),
    ("trl.grpo", {"importance_sampling_level": "sequence"}),
)


@pytest.mark.parametrize(("key", "instead"), PLANTED)
def test_verifying_sees_a_wrong_row(key: str, instead: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against TRL itself the right row agrees in every cell; one that was computed with other settings does not."""
    pytest.importorskip("trl", reason="trl is not installed")
    path = LossPath(key)
    right = Atlas((path,), FAULTS, atlas([key]).cells[:1])
    verified = verify(right)
    assert verified.disagreements == verified.refused == verified.unreached == ()
    (compared,) = verified.compared
    assert (compared.framework, compared.paths, compared.cells) == ("trl", 1, len(FAULTS))
    own = cells.evaluate
    monkeypatch.setattr(cells, "evaluate", lambda path, inputs: own(replace(path, settings=tuple(instead.items())), inputs))
    found = verify(replace(right, cells=atlas([key]).cells[:1])).disagreements
    assert found and all(d.path == path and d.ours != d.theirs for d in found)
    assert {(d.fault, d.theirs) for d in found} <= set(zip(FAULTS, right.cells[0], strict=True))


def test_verifying_names_the_one_cell_that_is_wrong() -> None:
    """One changed cell is one disagreement, with both answers."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    found = atlas(["liger.cispo"])
    place = 17
    row = list(found.cells[1])
    row[place] ^= Harm.MASKED
    verified = verify(replace(found, cells=(found.cells[0], tuple(row), *found.cells[2:])))
    (wrong,) = verified.disagreements
    assert (wrong.path, wrong.fault, wrong.ours, wrong.theirs) == (found.paths[1], FAULTS[place], row[place], found.cells[1][place])
    assert verified.to_json()["disagreements"] == [
        {"path": wrong.path.name, "fault": wrong.fault.name, "ours": wrong.ours.code, "theirs": wrong.theirs.code}
    ]


def test_what_cannot_be_compared_is_said() -> None:
    """A framework without an adapter is absent, not in agreement; a path that the framework's own function refuses is not reached."""
    assert verify(atlas(["tinker"], FAULTS[:1])).absent == ("tinker",)
    supposed = verify(atlas(["trl.grpo · log_ratio"], FAULTS[:1]))
    assert (supposed.compared, supposed.unreached, supposed.disagreements) == ((), (), ())
    pytest.importorskip("trl", reason="trl is not installed")
    strange = LossPath("trl.grpo", (("num_items_in_batch", "many"),))
    verified = verify(Atlas((strange,), FAULTS[:2], ((Harm.CLEAN, Harm.CLEAN),)))
    assert verified.compared == () and verified.disagreements == ()
    ((path, why),) = verified.unreached
    assert path == strange and why
