"""The rules of one request that forbid tokens, prepared for use at every token."""

from baton.core.errors import Reason, Refused, invalid
from baton.core.kv.block_hash import TokenIds
from baton.core.request import Sampling
from baton.engine.constraints.bad_words import BadWords
from baton.engine.constraints.compiled_grammar import CompiledGrammar
from baton.engine.constraints.mask_tasks import MaskTask
from baton.engine.constraints.sequence_matchers import SequenceMatchers
from baton.engine.constraints.token_bits import Bits, bits_of


class SamplingRules:
    """The prepared rules of one `Sampling`, and the matchers of its sequences.

    sampling: kept, because rules are found by its identity.
    allowed: bits of `allowed_token_ids`; None allows all.
    bad_words: None if there are none.
    end_token_ids: end tokens that may be drawn where the grammar accepts, and only there.
    matchers: None without a grammar.
    pending: masks that are being computed, by sequence.
    """

    __slots__ = ("__weakref__", "allowed", "bad_words", "end_token_ids", "matchers", "pending", "sampling")

    def __init__(
        self,
        sampling: Sampling,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        compiled: CompiledGrammar | None = None,
    ) -> None:
        self.sampling = sampling
        self.allowed: Bits | None = None
        if sampling.allowed_token_ids:
            self.allowed = bits_of(sampling.allowed_token_ids, vocab_size)
        self.bad_words = BadWords(sampling.bad_words) if sampling.bad_words else None
        self.end_token_ids: tuple[int, ...] = ()
        self.matchers: SequenceMatchers | None = None
        if compiled is not None:
            tokenizer = compiled.tokenizer
            eos = () if sampling.ignore_eos else eos_token_ids
            stops = (t for t in sampling.stop_token_ids if t in eos_token_ids or tokenizer.is_special(t))
            self.end_token_ids = tuple(sorted(t for t in {*eos, *stops} if tokenizer.knows(t)))
            self.matchers = SequenceMatchers(compiled)
        self.pending: dict[int, MaskTask] = {}

    @property
    def have_token_lists(self) -> bool:
        """True if `allowed_token_ids` or `bad_words` forbid tokens, with or without a grammar."""
        return self.allowed is not None or self.bad_words is not None

    def task(self, matchers: SequenceMatchers, seq_id: int, outputs: TokenIds, drafts: TokenIds) -> MaskTask:
        """Return the task of a sequence after its outputs. It is new if nothing has begun it.

        One that was begun may have other drafts: it is not begun anew, because it may take long.
        """
        task = self.pending.get(seq_id)
        if task is None or task.outputs != outputs:
            task = self.pending[seq_id] = MaskTask(matchers, seq_id, outputs, drafts)
        return task


def check_rules(sampling: Sampling, vocab_size: int) -> None:
    """Raise Refused if a rule names a token id that the model does not have, or an empty bad word."""
    if max(sampling.allowed_token_ids, default=0) >= vocab_size:
        raise _unknown("allowed_token_ids", max(sampling.allowed_token_ids), vocab_size)
    for word in sampling.bad_words:
        if not word:
            raise invalid("bad_words has an empty entry; remove it")
        if max(word) >= vocab_size:
            raise _unknown("bad_words", max(word), vocab_size)


def no_grammar_support(why: str) -> Refused:
    """Return the refusal of a grammar by a worker that has no table of its tokenizer."""
    return invalid(f"this worker supports no grammars: {why}", Reason.INVALID_GRAMMAR)


def _unknown(field: str, token_id: int, vocab_size: int) -> Refused:
    return invalid(f"{field} has token id {token_id}; the model has ids below {vocab_size}")
