"""The verdict on a run directory that many ranks wrote: one cause, and who followed."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.scale import FROM_THE_END, Real, real_run, write_run

from nanscope.report.html import render_html
from nanscope.report.terminal import render_text
from nanscope.snapshot.coverage import Status
from nanscope.snapshot.file import save
from nanscope.snapshot.history import Entry, History
from nanscope.snapshot.record import RUNNING, Remark, RunRecord, records
from nanscope.snapshot.runs import bad_step_files, history_path
from nanscope.snapshot.step import Snapshot
from nanscope.verdict.incident import Verdict
from nanscope.verdict.run import LIKE, MOST, verdict_of
from nanscope.verdict.standing import Standing

RANKS, STEPS = 16, 200
AT = STEPS - FROM_THE_END


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    """What a real run of two ranks left."""
    return Real.of(real_run(tmp_path_factory.mktemp("real")))


@pytest.fixture
def run(real: Real, tmp_path: Path) -> Path:
    """The directory of a run of many ranks: each has a hit, and the last one left nothing."""
    write_run(real, tmp_path / "run", RANKS, STEPS)
    return tmp_path / "run"


def steps_of(verdict: Verdict) -> list[tuple[int, int, str]]:
    """Step, rank and cause of what is told."""
    return [(incident.step, incident.rank, str(incident.cause)) for incident in verdict.incidents]


def test_many_ranks_with_a_hit_are_one_incident(run: Path) -> None:
    """The rank that made it, with its cause and the consequence on it; of the others one line for each way in which it came to them."""
    found = verdict_of(run)
    assert steps_of(found) == [(AT, 8, "empty_mask_mean"), (AT + 1, 8, "poisoned_weights")] and len(found.causes) == 1
    assert found.ranks is not None and found.ranks.to_json() == {
        "world": RANKS,
        "groups": [
            {"standing": "first", "ranks": [8], "steps": [AT, AT], "came": ["made"]},
            {"standing": "same step", "ranks": [0, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14], "steps": [AT, AT], "came": ["all-reduce"]},
            {"standing": "later", "ranks": [1, 9], "steps": [AT + 1, AT + 1], "came": ["weights"]},
            {"standing": "never heard of", "ranks": [15], "steps": None, "came": []},
        ],
    }
    assert (found.steps, found.bad_steps, [one.of for one in found.aftermath]) == (STEPS, FROM_THE_END + 1, [AT])
    assert json.loads(json.dumps(found.to_json()))["ranks"] == found.ranks.to_json()


def test_the_sentence_names_who_was_first_and_what_carried_it(run: Path) -> None:
    """After what happened; and the renderers show the table."""
    found = verdict_of(run)
    assert found.sentence.endswith(
        "Rank 8 of 16 was first; 12 ranks in the same step (by all-reduce) and 2 ranks later (through the weights) followed."
    )
    text, page = render_text(found), render_html(found)
    assert "same step       0, 2–7, 10–14 (12)  step 190  by all-reduce" in text and text.count("● step") == 1
    assert "<td>0, 2–7, 10–14 (12)</td><td>step 190</td><td>by all-reduce</td>" in page and page.count('<article id="incident-') == 1


def test_ranks_that_left_nothing_or_did_not_end_are_named(run: Path) -> None:
    """With what is known of them, and as one gap however many they are."""
    gaps = {gap.slug: gap.text for gap in verdict_of(run).gaps}
    assert gaps["unheard"] == "rank 15 of 16 never reported: there is no file of it"
    assert gaps["unfinished"].startswith(f"what ranks 1, 3, 5, 7, 9, 11, 13 of 16 did after step {STEPS}, which ended at ")


def test_what_the_heads_do_not_say_the_records_and_the_lines_do(run: Path) -> None:
    """A rank that wrote no snapshot stands in the table all the same, whether it came to write a record or was killed."""
    expected = verdict_of(run).ranks
    for path in bad_step_files(run):
        if "rank8." not in path.name:
            path.unlink()
    assert verdict_of(run).ranks == expected
    for record in records(run):
        if record.status == RUNNING:
            replace(record, first=None).write(run)
    found = verdict_of(run).ranks
    assert found is not None and expected is not None and found.of(Standing.LATER) == expected.of(Standing.LATER)
    assert found.of(Standing.SAME_STEP) == expected.of(Standing.SAME_STEP) and found.of(Standing.FIRST) == (8,)


def test_where_nobody_made_it_one_of_those_that_it_reached_is_told(run: Path) -> None:
    """The rank that made it left nothing: the others say that it came to them, once."""
    for path in (*run.glob("step-*.rank8.*"), run / "run.rank8.json", history_path(run, 8)):
        path.unlink()
    found = verdict_of(run)
    assert steps_of(found)[0] == (AT, 0, "allreduce_nan") and len(found.causes) == 1
    assert found.ranks is not None and found.ranks.of(Standing.FIRST) == () and found.ranks.of(Standing.UNHEARD) == (8, 15)
    assert found.sentence.endswith("no rank says that it made it.")


def test_ranks_that_met_the_same_by_themselves_are_one_incident(real: Real, run: Path) -> None:
    """At the same line in the same step; at another line, or in another step, it is another cause."""
    for rank in (2, 3, 4):
        save(replace(real.made, rank=rank, step=AT), run)
    save(replace(real.made, rank=5, step=AT + 5), run)
    found = verdict_of(run)
    assert [(one.step, one.rank) for one in found.causes] == [(AT, 2), (AT + 5, 5)]
    assert found.ranks is not None and found.ranks.of(Standing.FIRST) == (2, 3, 4, 8)
    assert "4 of 16 ranks met it by themselves, rank 2 is shown" in found.sentence


def test_only_so_many_causes_are_explained(real: Real, tmp_path: Path) -> None:
    """Of a run in which each step has one of its own; how many more there are is said."""
    for rank in range(MOST + 3):
        save(replace(real.made, rank=rank, step=rank + 1, reached=replace(real.made.reached, bad_weights=0)), tmp_path)
    found = verdict_of(tmp_path)
    assert len(found.incidents) == MOST and [note.text for note in found.notes if note.slug == "not_explained"] == [
        "3 further bad steps have a cause of their own: `nanscope report FILE` explains one"
    ]


def test_a_report_is_completed_by_files_that_come_late(run: Path) -> None:
    """A rank whose files a folder does not list yet is named, and counted once they are there."""
    expected, away = verdict_of(run), run.parent / "away"
    away.mkdir()
    moved = [*run.glob("*.rank4.*"), *run.glob("*.rank6.*")]
    for path in moved:
        path.rename(away / path.name)
    early = verdict_of(run)
    assert early.ranks is not None and early.ranks.of(Standing.UNHEARD) == (4, 6, 15)
    assert "ranks 4, 6, 15 of 16 never reported: there is no file of them" in {gap.text for gap in early.gaps}
    for path in moved:
        (away / path.name).rename(path)
    assert verdict_of(run).to_json() == expected.to_json()


def test_a_healthy_run_of_which_a_rank_was_never_heard_is_not_called_healthy(tmp_path: Path) -> None:
    """Healthy is said of what was watched: until its record is there, and says that it ended."""
    for rank in range(3):
        History(history_path(tmp_path, rank), "r").append(Entry(step=1, rank=rank, time=0.0, loss=1.0))
        RunRecord(rank=rank, world=4, status="healthy", steps=1).write(tmp_path)
    assert (verdict_of(tmp_path).status, [gap.slug for gap in verdict_of(tmp_path).gaps]) == (Status.PARTLY, ["unheard"])
    History(history_path(tmp_path, 3), "r").append(Entry(step=1, rank=3, time=0.0, loss=1.0))
    found = verdict_of(tmp_path)
    assert [gap.slug for gap in found.gaps] == ["unfinished"] and found.gaps[0].text.startswith("what rank 3 of 4 did after step 1, ")
    RunRecord(rank=3, world=4, status="healthy", steps=1).write(tmp_path)
    assert verdict_of(tmp_path).status is Status.HEALTHY


def test_four_real_ranks_of_which_two_make_the_same(tmp_path: Path) -> None:
    """The other two are reached by all-reduce: one cause, and all four in the table."""
    found = verdict_of(real_run(tmp_path, world=4, bad=2))
    assert [(one.step, one.rank, str(one.cause)) for one in found.causes] == [(3, 0, "empty_mask_mean")] and not found.gaps
    assert found.ranks is not None and {str(group.standing): group.ranks for group in found.ranks.groups} == {
        "first": (0, 1),
        "same step": (2, 3),
    }


def test_what_each_of_many_ranks_notes_is_told_of_a_few(tmp_path: Path) -> None:
    """Once where it is the same, and else so many of a kind; a record that claims more ranks than there are machines is not counted through."""
    for rank in range(3 * LIKE):
        notes = (Remark("logged_loss", "the same", 3), Remark("skipped_alone", f"rank {rank} skipped", 3))
        RunRecord(rank=rank, world=10**15, status="healthy", steps=1, notes=notes).write(tmp_path)
    found = verdict_of(tmp_path)
    assert [note.text for note in found.notes if note.slug == "logged_loss"] == ["the same"]
    alone = [note.text for note in found.notes if note.slug == "skipped_alone"]
    assert len(alone) == LIKE + 1 and alone[-1] == f"and {2 * LIKE} more notes of this kind"
    assert found.ranks is not None and (found.ranks.world, found.status) == (0, Status.HEALTHY)


def test_one_snapshot_is_held_at_a_time(real: Real, tmp_path: Path) -> None:
    """Each may be as large as a batch: it is let go of before the next one is read."""
    for rank in range(4):
        save(replace(real.made, rank=rank, step=rank + 1, reached=replace(real.made.reached, bad_weights=0)), tmp_path)
    held: list[int] = []

    def loaded() -> int:
        gc.collect()
        return sum(isinstance(one, Snapshot) for one in gc.get_objects())

    before = loaded()

    def track(files: Sequence[Path]) -> Iterator[Path]:
        for path in files:
            held.append(loaded() - before)
            yield path

    assert len(verdict_of(tmp_path, track).incidents) == 4 and max(held) == 0


def test_a_damaged_snapshot_keeps_nothing_else_back(run: Path) -> None:
    """Whether its head is cut off or its tensors are: the others are told, and it is named among what was not seen."""
    whole = verdict_of(run)
    other = next(run.glob(f"step-{AT:06d}.rank3.safetensors"))
    data = other.read_bytes()
    first = Path(whole.incidents[0].snapshot or "")
    for path, cut in ((other, data[:100]), (other, b"")):
        path.write_bytes(cut)
        found = verdict_of(run)
        assert steps_of(found) == steps_of(whole)
        assert [gap.text.partition(":")[0] for gap in found.gaps if gap.slug == "damaged-snapshot"] == [f"what {path.name} holds"]
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    assert sum(gap.slug == "damaged-snapshot" for gap in verdict_of(run).gaps) == 2


@pytest.mark.parametrize(
    ("record", "status", "gaps"),
    [
        (RunRecord(status="healthy", steps=3), Status.HEALTHY, []),
        (RunRecord(status="non-finite", steps=3), Status.NONFINITE, []),  # weights were bad when the block ended, say
        (RunRecord(status="suspect", steps=3), Status.NONFINITE, []),
        (RunRecord(status="partly watched", steps=3), Status.PARTLY, ["unclear-end"]),
        (RunRecord(status="mended", steps=3), Status.PARTLY, ["unclear-end"]),
        (None, Status.PARTLY, ["unfinished"]),
    ],
)
def test_nothing_better_is_said_than_the_record_does(tmp_path: Path, record: RunRecord | None, status: Status, gaps: list[str]) -> None:
    """What it found may lie nowhere any more, and its word may be one of a later release; and without one nobody knows of an end."""
    History(history_path(tmp_path, 0), "r").append(Entry(step=1, rank=0, time=0.0, loss=1.0))
    if record is not None:
        record.write(tmp_path)
    found = verdict_of(tmp_path)
    assert (found.status, [gap.slug for gap in found.gaps]) == (status, gaps), found.sentence


def test_a_bad_step_whose_only_file_is_damaged_was_bad(tmp_path: Path) -> None:
    """Also where the record was copied without what came after it."""
    RunRecord(status="healthy", steps=3).write(tmp_path)
    (tmp_path / "step-000002.rank0.safetensors").write_bytes(b"")
    assert verdict_of(tmp_path).status is Status.NONFINITE


def test_files_of_several_runs_are_said_to_be_so(tmp_path: Path) -> None:
    """Whoever copies them together gets counts that are no run's."""
    for rank, name in enumerate(("one", "two")):
        RunRecord(run=name, rank=rank, status="healthy", steps=3).write(tmp_path)
    assert [note.slug for note in verdict_of(tmp_path).notes] == ["mixed_runs"]
