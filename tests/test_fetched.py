"""What an address means is read as if it lay here."""

import itertools

import pytest

from nanscope.errors import NanscopeError
from nanscope.snapshot.fetched import fetched
from nanscope.snapshot.remote import Remote
from nanscope.snapshot.runs import find_run

NUMBER = itertools.count()


@pytest.fixture
def folder():
    remote = Remote(f"memory://fetched-{next(NUMBER)}/runs")
    for run in ("2026-01-01T00-00-00-a", "2026-01-02T00-00-00-b", "2026-01-02T00-00-00-b-2", "2026-01-02T00-00-00-b-10"):
        (remote / run).put("run.json", run.encode())
        (remote / run).put("step-000003.rank0.safetensors", b"x")
    return remote


def test_a_path_is_itself(tmp_path):
    """Nothing is copied."""
    with fetched(tmp_path) as found:
        assert found.path == tmp_path
        assert found.address(tmp_path / "x") == str(tmp_path / "x")


def test_of_a_folder_of_runs_the_last_is_meant(folder):
    """By name, where nothing points to it."""
    with fetched(folder.url) as found:
        run_dir, _ = find_run(found.path)
        assert (run_dir / "run.json").read_text() == "2026-01-02T00-00-00-b-10"
        assert (
            found.address(run_dir / "step-000003.rank0.safetensors")
            == f"{folder.url}/2026-01-02T00-00-00-b-10/step-000003.rank0.safetensors"
        )
    assert not found.path.exists()


def test_the_pointer_says_which_is_the_last(folder):
    """As on a disk; one that points to nothing says nothing."""
    folder.put("latest", b"2026-01-01T00-00-00-a\n")
    with fetched(folder.url + "/") as found:
        assert find_run(found.path)[0].name == "2026-01-01T00-00-00-a"
    folder.put("latest", b"../../etc\n")
    with fetched(folder.url) as found:
        assert find_run(found.path)[0].name == "2026-01-02T00-00-00-b-10"


def test_one_run_is_fetched_and_of_all_runs_what_is_wanted(folder):
    """A run by its own address; all of them by pattern, without their snapshots."""
    with fetched(f"{folder.url}/2026-01-01T00-00-00-a") as found:
        assert find_run(found.path)[0] == found.path
        assert {path.name for path in found.path.iterdir()} == {"run.json", "step-000003.rank0.safetensors"}
    with fetched(folder.url, lambda name: name == "run.json", every=True) as found:
        assert len(find_run(found.path)[1]) == 4
        assert not list(found.path.glob("*/*.safetensors"))


def test_a_file_is_fetched_alone(folder):
    """A snapshot by its address."""
    url = f"{folder.url}/2026-01-01T00-00-00-a/step-000003.rank0.safetensors"
    with fetched(url) as found:
        assert found.path.read_bytes() == b"x"
        assert found.address(found.path) == url


@pytest.mark.parametrize("url", ["memory://nowhere/runs", "memory://nowhere/step-000001.rank0.safetensors", "nosuchstore://bucket/runs"])
def test_an_address_that_nothing_is_at_is_one_error(url):
    """It names the address."""
    with pytest.raises(NanscopeError, match=url) as raised, fetched(url):
        pass
    assert raised.value.slug == "no-run"
