"""`tests/benchmarks/beside.py`: what other tools say of a script is read right, each in its own words, before it is counted.

How they compare stands in docs/beside.md; here is held that a tool which points at the line is seen to, and that one which does not is not.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
INCIDENTS = ROOT / "tests" / "incidents"

SAID = {  # tool, script -> in its answer, is it the line
    ("nanscope", "packed_boolean_select_ratio"): ("overflowed to +inf at [8] of [14]", True),
    ("detect_anomaly", "packed_boolean_select_ratio"): ("Function 'ExpBackward0' returned nan values", True),
    ("detect_anomaly", "log_zero_softmax_gather_log"): ("Function 'SoftmaxBackward0' returned nan values", False),
    ("detect_anomaly", "critic_cost_in_bytes"): ("", False),
    ("DebugMode + hook", "log_zero_softmax_gather_log"): ("aten.log.default", True),
    ("DebugMode + hook", "hw_bitflip_unembedding_row"): ("", False),
    ("DebugUnderflowOverflow", "poisoned_weights_saved_value_norm"): ("scale has nans", True),
    ("DebugUnderflowOverflow", "plogp_zero_action_mask_entropy"): ("output has infs", False),
    ("isfinite hook", "poisoned_weights_saved_value_norm"): ("gain returned what is not finite", False),
    ("isfinite hook", "log_zero_softmax_gather_log"): ("", False),
}


@pytest.fixture(scope="module")
def beside() -> ModuleType:
    """The script, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))
        import beside

    return beside


@pytest.mark.parametrize(("tool", "script"), SAID)
def test_an_answer_is_the_tools_own(tool: str, script: str, beside: ModuleType) -> None:
    """Its words, and whether it points at the line, or at the weight, that the script states."""
    if tool == "DebugUnderflowOverflow":
        pytest.importorskip("transformers")
    if tool == "DebugMode + hook" and not hasattr(pytest.importorskip("torch.utils._debug_mode").DebugMode, "dispatch_hooks"):
        pytest.skip("this torch has a DebugMode without hooks")
    path = INCIDENTS / f"{script}.py"
    found = beside.answer(tool, path)
    words, right = SAID[tool, script]
    assert (words in found.said if words else found.said == "") and not beside.failed(found)
    assert beside.is_right(path, found) == right


@pytest.mark.parametrize("tool", ["nanscope", "detect_anomaly", "DebugUnderflowOverflow", "isfinite hook"])
def test_an_ordinary_run_is_no_alarm(tool: str, beside: ModuleType) -> None:
    """And a tool leaves nothing behind that would make the next one say something."""
    if tool == "DebugUnderflowOverflow":
        pytest.importorskip("transformers")
    (path,) = (ROOT / "tests" / "healthy").glob("actor_critic_two_backwards.py")
    assert beside.answer(tool, path).said == ""


def test_a_tool_that_breaks_is_not_one_that_found_something(beside: ModuleType, tmp_path: Path) -> None:
    """What the script raises itself stands in the answer, and is no answer."""
    script = tmp_path / "script.py"
    script.write_text("def run():\n    raise KeyError('advantages')\n", encoding="utf-8")
    assert beside.answer("isfinite hook", script).said == "fails: KeyError: 'advantages'"


def test_the_page_has_every_cause(beside: ModuleType) -> None:
    """It was made of the scripts that are in the gallery, but for the one that takes two ranks."""
    page = (ROOT / "docs" / "beside.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert rows == [*beside.gallery.SCRIPTS.values(), "demo"]
