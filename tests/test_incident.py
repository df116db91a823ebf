"""A verdict as JSON: the names that others read, and the numbers as text where JSON has none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from verdicts import KINDS, verdict_of

from nanscope.causes import Cause
from nanscope.replay.reproduction import Reproduction
from nanscope.snapshot.coverage import Gap
from nanscope.snapshot.observation import Blame, Link, Origin
from nanscope.verdict.incident import Fix, Incident, NonFiniteError, Note, Verdict

INCIDENT = Incident(
    step=7, rank=1, phase="forward", cause=Cause.EXP_OVERFLOW, headline="step 7", sentence="it overflowed.",
    origin=Origin("exp", (0, 1), (2, 3), math.inf, "float32", operands=(("x", 99.0),), headroom=-14.8, limit=88.72),
    chain=(Link("mul[0]", 12, math.nan, False, "loss.py"),), loss=math.nan, reached={"loss": True},
    fixes=(Fix("clamp_exponent", "clamp", "loss.py:12", True, True, 0.5, 0, 3, 0.0),),
    rejected=(Fix("fix_upstream", "go back", None, False, None),), framework="TRL", remedies=("clamp=20",),
    notes=(Note("logged_loss", "the log shows 0", 7),), snapshot="a.safetensors", rows=(), reproduction=Reproduction(0.0, 0.0), suspect=False,
    history=(), environment={"python": "3.12"}, settings={"beta": 0.0}, opaque=(), objective={"key": "trl.grpo"},
    blame=Blame("old", "old_log_probs", (3, 8), -200.0, -2.8, -6.1, -0.4),
)  # fmt: skip

FIELDS = {  # what schema 1 promises: where -> its names
    "": "schema nanscope status sentence steps bad_steps backwards skipped incidents consequences notes gaps ranks",
    "incidents.0": "step rank phase cause status headline sentence origin blame chain loss reached fixes rejected framework remedies notes "
    "snapshot reproduces reproduction settings objective environment consequence_of update micro_batch micro_batches",
    "incidents.0.origin": "op variable expression role index shape dtype value masked masked_by file line function module operands "
    "source headroom_bits limit_nats sharded batch",
    "incidents.0.blame": "name role index value median low high row",
    "incidents.0.chain.0": "text file line value backward",
    "incidents.0.reproduction": "loss gradients exact words",
    "incidents.0.fixes.0": "id label where executed works proven loss bad_gradients diffs rest distortion",
    "incidents.0.rejected.0": "id label where executed works proven loss bad_gradients diffs rest distortion",
    "incidents.0.notes.0": "slug text step",
    "notes.0": "slug text step",
}


def at(data: Any, path: str) -> Any:
    for key in filter(None, path.split(".")):
        data = data[int(key) if key.isdigit() else key]
    return data


@pytest.fixture
def data() -> Any:
    """A verdict of one incident, through JSON."""
    written = Verdict((INCIDENT,), INCIDENT.notes, 9, 1, 2, "0.1").to_json()
    return json.loads(json.dumps(written, allow_nan=False))


@pytest.mark.parametrize("path", FIELDS, ids=lambda path: path or "verdict")
def test_the_names_of_the_fields_stay(data: Any, path: str) -> None:
    """Others read them: none goes, none is renamed, and one that comes is put down here."""
    assert set(at(data, path)) == set(FIELDS[path].split())


def test_what_stands_in_them(data: Any) -> None:
    """Numbers as they are, non-finite ones as text; of what was not executed no figures."""
    assert (data["schema"], data["nanscope"], data["status"], data["sentence"]) == (1, "0.1", "non-finite", "it overflowed.")
    assert (data["steps"], data["bad_steps"], data["skipped"]) == (9, 2, 1)
    (incident,) = data["incidents"]
    assert (incident["loss"], incident["origin"]["value"], incident["origin"]["operands"]) == ("nan", "inf", [["x", 99.0]])
    assert (incident["origin"]["headroom_bits"], incident["origin"]["limit_nats"]) == (-14.8, 88.72)
    assert incident["chain"] == [{"text": "mul[0]", "file": "loss.py", "line": 12, "value": "nan", "backward": False}]
    fix, advice = incident["fixes"][0], incident["rejected"][0]
    assert (fix["bad_gradients"], fix["loss"], fix["distortion"], fix["works"]) == ([0, 3], 0.5, 0.0, True)
    assert (advice["bad_gradients"], advice["loss"], advice["distortion"], advice["works"]) == (None, None, None, None)
    assert incident["status"] == "non-finite" and incident["remedies"] == ["clamp=20"]
    assert data["notes"] == incident["notes"] == [{"slug": "logged_loss", "text": "the log shows 0", "step": 7}]


def test_a_run_is_suspect_where_everything_stayed_finite() -> None:
    """One step that did not makes it a non-finite one."""
    spike = Incident(**{**{name: getattr(INCIDENT, name) for name in Incident.__slots__}, "suspect": True})
    assert (Verdict((spike,)).status, Verdict((spike, INCIDENT)).status, Verdict((), steps=1).status) == (
        "suspect",
        "non-finite",
        "healthy",
    )
    assert Verdict((spike,)).to_json()["incidents"][0]["status"] == "suspect"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Verdict((), steps=1), "1 step watched, no non-finite loss, gradient or weight"),
        (Verdict((), steps=3), "3 steps watched, no non-finite loss, gradient or weight"),
        (Verdict((), (Note("x", "y"), Note("nonfinite_absorbed", "it was absorbed")), 3), "3 steps watched, no non-finite loss, gradient or weight; it was absorbed"),
        (Verdict((INCIDENT,), steps=3), "it overflowed."),
        (Verdict((), steps=9, bad_steps=2), "9 steps watched, 2 bad, and nothing of that was kept"),
        (Verdict((), backwards=2), "2 backward passes watched, no non-finite loss, gradient or weight"),
        (Verdict(()), "nothing was watched, so nothing can be said of this run: no backward pass and no optimizer step was seen here"),
        (Verdict((), gaps=(Gap("x", "a thread"),)), "nothing was watched, so nothing can be said of this run: not seen: a thread"),
        (Verdict((), steps=1, gaps=(Gap("x", "a thread", 1, 2),)), "1 step watched, no non-finite loss, gradient or weight; not seen: a thread (2 times)"),
    ],
)  # fmt: skip
def test_the_sentence_of_a_run_is_that_of_its_first_incident(found: Verdict, expected: str) -> None:
    """Of one without: how much of it was watched, what was not, and what came close."""
    assert found.sentence == expected
    assert found.healthy == (not found.incidents and not found.gaps and not found.bad_steps and bool(found.steps or found.backwards))


def test_an_error_carries_what_was_found() -> None:
    """Who catches it has the verdict and the file."""
    error = NonFiniteError("it overflowed.", verdict=Verdict((INCIDENT,)), snapshot="a.safetensors")
    assert (error.slug, error.snapshot, error.verdict.incidents) == ("nonfinite-step", "a.safetensors", (INCIDENT,))


SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "verdict.schema.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_verdict_is_as_the_published_schema_says(kind: str) -> None:
    """Programs that read it know what they get."""
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(verdict_of(kind).to_json(), allow_nan=False)))


def test_the_published_schema_is_whole() -> None:
    """It is valid itself, and names the fields that are promised here."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    named = {"": SCHEMA, **{path: SCHEMA["$defs"][name] for path, name in PUBLISHED.items()}}
    for path, schema in named.items():
        assert set(FIELDS[path].split()) <= set(schema["properties"]), path


PUBLISHED = {
    "incidents.0": "incident", "incidents.0.origin": "origin", "incidents.0.blame": "blame", "incidents.0.chain.0": "link",
    "incidents.0.reproduction": "reproduction", "incidents.0.fixes.0": "fix", "incidents.0.notes.0": "note", "notes.0": "note",
}  # fmt: skip
