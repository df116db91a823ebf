"""Explanations: every cause has one, its snippets do what they say, and what is called wrong really is."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt
from torch import Tensor

from nanscope.causes import ADVICE, CAUSES, Cause
from nanscope.verdict import explain
from nanscope.verdict.explain import HEADINGS, Explanation, explanation, read

PAGES = Path(explain.__file__).parent / "explanations"
EXPLANATIONS = {cause: explanation(cause) for cause in Cause if cause is not Cause.UNKNOWN}

SPIKE = 1e5  # where everything stays finite, this is what counts as ruined
LINES, COLUMNS = 8, 100  # of a snippet, so that it fits into a terminal

# What `wrong` speaks of, as an edit of the broken snippet: (cause, text in the snippet, what is tried instead).
ATTEMPTS: tuple[tuple[Cause, str, str], ...] = (
    (Cause.EXP_OVERFLOW, "ratio.mean()", "ratio.clamp(max=20.0).mean()"),
    (Cause.EXP_OVERFLOW, "ratio.mean()", "ratio.nan_to_num().mean()"),
    (Cause.EXP_OVERFLOW, "torch.exp(log_probs - old_log_probs)", "torch.exp((log_probs - old_log_probs).bfloat16())"),
    (Cause.EXP_OVERFLOW, "torch.exp(", "torch.expm1("),
    (Cause.SEQ_RATIO_OVERFLOW, "torch.exp(log_ratio)", "torch.exp(log_ratio).clamp(max=20.0)"),
    (Cause.SEQ_RATIO_OVERFLOW, "(log_probs - old_log_probs).sum()", "(log_probs - old_log_probs).clamp(-2.0, 2.0).sum()"),
    (Cause.INF_TIMES_ZERO_MASK, "(ratio * mask)", "torch.where(mask > 0, ratio, 0.0)"),
    (Cause.INF_TIMES_ZERO_MASK, "(ratio * mask)", "ratio.masked_fill(mask == 0, 0.0)"),
    (Cause.INF_TIMES_ZERO_MASK, "(ratio * mask)", "ratio[mask > 0]"),
    (Cause.INF_TIMES_ZERO_MASK, "(ratio * mask)", "(ratio * mask).nan_to_num()"),
    (Cause.NAN_TIMES_ZERO_MASK, "torch.exp(log_ratio)", "torch.exp(log_ratio.clamp(-20.0, 20.0))"),
    (Cause.NAN_TIMES_ZERO_MASK, "(torch.exp(log_ratio) * mask)", "torch.where(mask > 0, torch.exp(log_ratio), 0.0)"),
    (Cause.NAN_TIMES_ZERO_MASK, "(torch.exp(log_ratio) * mask)", "(torch.exp(log_ratio) * mask).nan_to_num()"),
    (Cause.NAN_TIMES_ZERO_MASK, "log_probs - old_log_probs", "(log_probs - old_log_probs) * mask"),
    (Cause.INF_TIMES_ZERO_COEF, "(ratio * advantages)", "torch.where(advantages == 0, 0.0, ratio * advantages)"),
    (Cause.INF_TIMES_ZERO_COEF, "ratio * advantages", "ratio * (advantages + 1e-6)"),
    (Cause.INF_TIMES_ZERO_COEF, "(ratio * advantages)", "torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)"),
    (Cause.INF_MINUS_INF, "log_probs - log_probs.detach()", "(log_probs - log_probs.detach()) * log_probs.isfinite()"),
    (Cause.INF_MINUS_INF, "log_probs - log_probs.detach()", "(log_probs - log_probs.detach()).clamp(-20.0, 20.0)"),
    (Cause.WHERE_GRAD_TRAP, "torch.where(keep, ratio, 0.0)", "ratio.masked_fill(~keep, 0.0)"),
    (Cause.WHERE_GRAD_TRAP, "torch.where(keep, ratio, 0.0)", "ratio[keep]"),
    (Cause.WHERE_GRAD_TRAP, "torch.where(keep, ratio, 0.0)", "ratio.clamp(max=1.2)"),
    (Cause.WHERE_GRAD_TRAP, "torch.where(keep, ratio, 0.0)", "ratio.nan_to_num()"),
    (Cause.WHERE_GRAD_TRAP, "torch.where(keep, ratio, 0.0)", "torch.min(ratio, ratio.clamp(0.8, 1.2))"),
    (Cause.LOG_ZERO, "torch.log(prob)", "torch.log(prob).nan_to_num()"),
    (Cause.PLOGP_ZERO, "(log_probs.exp() * log_probs)", "(log_probs.exp() * log_probs).nan_to_num()"),
    (Cause.PLOGP_ZERO, "(log_probs.exp() * log_probs)", "torch.where(banned, 0.0, log_probs.exp() * log_probs)"),
    (Cause.PLOGP_ZERO, "(log_probs.exp() * log_probs)", "torch.xlogy(log_probs.exp(), log_probs.exp())"),
    (Cause.ZERO_DENOMINATOR, "(logits / temperature)", "(logits / temperature).clamp(max=1e4)"),
    (Cause.ZERO_DENOMINATOR, "(logits / temperature)", "(logits / temperature).nan_to_num()"),
    (Cause.EMPTY_MASK_MEAN, "-(log_probs * mask).sum() / mask.sum()", "(-(log_probs * mask).sum() / mask.sum()).nan_to_num()"),
    (Cause.EMPTY_MASK_MEAN, "-(log_probs * mask).sum() / mask.sum()", "torch.where(mask.sum() > 0, log_probs.sum() / mask.sum(), 0.0)"),
    (Cause.STD_SINGLE, "1e-4", "1.0"),
    (Cause.STD_SINGLE, "(std + 1e-4)", "std.clamp(min=1e-4)"),
    (Cause.STD_SINGLE, "(std + 1e-4)", "torch.where(std == 0, 1.0, std)"),
    (Cause.SQRT_ZERO_GRAD, ".sqrt()", ".sqrt() + 1e-8"),
    (Cause.SQRT_ZERO_GRAD, ".sqrt()", ".sqrt().clamp(min=1e-6)"),
    (Cause.SQRT_ZERO_GRAD, ".sqrt()", "** 0.5"),
    (Cause.SQRT_NEGATIVE, "variance.sqrt()", "(variance + 1e-8).sqrt()"),
    (Cause.CANCELLATION_SPIKE, "(1 - prob)", "(1 - prob + 1e-8)"),
    (Cause.CANCELLATION_SPIKE, "(1 - prob)", "-torch.expm1(log_prob)"),
    (Cause.CANCELLATION_SPIKE, "log_prob.exp()", "log_prob.double().exp()"),
    (Cause.FULLY_MASKED_SOFTMAX, ".softmax(-1)", ".softmax(-1).nan_to_num()"),
    (Cause.FULLY_MASKED_SOFTMAX, "weights[:, 0]", "weights[0]"),
    (Cause.FULLY_MASKED_SOFTMAX, ".softmax(-1)", ".softmax(-1).clamp(0.0, 1.0)"),
    (Cause.FP16_OVERFLOW, "gate * up", "(gate * up).float()"),
    (Cause.EPS_UNDERFLOW, "1e-8", "1e-12"),
    (Cause.EPS_UNDERFLOW, "rewards.std() + 1e-8", "rewards.std().clamp(min=1e-8)"),
    (Cause.MAGNITUDE_OVERFLOW, "error.square()", "error.bfloat16().square()"),
    (Cause.BAD_INPUT, "ratio.mean()", "ratio.clamp(0.5, 2.0).mean()"),
    (Cause.BAD_INPUT, "ratio.mean()", "ratio.masked_fill((ratio < 0.5) | (ratio > 2.0), 0.0).mean()"),
    (Cause.UNINITIALIZED, "(gain * hidden)", "(gain * hidden * 0.0)"),
    (Cause.POISONED_WEIGHTS, "0.1 * grad", "1e-9 * grad"),
    (Cause.POISONED_WEIGHTS, "0.1 * grad", "0.1 * grad / grad.norm().clamp(min=1.0)"),
    (Cause.INF_GRAD_NORM_CLIP, "1.0)", "1e-6)"),
)

# What `right` speaks of besides the mended snippet, as an edit of the broken one that helps.
REMEDIES: tuple[tuple[Cause, str, str], ...] = (
    (Cause.SEQ_RATIO_OVERFLOW, ".sum()", ".mean()"),
    (Cause.INF_TIMES_ZERO_MASK, "torch.exp(log_ratio)", "torch.exp(log_ratio.clamp(-20.0, 20.0))"),
    (Cause.NAN_TIMES_ZERO_MASK, "torch.nan", "0.0"),
    (Cause.INF_MINUS_INF, "-torch.inf", "torch.finfo(torch.float32).min"),
    (Cause.WHERE_GRAD_TRAP, "torch.exp(log_ratio)", "torch.exp(log_ratio.clamp(-20.0, 20.0))"),
    (Cause.LOG_ZERO, "torch.log(prob)", "torch.log(prob.clamp(min=1e-30))"),
    (Cause.PLOGP_ZERO, "-torch.inf", "torch.finfo(torch.float32).min"),
    (Cause.ZERO_DIV_ZERO, "rewards.std()", "(rewards.std() + 1e-4)"),
    (Cause.ZERO_DENOMINATOR, "/ temperature", "/ max(temperature, 0.01)"),
    (Cause.EMPTY_MASK_MEAN, "-(log_probs * mask).sum() / mask.sum()", "-(log_probs * mask).sum()"),
    (Cause.STD_SINGLE, "rewards.std(dim=1, ", "rewards.std(dim=1, correction=0, "),
    (Cause.SQRT_ZERO_GRAD, ".square().sum().sqrt()", ".square().sum().clamp(min=1e-12).sqrt()"),
    (Cause.SQRT_ZERO_GRAD, "(hidden - target).square().sum().sqrt()", "torch.linalg.vector_norm(hidden - target)"),
    (Cause.SQRT_NEGATIVE, "variance.sqrt()", "rewards.std(correction=0)"),
    (Cause.FULLY_MASKED_SOFTMAX, "-torch.inf", "torch.finfo(torch.float32).min"),
    (Cause.FP16_OVERFLOW, "float16", "bfloat16"),
    (Cause.EPS_UNDERFLOW, "1e-8", "1e-4"),
    (Cause.BAD_INPUT, "torch.nan", "-2.0"),
    (Cause.UNINITIALIZED, "torch.empty(2)", "torch.zeros(2)"),
)

# What a report must not carry outside: the package, its corpus and the places where it was made.
INTERNAL = re.compile(
    r"nanscope|incidents?\.json|verified_fixes|(?<![\w:/.)])(?:~|\.{1,2})?/[A-Za-z.]|\b\w+/\w+\.(?:py|json|md)\b|[A-Z]:\\|file://"
)
TRACKER = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/[1-9]\d*")

pytestmark = pytest.mark.filterwarnings("ignore:std:UserWarning")  # the standard deviation of one element is meant here

CASES = pytest.mark.parametrize("cause", EXPLANATIONS, ids=str)


def run(code: str) -> dict[str, object]:
    """Run a snippet as its own program and return what it leaves behind."""
    left: dict[str, object] = {"__name__": "snippet"}
    exec(compile(code, "snippet", "exec"), left)
    return left


def gradients(left: dict[str, object]) -> list[Tensor]:
    """Return the gradients of the leaves that a snippet trains."""
    return [value.grad for value in left.values() if trained(value) and isinstance(value, Tensor) and value.grad is not None]


def trained(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_leaf and value.requires_grad


def outcome(left: dict[str, object]) -> Tensor:
    """Return the loss, the trained leaves and their gradients as one vector in float64."""
    loss = left["loss"]
    assert isinstance(loss, Tensor)
    leaves = [value for value in left.values() if trained(value) and isinstance(value, Tensor)]
    assert leaves, "the snippet trains nothing"
    return torch.cat([value.detach().double().flatten() for value in (loss, *leaves, *gradients(left))])


def harmed(cause: Cause, left: dict[str, object]) -> bool:
    """Tell whether a snippet ended as this cause ends: with a spike, with a lost update, or with something non-finite."""
    found = outcome(left)
    if cause is Cause.CANCELLATION_SPIKE:
        return bool(found.isfinite().all() and found.abs().max() > SPIKE)
    if cause is Cause.INF_GRAD_NORM_CLIP:
        return all(bool(((grad == 0) | grad.isnan()).all()) for grad in gradients(left))
    return not found.isfinite().all()


def texts(explanation: Explanation) -> str:
    """Everything that a reader sees, apart from the links."""
    return "\n".join((explanation.mechanism, explanation.broken, explanation.mended, *explanation.right, explanation.wrong))


def page(cause: Cause) -> str:
    return (PAGES / f"{cause}.md").read_text(encoding="utf-8")


def test_every_cause_but_the_unknown_one_has_one_page() -> None:
    """A cause that a report can name has a page, and no page is left over."""
    assert {path.name for path in PAGES.iterdir()} == {f"{cause}.md" for cause in set(Cause) - {Cause.UNKNOWN}}


@CASES
def test_a_page_is_headed_by_its_cause(cause: Cause) -> None:
    """The slug, and the line that the table of causes has about it."""
    title = CAUSES[cause].title
    assert page(cause).startswith(f"# {cause}\n\n{title[0].upper()}{title[1:]}.\n\n## ")
    assert EXPLANATIONS[cause].title == f"{title[0].upper()}{title[1:]}."


@CASES
def test_a_page_is_markdown_as_others_read_it(cause: Cause) -> None:
    """A CommonMark parser finds the headings, words, snippets, items and links that the reader here finds."""
    told = EXPLANATIONS[cause]
    found: dict[str, list[str]] = {}
    kind = ""
    for token in MarkdownIt().parse(page(cause)):
        kind = token.type.removesuffix("_open") if token.type.endswith("_open") and token.type != "paragraph_open" else kind
        if token.type == "fence":
            assert token.info == "python"
            found.setdefault("fence", []).append(token.content)
        elif token.type == "inline":
            words = "".join(" " if child.type == "softbreak" else child.content for child in token.children or ())
            found.setdefault(kind, []).append(words)
        kind = "paragraph" if token.type in ("heading_close", "bullet_list_close", "fence") else kind
    headings = HEADINGS if told.links else HEADINGS[:-1]
    assert found == {
        "heading": [str(cause), *headings],
        "paragraph": [told.title, told.mechanism, told.wrong],
        "fence": [told.broken, told.mended],
        "list_item": [*told.right, *told.links],
    }


@pytest.mark.parametrize("heading", HEADINGS[:-1])
def test_a_page_without_a_heading_is_refused(heading: str) -> None:
    """A page that is not built as all others are is an error and no empty explanation."""
    whole = page(Cause.EXP_OVERFLOW)
    assert read(whole) == EXPLANATIONS[Cause.EXP_OVERFLOW]
    with pytest.raises(ValueError, match="the headings are"):
        read(whole.replace(f"## {heading}\n", ""))


@CASES
def test_the_broken_snippet_goes_wrong(cause: Cause) -> None:
    """What is shown as broken ends in this cause's harm when somebody runs it."""
    assert harmed(cause, run(EXPLANATIONS[cause].broken))


