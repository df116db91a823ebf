"""A check as text and as SARIF: worst first, a line once, and what a name or a path holds cannot leave its place."""

from __future__ import annotations

import json
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import torch
from pages import odd
from verdicts import ppo_step

import nanscope
from nanscope.foresight.hazard import Check
from nanscope.report.check import render_check
from nanscope.report.sarif import sarif_of


def own(log_probs, old_log_probs, advantages, mask):
    ratio = torch.exp(log_probs - old_log_probs)
    return -(ratio * advantages[:, None] * mask).sum() / mask.sum()


@pytest.fixture(scope="module")
def found() -> Check:
    return nanscope.check(own)


def test_what_training_can_reach_stands_first_and_a_line_stands_once(found: Check) -> None:
    """Each with its trigger, what it spoils, and the fix."""
    text = render_check(found)
    assert text.index("reachable in training\n") < text.index("only by broken data")
    assert text.split("only by broken data")[0].count("ratio = torch.exp(log_probs - old_log_probs)") <= 2  # its first use, and exp
    assert "all of mask is 0: the loss and the gradient of tokens that count are not finite" in " ".join(text.split())
    assert "✓ leaves the healthy step as it is" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_longer_than_there_is_room(found: Check, width: int) -> None:
    """It folds, and loses nothing."""
    text = render_check(found, width)
    assert max(map(len, text.splitlines())) <= width
    assert "not finite" in " ".join(text.split())


def test_no_hazard_is_one_line() -> None:
    """And says how often it was tried."""
    text = render_check(Check((), 4, 120))
    assert text.splitlines() == ["● step 4 · 120 runs   No hazard found in 120 runs of the step."]


def test_control_characters_of_a_file_do_not_reach_the_terminal(found: Check) -> None:
    """A name is text."""
    hazard = found.hazards[0]
    hostile = replace(hazard, trigger=replace(hazard.trigger, words="\x1b[2Jgone"), origin=replace(hazard.origin, expression="\x1b[31m"))
    assert "\x1b" not in render_check(Check((hostile,), 1, 1))


def test_a_code_host_gets_each_hazard_at_its_line(found: Check) -> None:
    """SARIF 2.1.0: a rule for each cause, a result for each hazard; what training can reach is an error."""
    log = json.loads(json.dumps(sarif_of(found), allow_nan=False))
    (run,) = log["runs"]
    assert log["version"] == "2.1.0" and run["tool"]["driver"]["name"] == "nanscope"
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} >= {result["ruleId"] for result in run["results"]}
    levels = [result["level"] for result in run["results"]]
    assert levels.count("error") == len(found.reachable) and levels == sorted(levels, key=["error", "warning", "note"].index)
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"].endswith("test_report_check.py") and place["region"]["startLine"] > 0


def test_the_json_holds_what_the_text_says(found: Check) -> None:
    """All of it, with NaN and the infinities as text."""
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert [one["trigger"]["words"] for one in data["hazards"]] == [hazard.trigger.words for hazard in found.hazards]
    assert {one["severity"] for one in data["hazards"]} == {"reachable", "broken_data"}


def test_a_search_that_was_cut_off_is_never_told_as_complete(found: Check) -> None:
    """In the text, for a code host, and in the data; a whole one says nothing of it."""
    cut = replace(found, places=40, left=12)
    assert "Not complete: 12 of 40 places were left when its runs were used up." in " ".join(render_check(cut).split())
    (run,) = sarif_of(cut)["runs"]
    assert "Not complete" in run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"]
    assert cut.to_json()["complete"] is False and "invocations" not in sarif_of(found)["runs"][0]
    assert "omplete" not in render_check(found)
    nothing = Check((), 4, 2000, places=40, left=12)
    assert (
        nothing.sentence == "No hazard found in 2000 runs of the step. Not complete: 12 of 40 places were left when its runs were used up."
    )


def guarded(log_probs, old_log_probs, advantages, mask):
    ratio = torch.exp((log_probs - old_log_probs).clamp(-20.0, 20.0))
    scaled = advantages / (advantages.std() + 1e-4)
    return -(ratio * scaled[:, None] * mask).sum() / mask.sum().clamp(min=1)


def test_what_guards_a_loss_and_what_was_settled_stand_at_the_end() -> None:
    """Each guard with its line and what would die without it."""
    text = " ".join(render_check(nanscope.check(guarded)).split())
    end = text[text.index(" guarded ") :]
    assert "(log_probs - old_log_probs).clamp(-20.0, 20.0) test_report_check.py:" in end
    assert "without it torch.exp((log_probs - old_log_probs).clamp(-20.0, 20.0)) in line " in end and "mask.sum().clamp(min=1)" in end
    assert "settled when it was recorded advantages.std() (test_report_check.py:" in end


def test_a_log_for_a_code_host_holds_no_link_and_no_other_address() -> None:
    """A message of SARIF takes brackets for a link, and a place any address: a file of a stranger makes neither."""
    hazard = next(hazard for hazard in nanscope.check(ppo_step({})).hazards if hazard.origin.file)
    for file in ("javascript:alert(1)", "//evil.example/x", "https://evil.example", "a b\x1b.py"):
        bad = replace(hazard, origin=replace(hazard.origin, file=file), trigger=replace(hazard.trigger, words="[x](http://e)\u202e"))
        (result,) = sarif_of(Check((bad,), 1, 1))["runs"][0]["results"]
        uri = urlsplit(result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"])
        assert not uri.scheme and not uri.netloc and " " not in uri.path
        assert "](" not in result["message"]["text"] and not odd(result["message"]["text"])
    nowhere = replace(hazard, origin=replace(hazard.origin, line=-3))
    assert not sarif_of(Check((nowhere,), 1, 1))["runs"][0]["results"]
