"""The logbook: what of a run is kept, in memory and in its folder, and what is only counted."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import accumulated, grpo_steps, policy, stale_at
from seen import NAN

import nanscope
from nanscope.program.program import Program
from nanscope.snapshot.bad_step import BadStep
from nanscope.snapshot.history import Entry
from nanscope.snapshot.observation import Came
from nanscope.snapshot.record import RunRecord, records
from nanscope.snapshot.runs import Folder
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.watching.afterwards import arrived
from nanscope.watching.logbook import NOTES, Logbook
from nanscope.watching.place import Place


def test_an_unwritable_folder_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The run is written to a temporary folder, which is said once."""
    blocked, elsewhere = tmp_path / "file", tmp_path / "elsewhere"
    blocked.write_text("in the way")
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    with caplog.at_level(logging.WARNING, "nanscope"), nanscope.watch(out=blocked / "run") as scope:
        grpo_steps(policy(), 3, stale_at(0, 3))
    (incident,) = scope.verdict.incidents
    assert incident.snapshot is not None and Path(incident.snapshot).is_relative_to(elsewhere) and Path(incident.snapshot).is_file()
    said = [record.message for record in caplog.records if "out-unwritable" in record.message]
    assert len(said) == 1 and str(blocked) in said[0] and str(scope.out) in said[0]


def test_where_nothing_can_be_written_memory_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even a temporary folder: the verdict is whole, says that nothing is on disk, and there is one warning of it."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setattr(tempfile, "tempdir", str(blocked))
    with caplog.at_level(logging.WARNING, "nanscope"), nanscope.watch(out=blocked / "run", on_nonfinite="skip") as scope:
        grpo_steps(policy(), 6, lambda step, batch: stale_at(0, 3, step)(step, batch) if step in (2, 3, 4) else None)
    assert [incident.step for incident in scope.verdict.incidents] == [3, 4, 5]
    (note,) = [note.text for note in scope.verdict.notes if note.slug == "not_on_disk"]
    why, *found = note.split("; ")
    assert why == "steps 3, 4 and 5 could not be kept on disk: there is no folder to write to"
    assert len(found) == 3 and found[0].startswith("step 3: ") and "loops.py:" in found[0]  # the record of the run has no more of it
    assert sum("unwrit" in record.message for record in caplog.records) == 1


def test_later_bad_steps_are_counted_not_saved(tmp_path: Path) -> None:
    """Once the weights are NaN every step is bad: a few files, then a count."""
    with nanscope.watch(out=tmp_path, limit=2) as scope:
        grpo_steps(policy(), 8, stale_at(0, 3))
    assert len(list(scope.out.glob("*.safetensors"))) == 2
    assert scope.verdict.bad_steps == 6
    assert [incident.step for incident in scope.verdict.incidents] == [3, 4]


def test_every_bad_micro_batch_has_a_file_of_its_own(tmp_path: Path) -> None:
    """Two bad backward passes of one step are two files, two incidents and one bad step."""
    with nanscope.watch(out=tmp_path, on_nonfinite="skip") as scope:
        accumulated(2, {(2, 1), (2, 2)})
    names = sorted(path.name for path in scope.out.glob("*.safetensors"))
    assert names == ["step-000002.rank0.part2.safetensors", "step-000002.rank0.safetensors"]
    assert [nanscope.load(scope.out / name).part for name in names] == [2, 1]
    assert [incident.origin.index for incident in scope.verdict.incidents] == [(1, 1), (1, 2)]
    assert scope.verdict.bad_steps == 1


def test_of_one_step_not_every_micro_batch_is_saved(tmp_path: Path) -> None:
    """A run of long accumulation does not spend its files on one step."""
    with nanscope.watch(out=tmp_path, on_nonfinite="skip", limit=1) as scope:
        accumulated(3, {(2, 1), (2, 2), (3, 1)})
    assert [path.name for path in scope.out.glob("*.safetensors")] == ["step-000002.rank0.safetensors"]
    assert scope.verdict.bad_steps == 2


def bad(step: int, part: int = 1, **changes: Any) -> Snapshot:
    """A bad step of which no more is known than how far it got."""
    fields: dict[str, Any] = {"loss": None, "grads": {}, "reached": Reached(NAN, 3, 3), "part": part, "rank": 0, **changes}
    return Snapshot(step=step, program=Program((), (), -1), tensors={}, **fields)


@pytest.fixture
def book(tmp_path: Path) -> Logbook:
    """A logbook that has begun."""
    return begun(tmp_path)


def begun(folder: Path, **options: Any) -> Logbook:
    """A logbook of a run in this directory."""
    found = Logbook(Folder.of(folder), limit=2, **options)
    found.open(Place(folder, "the-run", 0), RunRecord(script="train", targets=("Trainer",)))
    return found


