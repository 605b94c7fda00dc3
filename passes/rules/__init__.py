"""Rules: for each op the dims of its operands and results named as factors. Importing the folder registers all."""

from autopar.passes.rules import (
    attention,
    construct,
    convolution,
    embedding,
    indexing,
    losses,
    matmul,
    normalization,
    parts,
    pointwise,
    pooling,
    recurrent,
    reductions,
    views,
)
from autopar.passes.rules.core import LOCALIZE, RULES, Rule, Special, factors, localizes, rule_of

__all__ = [
    "LOCALIZE",
    "RULES",
    "Rule",
    "Special",
    "attention",
    "construct",
    "convolution",
    "embedding",
    "factors",
    "indexing",
    "localizes",
    "losses",
    "matmul",
    "normalization",
    "parts",
    "pointwise",
    "pooling",
    "recurrent",
    "reductions",
    "rule_of",
    "views",
]
