"""Writes docs/workers.md: what nanscope says of each framework's own training step, as it came out just now.

`python tests/workers/table.py docs/workers.md`, in the environment of .ci/native; see the page for checkouts. What is not installed keeps its rows,
and with names of frameworks behind the page so does every other.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from worker_cases import EXPECTED, missing, told

HEAD = """# The frameworks' own workers

What is said of *their* training step, and not only of their loss function: a worker is built as its framework builds it, on a tiny random Qwen2 on a
CPU, and trains three steps of two micro-batches, bare and under `nanscope.watch()`. The first step has no advantage, so that its loss is 0; the
second one is spoilt. A row is right if the verdict names the step and the micro-batch, the cause, the variable or function, the element, whether the
loss counts it, the framework's own option where one helps, and the step that spoilt the weights; if three steps were counted; and if the watched
run ends with the bare run's weights, bit for bit.

| fault | what is planted |
| --- | --- |
| healthy | nothing |
| masked +200 | an old log-prob of −200 at a token of a tool's output, which the policy is not trained on |
| old -inf | an old log-prob of −inf at a token that counts |
| masked micro-batch, masked batch | a mask that lets nothing through, in one micro-batch or in all |
| weights | an infinite learning rate for one step: the weights are NaN, and so are old log-probs, KL and loss of the next one |

This page is written by `python tests/workers/table.py docs/workers.md`, and `tests/test_workers.py` holds each of its rows. Frameworks that are not on
PyPI are used where a checkout is on the path:

```bash
PYTHONPATH=RL:prime-rl/src:slime:AReaL NANSCOPE_NEMO_RL_VERSION=7ea279ab NANSCOPE_PRIME_RL_VERSION=559b447 python -m pytest tests/test_workers.py
```

Of NeMo-RL, prime-rl, slime and AReaL it is what computes the loss from the logits, in their own code, on a model and an optimizer of the test's: the
rest of their step is Megatron's or is for CUDA. For slime something stands in for Megatron that says that each of its groups has one member, for AReaL
for its trackers; AReaL refuses old log-probs that are not finite, and such a step is not taken. torchtitan's RL step is an actor of Monarch in a package
that reads vLLM: [its loss](frameworks.md) is known, and the step has not been run here.

| framework | version | entry point | ranks | case | what is said | right |
| --- | --- | --- | --- | --- | --- | --- |
"""


def shown(sentence: str) -> str:
    """One line of a table, without the places of this machine."""
    return re.sub(r"\|", "\\|", sentence).replace("*", "\\*")


def main(page: Path, drivers: list[str]) -> None:
    before = page.read_text(encoding="utf-8").splitlines() if page.exists() else []
    rows = []
    with tempfile.TemporaryDirectory() as out:
        for one in EXPECTED:
            key = f"| {one.ranks} | {one.case} |"
            if missing(one.driver) or (drivers and one.driver not in drivers):
                rows += [line for line in before if key in line and line.startswith(f"| {one.driver} |")]
                continue
            line = told(one.driver, one.ranks, Path(out))[0][one.case]
            right = "yes" if not one.misses(line) else f"no: {one.known or one.misses(line)[0]}"
            said = "silent" if line["status"] == "healthy" else shown(line["sentence"])
            rows.append(f"| {one.driver} | {line['version']} | `{line['entry']}` {key} {said} | {right} |")
    page.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