WANTS = [  # steps that were saved -> further ones, and whether there is room for them
    ((), {1: True}),
    ((3,), {3: True, 4: True}),
    ((3, 3), {3: False, 4: True}),
    ((3, 4), {3: True, 4: True, 5: False}),
    ((3, 3, 4, 4), {3: False, 4: False, 5: False}),
]


@pytest.mark.parametrize(("saved", "wanted"), WANTS)
def test_there_is_room_for_so_many_steps_and_so_many_passes_of_each(book: Logbook, saved: tuple[int, ...], wanted: dict[int, bool]) -> None:
    """A limit of 2: two steps, and two backward passes of each."""
    for part, step in enumerate(saved, start=1):
        book.keep(bad(step, part))
    assert {step: book.wants(step) for step in wanted} == wanted


def test_the_folder_says_what_ran(book: Logbook) -> None:
    """run.json is there from the beginning, with the id that every line of the history has; it is whole again at the end."""
    about = json.loads((book.folder / "run.json").read_text(encoding="utf-8"))
    assert (about["status"], about["run"], about["ended"]) == ("running", "the-run", "")
    assert about["targets"] == ["Trainer"] and about["nanscope"] == nanscope.__version__ and "torch" in about["environment"]["versions"]
    for step in (1, 2):
        book.enter(Entry(step, 0, 0.0))
    book.close()
    lines = [json.loads(line) for line in (book.folder / "history.rank0.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["step"], line["run"]) for line in lines] == [(1, "the-run"), (2, "the-run")] and book.steps == 2
    (record,) = records(book.folder)
    assert (record.status, record.steps, bool(record.ended)) == ("healthy", 2, True)


def test_a_blank_snapshot_knows_the_run_so_far(book: Logbook) -> None:
    """Step, rank, part and history; its loss is a copy that outlives the step."""
    book.enter(Entry(1, 0, 0.0, loss=0.5))
    loss = torch.tensor(0.25, requires_grad=True)
    blank = book.blank(2, loss, 3, Reached(0.25))
    with torch.no_grad():
        loss.fill_(9.0)
    assert (blank.step, blank.rank, blank.part, [entry.step for entry in blank.history]) == (2, 0, 3, [1])
    assert blank.loss is not None and float(blank.loss) == 0.25 and not blank.loss.requires_grad
    assert book.blank(2, None, 1, Reached()).loss is None


def test_what_a_step_reached_is_added_to_its_file(book: Logbook) -> None:
    """The optimizer comes after the snapshot; a step that was not saved has nothing to add to."""
    book.keep(bad(3))
    book.mark(3, stepped="taken", weights=5, bad_weights=2)
    expected = Reached(NAN, 3, 3, 5, 2, "taken")
    assert repr(book.snapshots[0].reached) == repr(expected)
    assert repr(nanscope.load(book.folder / "step-000003.rank0.safetensors").reached) == repr(expected)
    book.mark(4, stepped="skipped")
    assert book.snapshots[0].reached.stepped == "taken"
    Logbook(Folder.of(book.folder), 2).mark(3, stepped="skipped")  # nothing was saved: nothing to mark, and no error


def test_a_mark_that_changes_nothing_writes_nothing(book: Logbook) -> None:
    """The file is not written again."""
    book.keep(bad(3, reached=Reached(0.5, 3, 3)))
    path = book.paths[0]
    assert path is not None
    path.unlink()
    book.mark(3, gradients=3)
    assert not path.exists()
    book.mark(3, gradients=4)
    assert path.exists()


LOGGED: list[tuple[float | None, list[Any], float | None, bool]] = [  # loss, what the trainer logged -> setting, whether it is noted
    (NAN, [{"step": 3, "loss": 0.0}], 0.0, True),
    (NAN, [{"step": 2, "loss": 0.5}, "junk", {"step": 3, "lr": 1.0}, {"step": 3, "loss": 0.25}, {"step": 3, "loss": 9.0}], 0.25, True),
    (NAN, [{"step": 3, "loss": NAN}], NAN, False),
    (0.5, [{"step": 3, "loss": 0.4}], 0.4, False),
    (None, [{"step": 3, "loss": 0.4}], None, False),
    (NAN, [{"step": 3, "loss": "0.4"}], None, False),
    (NAN, [{"step": 2, "loss": 0.5}], None, False),
    (NAN, [], None, False),
]


@pytest.mark.parametrize(("loss", "logged", "shown", "noted"), LOGGED)
def test_the_trainers_log_is_compared(book: Logbook, loss: float | None, logged: list[Any], shown: float | None, noted: bool) -> None:
    """Where it shows a finite number for a loss that was not, the note says both, in memory and in the file, once."""
    book.keep(bad(3, reached=Reached(loss, 3, 3), notes=(("logged_loss", "of the process"), ("other", "x")), settings={}))
    book.compare(logged)
    snapshot = book.snapshots[0]
    assert repr(snapshot.settings.get("logged_loss")) == repr(shown)
    text = f"the trainer logged {shown} for this step; the true loss was {loss}"
    assert snapshot.notes == ((("other", "x"), ("logged_loss", text)) if noted else (("logged_loss", "of the process"), ("other", "x")))
    assert nanscope.load(book.folder / "step-000003.rank0.safetensors").notes == snapshot.notes


def test_a_note_is_kept_once_and_not_for_ever(book: Logbook) -> None:
    """The same words at another step are the same note, and a run has room for some."""
    for step in (1, 2):
        book.note("absorbed", "x", step)
    book.note("absorbed", "y", 3)
    assert [(note.text, note.step) for note in book.notes] == [("x", 1), ("y", 3)] and book.takes_notes()
    for number in range(2 * NOTES):
        book.note("absorbed", str(number), 4)
    assert len(book.notes) == NOTES and not book.takes_notes()


def test_a_verdict_is_made_again_only_where_something_changed(book: Logbook) -> None:
    """While the run goes on each time, afterwards once: a diagnosis replays the step."""
    book.keep(bad(3))
    running = book.verdict()
    assert book.verdict() is not running
    book.close()
    ended = book.verdict()
    assert book.verdict() is ended and len(ended.incidents) == 1
    book.mark(3, stepped="taken")
    assert book.verdict() is not ended and book.verdict().incidents[0].reached["stepped"] == "taken"
    book.keep(bad(4))
    assert len(book.verdict().incidents) == 2


def test_a_verdict_has_the_counts_of_the_run(book: Logbook) -> None:
    """Steps, skipped steps, bad steps, notes, and where the files are."""
    book.enter(Entry(1, 0, 0.0))
    book.bad_steps, book.skipped = 4, 2
    book.note("absorbed", "x", 1)
    book.keep(bad(3))
    found = book.verdict()
    assert (found.steps, found.skipped, found.bad_steps, [note.text for note in found.notes]) == (1, 2, 4, ["x"])
    assert found.incidents[0].snapshot == str(book.folder / "step-000003.rank0.safetensors")


def test_what_cannot_be_written_is_kept_in_memory(book: Logbook, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that becomes full: one warning, and the verdict says what is not on it. When there is room again it is written."""
    home = book.folder.rename(book.folder.with_name("away"))
    book.folder.write_text("in the way")
    with caplog.at_level(logging.WARNING, "nanscope"):
        book.keep(bad(3))
        book.keep_asked(bad(4, asked=True))
        book.enter(Entry(4, 0, 0.0))
    assert book.paths == [None] and len(book.snapshots) == 1 and book.saved == []
    assert sum("[unwritten]" in record.message for record in caplog.records) == 1
    found = book.verdict()
    assert found.incidents[0].snapshot is None and [note.slug for note in found.notes] == ["not_on_disk"]
    book.folder.unlink()
    home.rename(book.folder)
    book.close()
    assert book.paths == [book.folder / "step-000003.rank0.safetensors"] and not book.verdict().notes


def test_a_step_that_is_left_to_other_ranks_is_told_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The record says in short what it was, the log where to read on, and nobody is told that the disk is full."""
    monkeypatch.setenv("RANK", "40")
    monkeypatch.setenv("WORLD_SIZE", "64")
    book = Logbook(Folder.of(tmp_path), limit=2)
    book.open(Place(tmp_path, "the-run", 40, shared=True), RunRecord(script="train"))
    came = arrived("w", torch.tensor([NAN]))
    book.keep(bad(3, rank=40, observation=came, found=came))
    book.close()
    (record,) = records(tmp_path)
    assert (record.world, record.first) == (64, BadStep(step=3, rank=40, came=Came.REDUCED))
    assert book.paths == [None] and not list(tmp_path.glob("*.safetensors")) and not record.notes
    assert f"other ranks write it: nanscope report {tmp_path}" in caplog.text
    assert [incident.step for incident in book.verdict().incidents] == [3], "it is in memory"


def test_rank_0_says_at_the_end_who_has_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On the log and in its own verdict; not in its record, since a later report knows better. Nobody waits where the run was broken off."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, raised, expected in ((0, "", 1), (0, "SIGTERM", 0), (1, "", 0)):
        caplog.clear()
        folder = tmp_path / f"{rank}{raised}"
        folder.mkdir()
        book = Logbook(Folder.of(folder), limit=2)
        book.open(Place(folder, "the-run", rank, shared=True), RunRecord(script="train"))
        book.close(raised)
        said = "rank 1 of 2 has not reported: there is no line of it"
        assert caplog.text.count(f"[not-heard-of]: {said}; when all have: nanscope report {folder}") == expected
        assert [note.text for note in book.verdict().notes if note.slug == "not_heard_of"] == [said] * expected
        assert not records(folder)[0].notes
