"""A store over the network, as moto plays S3: what a run leaves there is whole, and every verb reads it from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_member import RANKS

pytest.importorskip("s3fs", reason="s3fs is not installed")
pytest.importorskip("moto.server", reason="moto[server] is not installed")
pytestmark = pytest.mark.skipif(os.name == "nt", reason="processes are those of Unix")

KILLED = """
if dist.get_rank() == 1 and "killed" in sys.argv:
    os.kill(os.getpid(), 9)
dist.destroy_process_group()"""


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which s3:// is a server of our own, with a bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    own = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    found = {**os.environ, **own, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "TMPDIR": str(tmp_path_factory.mktemp("tmp"))}
    subprocess.run([sys.executable, "-c", "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"], env=found, check=True, timeout=60)
    yield found
    server.stop()


def nanscope(folder: Path, environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    (folder / "ranks.py").write_text(RANKS.replace("\ndist.destroy_process_group()", KILLED))
    line = [sys.executable, "-m", "nanscope", *words]
    return subprocess.run(line, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)


def test_a_run_of_two_ranks_on_s3(tmp_path: Path, environ: dict[str, str]) -> None:
    """One verdict; all files of both ranks are there, and nothing of them here; the verbs and the API take the address."""
    torchrun = ("--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "ranks.py")
    done = nanscope(tmp_path, environ, "run", "--json", "v.json", "--out", "s3://bucket/runs", *torchrun, "bad")
    assert done.returncode == 3, done.stderr
    first = json.loads((tmp_path / "v.json").read_text())["incidents"][0]
    assert (first["rank"], first["cause"]) == (1, "log_zero") and first["snapshot"].startswith("s3://bucket/runs/")
    run = first["snapshot"].rpartition("/")[0]
    code = f"import s3fs; print(*(path.rpartition('/')[2] for path in s3fs.S3FileSystem().ls('{run}')))"
    there = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert set(there) == {
        *("run.json", "report.html", "report.png"),
        *(f"{name}.rank{rank}.{end}" for rank in range(2) for name, end in (("run", "json"), ("history", "jsonl"))),
        *(f"step-00000{step}.rank{rank}.safetensors" for rank in range(2) for step in (2, 3)),
    }
    assert [path for path in (Path(environ["TMPDIR"]) / f"nanscope-{os.getuid()}").rglob("*.*") if path.is_file()] == []
    assert nanscope(tmp_path, environ, "report", "s3://bucket/runs", "-o", "again.json").returncode == 3
    again = json.loads((tmp_path / "again.json").read_text())
    assert (
        again["ranks"] == json.loads((tmp_path / "v.json").read_text())["ranks"] and again["incidents"][0]["snapshot"] == first["snapshot"]
    )
    assert "non-finite" in nanscope(tmp_path, environ, "runs", "s3://bucket/runs").stdout
    assert nanscope(tmp_path, environ, "replay", first["snapshot"]).returncode == 3
    code = f"import nanscope; print(len(nanscope.history('{run}')), nanscope.load('{first['snapshot']}').rank)"
    assert subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60).stdout == "6 1\n"


def test_what_a_killed_rank_left_is_on_s3(tmp_path: Path, environ: dict[str, str]) -> None:
    """It came to send nothing itself."""
    torchrun = ("--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "ranks.py")
    done = nanscope(tmp_path, environ, "run", "--out", "s3://bucket/killed", *torchrun, "bad", "killed")
    assert done.returncode == 1, done.stderr
    assert nanscope(tmp_path, environ, "report", "s3://bucket/killed", "-o", "r.json").returncode == 3
    told = json.loads((tmp_path / "r.json").read_text())
    assert told["incidents"][0]["rank"] == 1 and told["incidents"][0]["step"] == 2
