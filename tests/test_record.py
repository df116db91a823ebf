"""What a run says of itself: written whole, read without trust, and told in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanscope.errors import NanscopeError
from nanscope.plain import show
from nanscope.snapshot.coverage import Gap
from nanscope.snapshot.history import Entry, History
from nanscope.snapshot.processes import mark
from nanscope.snapshot.record import DROPPED, LISTED, Aftermath, Remark, RunRecord, listed, records, state, unwatched

FULL = RunRecord(
    run="2026-11-21T20-15-03-train-0a1b", rank=3, script="train", started="2026-11-21T20:15:03+0100", ended="2026-11-21T21:15:03+0100",
    process="0badcafe-1-2", status="non-finite", raised="ValueError", steps=9, skipped=1, bad_steps=4, backwards=18,
    gaps=(Gap("tape-failed", "a loss", 3, 2),), notes=(Remark("logged_loss", "the log shows 0", 5), Remark("x", "y")),
    aftermath=(Aftermath(5, 6, 9, 4),), held_peak=12345, targets=("Trainer",), nanscope="0.1.0", environment={"python": "3.11"},
)  # fmt: skip


@pytest.mark.parametrize(("record", "name"), [(FULL, "run.rank3.json"), (RunRecord(), "run.json")])
def test_a_record_is_read_as_it_was_written(tmp_path: Path, record: RunRecord, name: str) -> None:
    """Every field, and no temporary file beside it."""
    record.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name] and records(tmp_path) == [record]


def test_the_records_of_a_run_come_by_rank(tmp_path: Path) -> None:
    """And nothing else of its directory is taken for one."""
    for rank in (10, 2, 0):
        RunRecord(rank=rank).write(tmp_path)
    (tmp_path / "runner.json").write_text("{}")
    assert [record.rank for record in records(tmp_path)] == [0, 2, 10] and records(tmp_path / "gone") == []


def test_what_an_earlier_release_wrote_is_read(tmp_path: Path) -> None:
    """It says little, and not that the run still goes on."""
    old = {"nanscope": "0.0.9", "started": "2026-11-21T20:15:03+0100", "environment": {}, "on_nonfinite": "skip", "targets": ["Trainer"]}
    (tmp_path / "run.json").write_text(json.dumps(old))
    (record,) = records(tmp_path)
    assert (record.nanscope, record.on_nonfinite, record.status, record.alive) == ("0.0.9", "skip", "", False)
    assert state([record]) == "unknown"


WRONG: list[Any] = [
    3, [], None, "text", {"schema": 99}, {"schema": "1"}, {"schema": True}, {"schema": -1}, {"schema": 1, "steps": "many"},
    {"schema": 1, "gaps": [{"slug": 3}]}, {"schema": 1, "notes": {}}, {"schema": 1, "aftermath": [[1, 2]]}, {"schema": 1, "targets": [3]},
    {"schema": 1, "rank": None}, {"schema": 1, "process": []}, {"schema": 1, "steps": 10**4000}, {"schema": 1, "dropped": [-(2**63) - 1]},
]  # fmt: skip


DEEP = b'{"schema": 1, "environment": {"a": ' + b"[" * 500 + b"]" * 500 + b"}}"


@pytest.mark.parametrize(
    "data", [*(json.dumps(data).encode() for data in WRONG), b"", b"{", b"\xff\xff", b"[" * 100_000, b'{"a": 1} x', DEEP]
)
def test_a_damaged_record_is_one_clear_error(tmp_path: Path, data: bytes) -> None:
    """It names the file, and says what else there is; in a list it costs its own line only."""
    (tmp_path / "run.json").write_bytes(data)
    with pytest.raises(NanscopeError) as caught:
        records(tmp_path)
    assert caught.value.slug == "run-damaged" and str(tmp_path / "run.json") in str(caught.value) and "\n" not in str(caught.value)
    assert listed(tmp_path, "", {}).status == "damaged"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(FULL.to_json())), JSON)
def test_whatever_stands_in_a_field_is_read_or_refused(field: str, value: Any) -> None:
    """A hostile record is a TypeError or a ValueError, or as good as one that we wrote."""
    try:
        found = RunRecord.from_json({**FULL.to_json(), field: show(value)})
    except (TypeError, ValueError):
        return
    assert RunRecord.from_json(json.loads(json.dumps(found.to_json()))) == found or found != found


def test_how_a_run_ended() -> None:
    """The worst of its ranks; one that has not ended was killed, still runs, or nobody here can tell."""
    marks = (mark(), f"{mark().rpartition('-')[0]}-1", "00000000-1-1")
    here, gone, elsewhere = (RunRecord(process=process) for process in marks)
    ended = [RunRecord(status=status) for status in ("healthy", "partly watched", "non-finite")]
    assert state(ended) == "non-finite" and state(ended[:2]) == "partly watched"
    assert state([here, *ended]) == "running" and state([gone, here]) == "killed" and state([elsewhere]) == "unknown"


def test_a_run_in_one_line(tmp_path: Path) -> None:
    """What ended says it of itself; of what was killed the history tells the steps."""
    RunRecord(rank=0, script="train", started="s", status="non-finite", steps=7, bad_steps=2).write(tmp_path)
    (tmp_path / "step-000003.rank0.safetensors").write_bytes(b"x" * 100)
    history = History(tmp_path / "history.rank1.jsonl", "id")
    for step in range(1, 10):
        history.append(Entry(step, 1, 100.0 + step))
    history.close()
    found = listed(tmp_path, str(tmp_path), {path.name: path.stat().st_size for path in tmp_path.iterdir()})
    assert (found.script, found.started, found.status, found.steps, found.bad_steps) == ("train", "s", "non-finite", 9, 2)
    assert (found.ranks, found.snapshots, found.last) == (1, 1, 109.0)
    assert found.size == sum(path.stat().st_size for path in tmp_path.iterdir()) > 100


def test_a_run_that_was_killed_as_it_went_bad_says_what_lies_there(tmp_path: Path) -> None:
    """Its record and its history do not know of the step yet; on two ranks it is one."""
    RunRecord(rank=0, script="train", started="s").write(tmp_path)
    history = History(tmp_path / "history.rank0.jsonl", "id")
    history.append(Entry(1, 0, 100.0))
    history.close()
    for rank in range(2):
        (tmp_path / f"step-000002.rank{rank}.safetensors").write_bytes(b"x" * 100)
    found = listed(tmp_path, str(tmp_path), {path.name: path.stat().st_size for path in tmp_path.iterdir()})
    assert found.bad_steps == 1


def test_a_record_tells_no_more_than_is_written(tmp_path: Path) -> None:
    """Ranks are compared by the steps that they dropped, each with each, and each note is a line: what is longer is cut."""
    notes, after = tuple(Remark(f"slug{n}") for n in range(9999)), tuple(Aftermath(n, n, n, 1) for n in range(9999))
    RunRecord(run="r", dropped=tuple(range(1, 9999)), notes=notes, aftermath=after).write(tmp_path)
    (found,) = records(tmp_path)
    assert found.dropped == tuple(range(1, DROPPED + 1)) and (found.notes, found.aftermath) == (notes[:LISTED], after[:LISTED])


def test_a_note_of_what_was_not_watched_is_counted_whatever_it_is(tmp_path: Path) -> None:
    """One that cannot be read still says that something ran unseen; one that leads elsewhere tells nothing of what is there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("secret")
    for name, make in (
        ("1", Path.mkdir),
        ("2", lambda path: path.symlink_to(elsewhere)),
        ("3", lambda path: path.write_text("python3: why")),
    ):
        make(tmp_path / f"unwatched.{name}")
    assert unwatched(tmp_path) == ["its note cannot be read", "python3: why"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0 or sys.platform != "linux", reason="only root can mount a small disk")
def test_a_full_disk_has_room_for_how_the_run_ended(tmp_path: Path) -> None:
    """What its record says takes the place of what it said; otherwise its process would be told as killed."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        RunRecord(run="a", process=mark()).write(tmp_path)
        with suppress(OSError), (tmp_path / "full").open("wb") as file:
            file.write(b"x" * (1 << 20))
        RunRecord(run="a", status="healthy", steps=7).write(tmp_path)
        assert [(record.status, record.steps) for record in records(tmp_path)] == [("healthy", 7)]
        with pytest.raises(OSError):
            RunRecord(run="a", notes=(Remark("long", "x" * 10_000),)).write(tmp_path)
        assert records(tmp_path)[0].status == "healthy"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
