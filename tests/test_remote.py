"""A remote folder: any address that fsspec knows."""

import itertools

import pytest

from nanscope.snapshot.files import PREFIX, SUFFIX
from nanscope.snapshot.remote import Remote, is_remote

NUMBER = itertools.count()


@pytest.fixture(params=["memory", "file"])
def remote(request: pytest.FixtureRequest, tmp_path):
    return Remote(f"memory://runs-{next(NUMBER)}/one" if request.param == "memory" else f"file://{tmp_path}/runs/one")


@pytest.mark.parametrize("path", ["s3://bucket/runs", "gs://bucket", "memory://x", "file:///tmp/x", "simplecache::s3://bucket/runs"])
def test_an_address_is_no_path(path):
    """What has a scheme is an address."""
    assert is_remote(path)


@pytest.mark.parametrize("path", ["runs", "/tmp/runs", "C:/runs", "a:b", "./s3:/x", "runs/s3://x"])
def test_a_path_is_no_address(path):
    """A drive letter and a colon in a name make no address."""
    assert not is_remote(path)


def test_a_folder_that_is_not_there_is_empty(remote):
    """Nothing was written yet, which is no error."""
    assert remote.names() == {}


def test_what_was_put_is_fetched_whole(remote, tmp_path):
    """A file comes back byte for byte, from bytes and from a file, and a folder within it is told by its name."""
    (tmp_path / "source").write_bytes(b"\x00\xffabc\n" * 1000)
    remote.put("a.bin", tmp_path / "source")
    remote.put("b.jsonl", b"{}\n")
    (remote / "inner").put("c", b"c")
    assert set(remote.names()) == {"a.bin", "b.jsonl", "inner/"}
    known = remote.fetch(tmp_path / "here")
    assert (tmp_path / "here" / "a.bin").read_bytes() == b"\x00\xffabc\n" * 1000
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["a.bin", "b.jsonl"]
    assert set(known) == {"a.bin", "b.jsonl"}


def test_what_is_being_written_is_no_file_yet(remote, tmp_path):
    """Half a file of another process, under the name that it is written by, is not told and not fetched."""
    written = f"{PREFIX}77-run.json{SUFFIX}"
    remote.put("run.json", b"{}")
    remote._store.pipe_file(f"{remote._root}/{written}", b"{")
    assert set(remote.names()) == {"run.json"} == set(remote.fetch(tmp_path / "here"))
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["run.json"]


def test_only_what_has_changed_is_fetched_again(remote, tmp_path):
    """A file that is known and is the same is left alone; one that has changed, or went away here, comes again."""
    remote.put("a", b"1")
    remote.put("b", b"1")
    known = remote.fetch(tmp_path / "here")
    (tmp_path / "here" / "a").write_bytes(b"mine")
    remote.put("b", b"22")
    remote.fetch(tmp_path / "here", known=known)
    assert (tmp_path / "here" / "a").read_bytes() == b"mine"
    assert (tmp_path / "here" / "b").read_bytes() == b"22"
    (tmp_path / "here" / "a").unlink()
    remote.fetch(tmp_path / "here", known=known)
    assert (tmp_path / "here" / "a").read_bytes() == b"1"


def test_a_pattern_takes_some(remote, tmp_path):
    """Histories alone, for example."""
    remote.put("history.rank1.jsonl", b"x\n")
    remote.put("step-000001.rank1.safetensors", b"x")
    remote.fetch(tmp_path, lambda name: name.startswith("history."))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["history.rank1.jsonl"]


def test_what_is_removed_is_gone(remote):
    """Removing twice is no error."""
    remote.put("a", b"1")
    remote.remove("a")
    remote.remove("a")
    assert remote.names() == {}


@pytest.mark.parametrize(
    ("url", "words"),
    [("nosuchstore://bucket/x", "nosuchstore"), ("file:///proc/nobody/can/write/here", "cannot be reached")],
)
def test_what_a_store_raises_is_one_error(url, words):
    """A scheme that nobody knows and a folder that cannot be made are OSErrors that name the address."""
    with pytest.raises(OSError, match=words) as raised:
        Remote(url).put("a", b"1")
    assert url in str(raised.value)
