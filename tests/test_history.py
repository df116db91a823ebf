"""The book: one line a step, readable after any kind of death."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanscope.errors import NanscopeError
from nanscope.plain import parse, show
from nanscope.snapshot import history as module
from nanscope.snapshot.history import TAIL, TAIL_BYTES, Entry, History, Outline, frame, history, last_entries, last_entry, outline, read
from nanscope.snapshot.step import Stepped

MAYBE = st.none() | st.floats()
ENTRIES = st.builds(
    Entry,
    step=st.integers(0, 10**9),
    rank=st.integers(0, 4096),
    time=st.floats(0, 2e9),
    seconds=MAYBE,
    loss=MAYBE,
    grad_norm=MAYBE,
    log_ratio_max=MAYBE,
    log_ratio_max_masked=MAYBE,
    headroom=MAYBE,
    clip_fraction=MAYBE,
    nonfinite=st.booleans(),
    grad_norm_clipped=MAYBE,
    stepped=st.none() | st.sampled_from([str(one) for one in Stepped]),
    update=st.none() | st.integers(2, 99),
    micro_batches=st.none() | st.integers(2, 10**6),
    optimizer=st.none() | st.text(),
)


def same(got: Entry, wanted: Entry) -> bool:
    """Equal, where NaN equals NaN."""
    pairs = zip(dataclasses.astuple(got), dataclasses.astuple(wanted), strict=True)
    return all(a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)) for a, b in pairs)


@given(ENTRIES)
def test_an_entry_survives_strict_json(entry: Entry) -> None:
    """NaN and infinities included, in JSON that any reader takes."""
    text = json.dumps(entry.to_json(), allow_nan=False)
    assert same(Entry.from_json(json.loads(text)), entry)


@given(st.lists(ENTRIES, max_size=5))
def test_a_history_file_gives_the_entries_back(tmp_path_factory: pytest.TempPathFactory, entries: list[Entry]) -> None:
    """What is appended is what is read, in order."""
    path = tmp_path_factory.mktemp("book") / "history.rank0.jsonl"
    book = History(path)
    for entry in entries:
        book.append(entry)
    book.close()
    found = read(path) if entries else []
    assert len(found) == len(entries) and all(same(a, b) for a, b in zip(found, entries, strict=True))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_nonfinite_numbers_travel_as_text(value: float) -> None:
    """JSON has no NaN and no infinity; everything else goes as it is."""
    shown = show(value)
    assert isinstance(shown, str)
    back = parse(shown)
    assert back == value or (math.isnan(back) and math.isnan(value))


@pytest.mark.parametrize("value", [None, 0, 1.5, True, False, "taken", "none", "nano"])
def test_other_values_are_left_alone(value: object) -> None:
    """A text that is no number stays text."""
    assert parse(show(value)) == value and type(parse(show(value))) is type(value)


def test_every_line_is_on_disk_at_once(tmp_path: Path) -> None:
    """A killed process has written every step that it finished."""
    path = tmp_path / "history.jsonl"
    book = History(path)
    for step in range(3):
        book.append(Entry(step, 0, 1.0))
        assert [entry.step for entry in read(path)] == list(range(step + 1))
    book.close()
    book.close()  # twice does no harm


def test_a_half_written_last_line_is_skipped(tmp_path: Path) -> None:
    """At whichever byte the process was killed, the lines before it are read and nothing is raised."""
    path = tmp_path / "history.jsonl"
    book = History(path)
    for step in range(3):
        book.append(Entry(step, 0, 1.5, loss=math.nan, grad_norm=float(step)))
    book.close()
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert [entry.step for entry in read(path)] == [0, 1], f"cut after {cut} bytes"


@pytest.mark.parametrize(
    "rest",
    [
        b"[]", b"3", b'"text"', b"{}", b"null", b'{"step": 1}', b"{nonsense", b"\x00\x00\x00", b"\xff\xfe{", b"[" * 100_000,
        b'{"step": "x", "rank": 0, "time": 0.0}', b'{"step": 1, "rank": 0, "time": 0.0, "loss": "lots"}',
        b'{"step": 1, "rank": 0, "time": 0.0, "loss": [1]}', b'{"step": null, "rank": 0, "time": 0.0}',
        b'{"step": 1, "rank": 0, "time": 1' + b"0" * 400 + b"}", b'{"step": 1' + b"0" * 400 + b', "rank": 0, "time": 0.0}',
        b'{"step": 1, "rank": 0, "time": 0.0, "x": "' + b"x" * TAIL_BYTES + b'"}',
    ],
)  # fmt: skip
def test_a_damaged_line_is_skipped(tmp_path: Path, rest: bytes) -> None:
    """A line that is no entry costs this line only, whatever is in it."""
    path = tmp_path / "history.jsonl"
    good = json.dumps(Entry(7, 0, 1.0).to_json()).encode()
    path.write_bytes(good + b"\n" + rest + b"\n" + good + b"\n")
    assert [entry.step for entry in read(path)] == [7, 7]


def test_unknown_keys_of_a_later_release_are_ignored() -> None:
    """A newer nanscope may write more."""
    data = {**Entry(1, 0, 2.0).to_json(), "tokens": 12}
    assert Entry.from_json(data) == Entry(1, 0, 2.0)


def test_memory_holds_the_tail_only(tmp_path: Path) -> None:
    """A run of a million steps keeps the last ones in memory, all of them in the file, and counts on."""
    book = History(tmp_path / "history.jsonl")
    for step in range(TAIL + 10):
        book.append(Entry(step, 0, 0.0))
    book.close()
    assert len(book.entries) == TAIL and book.entries[0].step == 10 and book.count == TAIL + 10
    assert len(read(tmp_path / "history.jsonl")) == TAIL + 10


def test_a_folder_that_is_gone_costs_no_entry(tmp_path: Path) -> None:
    """Where the file cannot be opened the caller hears of it, and the entry is kept in memory."""
    book = History(tmp_path / "gone" / "history.jsonl")
    with pytest.raises(OSError):
        book.append(Entry(1, 0, 0.0))
    assert [entry.step for entry in book.entries] == [1]


def test_a_frame_has_a_row_per_step_and_a_column_per_field() -> None:
    """Missing numbers are missing in the frame, too."""
    found = frame([Entry(1, 0, 0.5, loss=1.0), Entry(2, 0, 0.7, loss=math.inf, nonfinite=True)])
    assert found.index.name == "step" and list(found.index) == [1, 2]
    assert set(found.columns) == {field.name for field in dataclasses.fields(Entry)} - {"step"}
    assert found["loss"].tolist() == [1.0, math.inf]
    assert found["grad_norm"].isna().all()
    assert found["nonfinite"].tolist() == [False, True]


def test_an_empty_frame_has_its_columns() -> None:
    """No step seen is no error."""
    found = frame([])
    assert len(found) == 0 and "loss" in found.columns and found.index.name == "step"


def test_the_history_of_a_run_has_a_row_per_step_and_rank(tmp_path: Path) -> None:
    """The files of all ranks, by step and then by rank; NaN and the infinities come back as numbers."""
    for rank, losses in ((1, [0.5, math.nan]), (0, [0.25, math.inf])):
        book = History(tmp_path / f"history.rank{rank}.jsonl")
        for step, loss in enumerate(losses, start=1):
            book.append(Entry(step, rank, 0.0, loss=loss))
        book.close()
    found = history(tmp_path)
    assert list(zip(found.index, found["rank"], strict=True)) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert found["loss"].tolist()[:3] == [0.25, 0.5, math.inf] and math.isnan(found["loss"].iloc[3])


def test_a_folder_without_a_history_is_an_error(tmp_path: Path) -> None:
    """It says what a run directory is."""
    with pytest.raises(NanscopeError, match="no history") as caught:
        history(tmp_path / "none")
    assert caught.value.slug == "no-run"


@pytest.mark.parametrize("block", [1, 7, 300, 1 << 20])
def test_a_history_in_short_is_that_of_all_its_lines(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the blocks end in which it is read; a last line that is half-written counts for nothing."""
    monkeypatch.setattr(module, "BLOCK", block)
    path = tmp_path / "history.rank3.jsonl"
    for bad in ((), (1,), (4, 5, 9), range(1, 10)):
        path.unlink(missing_ok=True)
        book = History(path, 'run "nonfinite": true, "ruined": "spike"')
        for step in range(1, 10):
            worker = 'a "ruined": "' if step == 2 else None
            spiked = step in bad and step % 2 == 0
            book.append(
                Entry(step, 3, 0.0, loss=0.5, nonfinite=step in bad and not spiked, ruined="spike" if spiked else None, worker=worker)
            )
        book.close()
        with path.open("ab") as file:
            file.write(b'{"step": 10, "rank": 3, "nonfinite": true')
        entries = read(path)
        assert outline(path) == Outline(9, len(bad), entries[bad[0] - 1] if bad else None, entries[-1], amid=True)
        assert last_entry(path) == entries[-1] and list(last_entries(path)) == entries[::-1]
    assert outline(tmp_path / "none") == Outline() and list(last_entries(tmp_path / "none")) == []


def test_a_file_tells_whether_its_process_was_in_a_step(tmp_path: Path) -> None:
    """A step that has begun and not ended leaves the first sign of its line; one that a process dropped by itself leaves nothing."""
    history = History(tmp_path / "history.rank0.jsonl", "id")
    history.begin()  # before there is a file
    history.append(Entry(1, 0, 1.0))
    assert not outline(history.path).amid
    history.begin()
    history.begin()
    assert outline(history.path).amid
    history.append(Entry(2, 0, 2.0))
    assert [entry.step for entry in read(history.path)] == [1, 2] and outline(history.path).steps == 2
    assert not outline(history.path).amid
    history.begin()
    history.close()
    assert not outline(history.path).amid and outline(history.path).steps == 2
