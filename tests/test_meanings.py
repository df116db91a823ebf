"""What the values of the field's formulas mean: the table is `meanings.py`."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
import torch
from meanings import FORMULAS, Formula, tensor

from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape
from nanscope.locate.names import Names
from nanscope.program.program import Program

SAME = {"is_weight": "ratio", "rewards": "advantages"}  # either is fair
KNOWN = {  # what is not yet told rightly: formula -> text -> what is said
    "vq_vae": {"(flat.unsqueeze(1) - codebook).pow(2)": "logits"},  # they go into a softmax
    "byol": {"F.normalize(z, dim=-1)": "loss"},  # a product of matrices written as a sum of products
    "affine_flow": {"(x - shift) / scale": "loss", "0.5 * z**2": "loss"},  # the density has no name but what the loss is the mean of
}

ALONE = (203, 282)  # of so many values what is done with them says what they are


def same(role: str) -> str:
    return SAME.get(role, role)


def recorded(formula: Formula) -> Program:
    """The formula as a program; what it is given with a gradient has come out of a module."""
    torch.manual_seed(0)
    arguments = [tensor(letter) for letter in formula.arguments]
    made = {id(given) for given in arguments if given.requires_grad}
    tape = Tape()
    tape.leaves.module_outputs = lambda given: "Linear (net)" if id(given) in made else None
    with TapeMode(tape):
        loss = formula.function(*arguments)
    assert not tape.broken, tape.broken
    return tape.program(tape.value_of(loss))[0]


def said(program: Program, text: str, alone: Program | None = None) -> str:
    """The role of what an expression of the formula makes, or of an argument. alone: the same program, in which that is asked."""
    wanted = ast.unparse(ast.parse(text))
    values = [leaf.id for leaf in program.leaves if leaf.name == text] or [
        call.outs[0]
        for call in program.calls
        if call.outs[0] is not None and (site := program.site_of(call)) is not None and ast.unparse(ast.parse(site.expression)) == wanted
    ]
    assert values, f"nothing of the program is {text}"
    return str(Names(alone or program).role(values[-1]))


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.function.__name__)
def test_a_formula_is_understood(formula: Formula) -> None:
    """What each marked value is said to mean is fair, and what is known not to be still is not."""
    program = recorded(formula)
    found = {text: said(program, text) for text in formula.roles}
    wrong = {text: role for text, role in found.items() if same(role) not in map(same, formula.roles[text].split())}
    assert wrong == KNOWN.get(formula.function.__name__, {})


def nameless(program: Program) -> Program:
    """The program of somebody who calls everything `x`, and his functions `f`."""
    sites = tuple(replace(site, name=None, within=None, function="f", args=()) for site in program.sites)
    return replace(program, sites=sites, leaves=tuple(replace(leaf, name=None) for leaf in program.leaves))


def test_use_alone_tells_most() -> None:
    """Without a single name the roles of most values are still fair: in no fewer than ever."""
    fair = marked = 0
    for formula in FORMULAS:
        program = recorded(formula)
        alone = nameless(program)
        for text, roles in formula.roles.items():
            marked += 1
            fair += same(said(program, text, alone)) in map(same, roles.split())
    assert (fair, marked) == ALONE, "fewer than in ALONE, or more: then raise it"


def test_what_is_known_is_of_formulas_that_exist() -> None:
    """No row outlives its formula."""
    assert set(KNOWN) <= {formula.function.__name__ for formula in FORMULAS}
