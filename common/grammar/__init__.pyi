from common.grammar.checks import GrammarChecks
from common.grammar.compiler import main
from common.grammar.gbnf import gbnf_to_lark, is_gbnf
from common.grammar.grammar import Constraint, sampling_failure
from common.grammar.grammars import GRAMMAR_TIMEOUT_S, CompiledGrammar, GrammarReady, Grammars
from common.grammar.token_rules import (
    BANNED,
    FREE,
    TokenLimits,
    finish_reason,
    num_output_needed,
    token_limits,
    token_mask,
)
from common.grammar.vocabulary import MASK_BITS, brief, limits

__all__ = [
    "BANNED",
    "CompiledGrammar",
    "Constraint",
    "FREE",
    "GRAMMAR_TIMEOUT_S",
    "GrammarChecks",
    "GrammarReady",
    "Grammars",
    "MASK_BITS",
    "TokenLimits",
    "brief",
    "finish_reason",
    "gbnf_to_lark",
    "is_gbnf",
    "limits",
    "main",
    "num_output_needed",
    "token_limits",
    "token_mask",
    "sampling_failure",
]