@CASES
def test_the_mended_snippet_stays_healthy(cause: Cause) -> None:
    """What is shown as mended has a finite loss, finite weights and finite gradients, and no spike."""
    left = run(EXPLANATIONS[cause].mended)
    assert outcome(left).isfinite().all()
    assert not harmed(cause, left)
    if cause is Cause.CANCELLATION_SPIKE:
        assert outcome(left).abs().max() < SPIKE


@CASES
def test_both_snippets_take_a_gradient(cause: Cause) -> None:
    """A fix that cuts the graph would look healthy as well, so the loss or a gradient must still depend on a leaf."""
    for code in (EXPLANATIONS[cause].broken, EXPLANATIONS[cause].mended):
        left = run(code)
        loss = left["loss"]
        assert isinstance(loss, Tensor)
        assert loss.requires_grad
        assert ("backward()" in code or "autograd.grad(" in code) and (gradients(left) or isinstance(left.get("grad"), Tensor))


@CASES
def test_a_snippet_is_small_and_begins_with_torch(cause: Cause) -> None:
    """Both snippets fit on a screen, need torch only, and leave torch as it was."""
    for code in (EXPLANATIONS[cause].broken, EXPLANATIONS[cause].mended):
        lines = code.splitlines()
        assert lines[0] == "import torch"
        assert sum("import" in line for line in lines) == 1
        assert len(lines) <= LINES
        assert max(map(len, lines)) <= COLUMNS
        assert all(lines), "no empty lines"
        run(code)
        assert not torch.are_deterministic_algorithms_enabled()


