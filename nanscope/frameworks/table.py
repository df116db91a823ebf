"""All frameworks in one tuple, and their functions by name."""

from __future__ import annotations

from nanscope.frameworks import Framework, LossSite
from nanscope.frameworks.areal import AREAL
from nanscope.frameworks.liger import LIGER
from nanscope.frameworks.nemo_rl import NEMO_RL
from nanscope.frameworks.openrlhf import OPENRLHF
from nanscope.frameworks.prime_rl import PRIME_RL
from nanscope.frameworks.skyrl import SKYRL
from nanscope.frameworks.slime import SLIME
from nanscope.frameworks.torchtitan import TORCHTITAN
from nanscope.frameworks.trl import TRL
from nanscope.frameworks.unsloth import UNSLOTH
from nanscope.frameworks.verl import VERL

FRAMEWORKS: tuple[Framework, ...] = (LIGER, UNSLOTH, TRL, VERL, NEMO_RL, SKYRL, OPENRLHF, TORCHTITAN, AREAL, PRIME_RL, SLIME)


def _by_function() -> dict[str, tuple[LossSite, ...]]:
    found: dict[str, tuple[LossSite, ...]] = {}
    for framework in FRAMEWORKS:
        for site in framework.sites:
            found[site.function] = (*found.get(site.function, ()), site)
    return found


BY_FUNCTION = _by_function()
