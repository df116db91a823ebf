"""How operators are spelled in Python: signs and how tightly they bind, casts, and where a function is found.

    Phrase("a - b", SUM).inside(PRODUCT)        (a - b)

Who writes a script (`reproduce.idioms`) and who writes into somebody's line (`replay.handwriting`) spell them alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ANY, COMPARISON, OR, XOR, AND, SHIFT, SUM, PRODUCT, SIGN, POWER, ATOM = range(11)  # how tightly Python binds, the loosest first


@dataclass(frozen=True, slots=True)
class Phrase:
    """A piece of source, and how tightly it binds; `ANY` where that is not known."""

    text: str
    binds: int = ATOM

    def inside(self, binds: int) -> str:
        """Return it as a part of something that binds so tightly."""
        return self.text if self.binds >= binds else f"({self.text})"


INFIX: dict[str, tuple[str, int]] = {
    "add": ("+", SUM),
    "sub": ("-", SUM),
    "mul": ("*", PRODUCT),
    "div": ("/", PRODUCT),
    "true_divide": ("/", PRODUCT),
    "remainder": ("%", PRODUCT),
    "eq": ("==", COMPARISON),
    "ne": ("!=", COMPARISON),
    "lt": ("<", COMPARISON),
    "le": ("<=", COMPARISON),
    "gt": (">", COMPARISON),
    "ge": (">=", COMPARISON),
    "bitwise_and": ("&", AND),
    "bitwise_or": ("|", OR),
    "bitwise_xor": ("^", XOR),
    "bitwise_left_shift": ("<<", SHIFT),
    "bitwise_right_shift": (">>", SHIFT),
    "matmul": ("@", PRODUCT),
    "mm": ("@", PRODUCT),
    "bmm": ("@", PRODUCT),
    "mv": ("@", PRODUCT),
    "dot": ("@", PRODUCT),
    "pow": ("**", POWER),
}

PREFIX = {"neg": "-", "bitwise_not": "~"}

CASTS = {
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.bool: "bool",
    torch.int64: "long",
}

# Called otherwise than `torch.name`, or by another name.
FUNCTIONS = {
    "_log_softmax": "torch.log_softmax",
    "_softmax": "torch.softmax",
    "gelu": "torch.nn.functional.gelu",
    "hardtanh": "torch.nn.functional.hardtanh",
    "leaky_relu": "torch.nn.functional.leaky_relu",
    "linalg_vector_norm": "torch.linalg.vector_norm",
    "log_sigmoid_forward": "torch.nn.functional.logsigmoid",
    "mish": "torch.nn.functional.mish",
    "relu6": "torch.nn.functional.relu6",
    "silu": "torch.nn.functional.silu",
    "softplus": "torch.nn.functional.softplus",
    "special_entr": "torch.special.entr",
    "special_erfcx": "torch.special.erfcx",
    "special_expit": "torch.sigmoid",
    "special_i0": "torch.special.i0",
    "special_log_ndtr": "torch.special.log_ndtr",
    "special_xlog1py": "torch.special.xlog1py",
    "special_xlogy": "torch.xlogy",
}


def function_of(name: str) -> str:
    """Return where the function of an operator is found."""
    return FUNCTIONS.get(name, f"torch.{name}")
