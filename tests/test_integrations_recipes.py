"""The recipes of docs/integrations.md: what a pull request and a commit run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_readme import GRPO

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

PAGE = Path(__file__).parents[1] / "docs" / "integrations.md"
RECIPES = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)]
ACTION = next(recipe for recipe in RECIPES if "jobs" in recipe)
HOOKS = next(recipe for recipe in RECIPES if "repos" in recipe)


def environment(folder: Path) -> dict[str, str]:
    """A nanscope on the path, as where it is installed."""
    script = folder / "bin" / "nanscope"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m nanscope "$@"\n')
    script.chmod(0o755)
    path = os.pathsep.join([str(script.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    git = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    home = {"HOME": str(folder), "PRE_COMMIT_HOME": str(folder / "pre-commit"), "GIT_CONFIG_GLOBAL": os.devnull}
    return {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **git, **home}


def run(command: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_the_action_fails_and_leaves_what_it_uploads(tmp_path: Path) -> None:
    """Its command ends with status 3, and the file that its next step uploads is SARIF that points at the line."""
    (tmp_path / "grpo.py").write_text(GRPO)
    steps: list[dict[str, Any]] = ACTION["jobs"]["check"]["steps"]
    (command,) = (step["run"] for step in steps if step.get("run", "").startswith("nanscope"))
    done = run(command.split(), tmp_path, environment(tmp_path))
    assert done.returncode == 3, done.stdout + done.stderr
    (upload,) = (step for step in steps if "upload-sarif" in step.get("uses", ""))
    told = json.loads((tmp_path / upload["with"]["sarif_file"]).read_text())
    places = [result["locations"][0]["physicalLocation"] for result in told["runs"][0]["results"]]
    assert told["version"] == "2.1.0" and {place["artifactLocation"]["uri"] for place in places} == {"grpo.py"}
    lines = GRPO.splitlines()
    assert "torch.exp(log_probs - old_log_probs)" in {lines[place["region"]["startLine"] - 1].partition("= ")[2] for place in places}
    assert upload["if"] == "always()"


def test_the_hook_passes_a_loss_that_is_guarded_and_stops_one_that_is_not(tmp_path: Path) -> None:
    """pre-commit itself, in a repository of its own."""
    pytest.importorskip("pre_commit", reason="pre-commit is not installed")
    env, folder = environment(tmp_path), tmp_path / "repository"
    folder.mkdir()
    (folder / "grpo.py").write_text(GRPO)
    (folder / ".pre-commit-config.yaml").write_text(yaml.safe_dump(HOOKS))
    for command in (["git", "init", "-q"], ["git", "add", "."], ["git", "commit", "-q", "-m", "a loss"]):
        assert run(command, folder, env).returncode == 0
    hook = [sys.executable, "-m", "pre_commit", "run", "--all-files"]
    done = run(hook, folder, env)
    assert done.returncode == 0 and "Passed" in done.stdout, done.stdout + done.stderr
    (folder / ".pre-commit-config.yaml").write_text(yaml.safe_dump(HOOKS).replace("guarded_loss", "my_loss"))
    run(["git", "add", "."], folder, env)
    done = run(hook, folder, env)
    assert done.returncode == 1 and "Failed" in done.stdout and "exit code: 3" in done.stdout, done.stdout + done.stderr