@CASES
def test_the_mended_snippet_is_the_broken_one_with_one_change(cause: Cause) -> None:
    """A reader sees at once what was changed, because at most a few lines differ."""
    broken, mended = (code.splitlines() for code in (EXPLANATIONS[cause].broken, EXPLANATIONS[cause].mended))
    without = [[line.split("  #")[0] for line in lines] for lines in (broken, mended)]
    changed = [line for line in difflib.ndiff(without[0], without[1]) if line[0] == "+"]
    assert 1 <= len(changed) <= 2


@pytest.mark.parametrize(("cause", "old", "new"), ATTEMPTS, ids=str)
def test_what_is_called_wrong_does_not_help(cause: Cause, old: str, new: str) -> None:
    """The tempting edit of the broken snippet ends in the same harm."""
    broken = EXPLANATIONS[cause].broken
    assert old in broken, "the snippet has changed: change the attempt"
    assert harmed(cause, run(broken.replace(old, new)))


@pytest.mark.parametrize(("cause", "old", "new"), REMEDIES, ids=str)
def test_what_is_called_right_helps(cause: Cause, old: str, new: str) -> None:
    """Another fix that `right` names mends the broken snippet as well."""
    broken = EXPLANATIONS[cause].broken
    assert old in broken, "the snippet has changed: change the remedy"
    assert not harmed(cause, run(broken.replace(old, new)))


