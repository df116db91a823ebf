"""What helps in a framework's own words, as far as it can apply to this step.

beta=0.0: leaves the KL term out                                     beta is 0.04, and the origin lies in the KL term
beta=0.0, if it is not so already: leaves the KL term out            nobody saw what beta is
beta=0.0, if the origin lies in the KL term: leaves …                a log-ratio; whose, nothing tells
                                                                     nothing, if beta is 0 or the origin lies in the model
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanscope.causes import Cause
from nanscope.frameworks.losses import LOSSES
from nanscope.frameworks.rows import Framework, Remedy, Term
from nanscope.roles import Role
from nanscope.snapshot.observation import Origin, Row

_UNSEEN = object()

_TERMS: dict[str, Term] = {  # roles that stand in one term only
    Role.KL: Term.KL,
    Role.REF_LOG_PROBS: Term.KL,
    Role.RATIO: Term.RATIO,
    Role.OLD_LOG_PROBS: Term.RATIO,
    Role.IS_WEIGHT: Term.ROLLOUT,
    Role.ROLLOUT_LOG_PROBS: Term.ROLLOUT,
    Role.ENTROPY: Term.ENTROPY,
    Role.ADVANTAGES: Term.ADVANTAGES,
    Role.REWARDS: Term.ADVANTAGES,
    Role.LOGITS: Term.HEAD,
    Role.HIDDEN: Term.MODEL,
    Role.ATTENTION: Term.MODEL,
    Role.ROUTER: Term.MODEL,
    Role.WEIGHTS: Term.MODEL,
    Role.OPTIMIZER: Term.MODEL,
}


def remedies(
    framework: Framework | None, cause: Cause, origin: Origin, settings: Mapping[str, Any], tried: Sequence[Row] = ()
) -> tuple[str, ...]:
    """Return what helps, as lines; where something does, also what the framework guards against already.

    settings: as `known` gives them. tried: settings that were tried on this step; what has not helped it is not told.
    """
    if framework is None:
        return ()
    answers = {str(cause), str(Cause.EXP_OVERFLOW)} if _is_infinite_log_prob(cause, origin) else {str(cause)}
    fitting = [remedy for remedy in framework.remedies if not answers.isdisjoint(remedy.causes) and _has(remedy, framework, settings)]
    told = [_told(remedy, origin, settings, tried) for remedy in fitting]
    helps = tuple(line for line in told if line)
    return (*helps, *(f"already there: {guard}" for guard in framework.guards)) if helps else ()


def _has(remedy: Remedy, framework: Framework, settings: Mapping[str, Any]) -> bool:
    """Has the trainer what a remedy sets? One whose settings were seen, and this one not, is another of the framework's."""
    if settings.keys().isdisjoint(framework.settings):
        return True
    named = [remedy.needs, *([parsed(remedy)[0]] if remedy.setting is not None else [])]
    return not any(name in framework.settings and name not in settings for name in named)


def _is_infinite_log_prob(cause: Cause, origin: Origin) -> bool:
    """Did a log-prob come in as −inf, as a sampler reports what it never samples? A clamp before exp takes that, too; not a NaN."""
    return cause is Cause.BAD_INPUT and math.isinf(origin.value) and term_of(origin) in (Term.RATIO, Term.KL, Term.ROLLOUT)


def known(settings: Mapping[str, Any], objective: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting that was seen: of the trainer, of the loss, and those that the loss's key decides."""
    found = objective.get("settings")
    row = LOSSES.get(str(objective.get("key")))
    return {**settings, **(dict(row.fixed) if row is not None else {}), **(found if isinstance(found, Mapping) else {})}


def _told(remedy: Remedy, origin: Origin, settings: Mapping[str, Any], tried: Sequence[Row]) -> str:
    """The line, "" if the remedy cannot apply here."""
    conditions = []
    if remedy.setting is not None:
        option, advised = parsed(remedy)
        row = next((row for row in tried if row.total and row.label.endswith(f"{option}={advised}")), None)
        if row is not None:
            return f"{remedy.setting}: {remedy.text}; tried on this step, it would have helped" if row.works else ""
        now = settings.get(option, _UNSEEN)
        if now is not _UNSEEN and same(now, advised):
            return ""
        if now is _UNSEEN:
            conditions.append("it is not so already")
    if any(name in settings and same(settings[name], value) for name, value in remedy.unless):
        return ""
    if remedy.term is not None:
        term = term_of(origin)
        if term is None:
            conditions.append(f"the origin lies in {remedy.term}")
        elif term is not remedy.term:
            return ""
    when = f"if {' and '.join(conditions)}" if conditions else ""
    if remedy.setting is None:
        return f"{when}: {remedy.text}" if when else remedy.text
    return f"{remedy.setting}{', ' if when else ''}{when}: {remedy.text}"


def term_of(origin: Origin) -> Term | None:
    """Return the part of the step that an origin lies in, None if nothing tells."""
    if origin.module:
        return Term.HEAD if "head" in origin.module.rpartition(".")[2].lower() else Term.MODEL
    return _TERMS.get(origin.role or "")


def parsed(remedy: Remedy) -> tuple[str, str]:
    """Return the name that a run's settings have for a remedy's option, and what it is to be: of `--a.b-c x` b_c and x."""
    name, _, value = (remedy.setting or "").replace("=", " ", 1).partition(" ")
    return remedy.option or re.split(r"[.]", name.lstrip("-"))[-1].replace("-", "_"), value or "true"


def same(seen: object, advised: object) -> bool:
    """Is a setting what is advised? A run has 0, a text "0.0"; a run has True, a text "true"."""
    left, right = (str(value).strip("\"'").lower() for value in (seen, advised))
    try:
        return float(left) == float(right)
    except ValueError:
        return left == right
