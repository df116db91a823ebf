"""A directory and its remote are kept alike, and training does not wait for it."""

import itertools
import threading
import time

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from nanscope.snapshot.remote import Remote
from nanscope.watching import mirror as module
from nanscope.watching.mirror import Mirror

NUMBER = itertools.count()


class Failures(list):
    def __call__(self, error: OSError) -> None:
        self.append(error)


@pytest.fixture
def remote():
    return Remote(f"memory://mirror-{next(NUMBER)}/run")


def content(remote: Remote, name: str) -> bytes:
    return remote._store.cat_file(f"{remote._root}/{name}")


def test_what_was_written_arrives(tmp_path, remote):
    """Every file that changed is there when the mirror is closed; its last state counts."""
    mirror = Mirror(tmp_path, remote, Failures())
    for name, data in [("run.json", b"1"), ("step-1.safetensors", b"22"), ("run.json", b"333")]:
        (tmp_path / name).write_bytes(data)
        mirror.changed(name)
    assert mirror.close(10.0) == []
    assert content(remote, "run.json") == b"333"
    assert content(remote, "step-1.safetensors") == b"22"


def test_a_file_that_went_away_goes_there_too(tmp_path, remote):
    """A consequence that made room is not left behind in the store."""
    mirror = Mirror(tmp_path, remote, Failures())
    remote.put("step-1.safetensors", b"1")
    mirror.changed("step-1.safetensors")
    assert mirror.close(10.0) == []
    assert remote.names() == {}


def test_a_history_is_sent_in_whole_lines_and_seldom(tmp_path, remote):
    """Its first lines go at once, then once a while, and what is left when the run ends."""
    mirror = Mirror(tmp_path, remote, Failures())
    path = tmp_path / "history.rank0.jsonl"
    path.write_bytes(b"{}\n{")
    mirror.changed(path.name)
    until = time.monotonic() + 10
    while not remote.names() and time.monotonic() < until:
        time.sleep(0.01)
    assert content(remote, path.name) == b"{}\n"
    with path.open("ab") as file:
        file.write(b"}\n")
    mirror.changed(path.name)
    time.sleep(0.05)
    assert content(remote, path.name) == b"{}\n"
    assert mirror.close(10.0) == []
    assert content(remote, path.name) == b"{}\n{}\n"


def test_a_store_that_fails_is_told_once_and_asked_again(tmp_path, remote, monkeypatch):
    """Nobody waits for it, and nothing is lost: what it refused is sent when it answers."""
    monkeypatch.setattr(module, "AGAIN", 0.01)
    broken = threading.Event()
    real = MemoryFileSystem.put_file

    def put_file(self, *args, **kwargs):
        if not broken.is_set():
            raise ConnectionError("no route")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    failures = Failures()
    mirror = Mirror(tmp_path, remote, failures)
    (tmp_path / "run.json").write_bytes(b"1")
    mirror.changed("run.json")
    until = time.monotonic() + 10
    while not failures and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    broken.set()
    assert mirror.close(10.0) == []
    assert [str(error) for error in failures] == [f"{remote.address('run.json')} cannot be reached (no route)"]
    assert content(remote, "run.json") == b"1"


def test_what_could_not_be_sent_is_named(tmp_path):
    """The end of the block does not wait for a store that never answers."""
    failures = Failures()
    mirror = Mirror(tmp_path, Remote("file:///proc/none/of/it"), failures)
    (tmp_path / "run.json").write_bytes(b"1")
    mirror.changed("run.json")
    assert mirror.close(10.0) == ["run.json"]
    assert len(failures) == 1


def test_what_others_wrote_is_fetched(tmp_path, remote):
    """The directory here is a view of the one there."""
    mirror = Mirror(tmp_path, remote, Failures())
    remote.put("history.rank1.jsonl", b"{}\n")
    mirror.fetch("history.*")
    assert (tmp_path / "history.rank1.jsonl").read_bytes() == b"{}\n"


def test_a_mirror_of_which_nothing_was_asked_has_no_thread(tmp_path, remote):
    """And it is closed at once."""
    before = threading.active_count()
    assert Mirror(tmp_path, remote, Failures()).close(0.0) == []
    assert threading.active_count() == before