@CASES
def test_right_explains_every_fix_of_the_table(cause: Cause) -> None:
    """`right` names the fix classes of the cause in the order of the table, and invents none."""
    named = [words.partition(": ")[0] for words in EXPLANATIONS[cause].right]
    fixes = CAUSES[cause].fixes
    assert tuple(named[: len(fixes)]) == fixes
    assert set(named) <= set(ADVICE)


@CASES
def test_the_prose_is_complete(cause: Cause) -> None:
    """Every field says something, in whole sentences, and the mechanism takes three to six of them."""
    told = EXPLANATIONS[cause]
    for text in (told.title, told.mechanism, *told.right, told.wrong):
        assert text.endswith(".")
        assert "  " not in text
        assert "\n" not in text
    assert told.right
    assert 3 <= len(re.findall(r"\.(?= [A-Za-z0-9]|$)", told.mechanism)) <= 6


@CASES
def test_links_lead_to_public_trackers(cause: Cause) -> None:
    """A link is an issue or a pull request over https, and stands there once."""
    links = EXPLANATIONS[cause].links
    assert len(set(links)) == len(links)
    for link in links:
        assert TRACKER.fullmatch(link), link


@CASES
def test_nothing_internal_is_mentioned(cause: Cause) -> None:
    """An explanation is printed for strangers: no path, no file of ours, no name of this package."""
    assert INTERNAL.search(texts(EXPLANATIONS[cause])) is None


@pytest.mark.parametrize("text", ["see /home/me/x", "in shared/notes.md", "a nanscope run", "~/runs", "../up", "C:\\runs", "file://x"])
def test_the_test_for_internal_names_sees_them(text: str) -> None:
    """A planted path or name is found."""
    assert INTERNAL.search(text)


def test_harm_is_told_from_health() -> None:
    """The judge of the snippets finds a NaN gradient under a finite loss, and finds nothing in a healthy step."""
    healthy = "import torch\nx = torch.ones(2, requires_grad=True)\nloss = x.sum()\nloss.backward()\n"
    assert not harmed(Cause.EXP_OVERFLOW, run(healthy))
    assert not harmed(Cause.CANCELLATION_SPIKE, run(healthy))
    assert not harmed(Cause.INF_GRAD_NORM_CLIP, run(healthy))
    trapped = healthy.replace("x.sum()", "(x - 1).sqrt().clamp(min=1e-3).sum()")
    assert harmed(Cause.WHERE_GRAD_TRAP, run(trapped))
