"""A check of grammars for gateways in tests, without a process."""

from baton.core.errors import Reason, Refused
from baton.engine.constraints.compiled_grammar import CompiledGrammar
from baton.engine.constraints.grammar_tokenizer import byte_grammar_tokenizer
from baton.gateway.input.answers.answer_grammar import AnswerGrammar
from baton.gateway.input.client_call import InvalidField
from baton.gateway.text.tokenizer import Tokenizer


class InProcessGrammarCheck:
    """Compiles grammars at once. Implements `GrammarCheck`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = [bytes((i,)) if i < 256 else b"<%d>" % i for i in range(tokenizer.vocab_size)]
        self._table = byte_grammar_tokenizer(tokens, range(256, len(tokens)))

    async def check(self, grammar: AnswerGrammar, tenant: str) -> None:
        """Raise InvalidField if the grammar is invalid."""
        try:
            CompiledGrammar(grammar.written.text, self._table)
        except Refused as refused:
            raise InvalidField(grammar.field, refused.failure.message, Reason.INVALID_GRAMMAR) from refused
