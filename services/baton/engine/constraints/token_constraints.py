"""Computes which tokens each constrained sequence of a step may draw.

State is only a cache: a matcher is found by its sequence and the output tokens that it has consumed, or is
built by consuming them again. A retry, a hand-over to another worker, a preemption and a fork of samples
therefore need nothing else.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLExecutor

from baton.core.errors import Failure, ModelError, Refused
from baton.core.kv.block_hash import TokenIds, token_ids
from baton.core.request import Sampling
from baton.engine.constraints.compiled_grammar import (
    CompiledGrammar,
    GrammarMatcher,
    fill_masks,
    no_token_left,
)
from baton.engine.constraints.grammar_tokenizer import GrammarTokenizer
from baton.engine.constraints.sampling_rules import SamplingRules, check_rules, no_grammar_support
from baton.engine.constraints.slow_masks import NUM_FAST_MASKS, SLOW_MASK_S, SlowMasks
from baton.engine.constraints.token_bits import Bits, bits_of, clear, num_words
from baton.engine.state.step import SampleRequest

MAX_CACHED_GRAMMARS = 256
MAX_CACHED_GRAMMAR_BYTES = 2 << 20
"""Compiled grammars that are kept after their requests have ended: their number, and the bytes of their text.
A compiled grammar takes at most about 70 times its text."""
MAX_UNOWNED_RULES = 16
"""Prepared rules that are kept without a job that holds them."""
_GRAMMAR_THREADS = 2
_FAST_MASK_S = 0.0005
"""Time of a fast mask among others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """The tokens that the constrained rows of a step may draw.

    rows: the constrained rows that can be drawn, ascending.
    bits: [len(rows), num_words] tokens that each of them may draw; at least one.
    failures: failures of constrained rows, by row.
    deferred: the other constrained rows. Their masks are not ready; they are asked for again in a later step.
    """

    rows: tuple[int, ...] = ()
    bits: Bits = field(default_factory=lambda: np.zeros((0, 0), dtype=np.uint32))
    failures: Mapping[int, Failure] = field(default_factory=dict)
    deferred: frozenset[int] = frozenset()

    def by_row(self) -> dict[int, Bits]:
        """Return the bits of each row that has them."""
        return dict(zip(self.rows, self.bits, strict=True))


NO_MASKS = TokenMasks()


class TokenConstraints:
    """Prepares the rules of requests, and computes masks. One object belongs to one model on one worker.

    `prepare` is called in the event loop, `masks` in the thread that samples.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Callable[[], GrammarTokenizer] | None = None,
        num_threads: int = 1,
        in_threads: bool = True,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """vocab_size: width of the logits. eos_token_ids: end tokens of the model.

        tokenizer: builds the table when it is first needed, or when `load` is called. It may raise
            ModelError. None: grammars are refused.
        num_threads: threads that compute the masks of one step.
        in_threads: whether grammars are compiled in threads. False: in the event loop, for simulations.
        clock: returns the time in seconds. With it, sequences with slow masks are deferred.
        """
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._all = bits_of(range(vocab_size), vocab_size)
        self._build_tokenizer = tokenizer
        self._tokenizer: GrammarTokenizer | Refused | None = None
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None
        self._in_threads = in_threads
        self._slow = SlowMasks(clock) if clock is not None else None
        self._threads: ThreadPoolExecutor | None = None
        self._lock = Lock()
        self._grammars: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._cached_bytes = 0
        self._rules: WeakValueDictionary[int, SamplingRules] = WeakValueDictionary()
        self._unowned: OrderedDict[int, SamplingRules] = OrderedDict()
        self._in_last_step: list[SamplingRules] = []  # a step that was planned ahead may need them once more

    # -- before a request runs -----------------------------------------------------------------------------------------

    def load(self) -> str:
        """Build the tokenizer table. Returns why grammars are not supported; empty if they are."""
        try:
            self._load_tokenizer()
        except Refused as refused:
            return str(refused)
        return ""

    def check(self, sampling: Sampling) -> None:
        """Check token ids, and that grammars are supported. Raises Refused.

        Cheap, except for the first grammar if `load` was not called.
        """
        check_rules(sampling, self._vocab_size)
        if sampling.grammar:
            self._load_tokenizer()

    async def prepare(self, sampling: Sampling, outputs: TokenIds) -> SamplingRules:
        """Compile the grammar of a request and replay the output tokens of its earlier attempts.

        The rules stay prepared while the caller holds the result. Raises Refused if the grammar is invalid,
        too expensive, or does not match `outputs`.
        """
        is_quick = not sampling.grammar or (not outputs and sampling.grammar in self._grammars)
        if is_quick or not self._in_threads:
            return self._prepare(sampling, outputs)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix="grammar")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._prepare, sampling, outputs)

    def close(self) -> None:
        """End all threads."""
        if self._slow is not None:
            self._slow.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    # -- at every token ------------------------------------------------------------------------------------------------

    def masks(self, rows: Sequence[tuple[int, SampleRequest]]) -> TokenMasks:
        """Return the masks of the constrained rows of a step.

        rows: (seq_id, request) of each row. `history` of a request must be complete.
        """
        rules_of, failures = self._rules_of_rows(rows)
        self._in_last_step = list(rules_of.values())
        deferred = self._defer_slow(rows, rules_of, failures)
        began_s = self._slow.now_s() if self._slow is not None else 0.0
        found: list[tuple[int, SampleRequest, SamplingRules, GrammarMatcher | None]] = []
        for row, rules in rules_of.items():
            if row not in deferred and row not in failures:
                seq_id, request = rows[row]
                try:
                    found.append((row, request, rules, rules.matcher_after(seq_id, _outputs_of(request))))
                except Refused as refused:
                    failures[row] = refused.failure
        if not found:
            return TokenMasks(failures=failures, deferred=deferred) if failures or deferred else NO_MASKS
        bits = self._grammar_masks([matcher for *_, matcher in found])
        if self._slow is not None and self._slow.now_s() - began_s > SLOW_MASK_S + _FAST_MASK_S * len(found):
            for _, _, rules, _ in found:  # one of them is slow: from now on they are computed apart
                rules.count_fast_mask(False)
        drawable: list[int] = []
        for index, (row, request, rules, matcher) in enumerate(found):
            try:
                self._apply(bits[index], request, rules, matcher)
                drawable.append(index)
            except Refused as refused:
                failures[row] = refused.failure
        return TokenMasks(
            rows=tuple(found[index][0] for index in drawable), bits=bits[drawable], failures=failures, deferred=deferred
        )

    # -- internal ------------------------------------------------------------------------------------------------------

    def _rules_of_rows(
        self, rows: Sequence[tuple[int, SampleRequest]]
    ) -> tuple[dict[int, SamplingRules], dict[int, Failure]]:
        rules: dict[int, SamplingRules] = {}
        failures: dict[int, Failure] = {}
        for row, (_, request) in enumerate(rows):
            if request.sampling.is_constrained:
                try:
                    rules[row] = self._rules_of(request.sampling)
                except Refused as refused:
                    failures[row] = refused.failure
        return rules, failures

    def _defer_slow(
        self,
        rows: Sequence[tuple[int, SampleRequest]],
        rules_of: Mapping[int, SamplingRules],
        failures: dict[int, Failure],
    ) -> frozenset[int]:
        """Compute the masks of grammars that may be slow. Returns the rows for which that takes too long."""
        if self._slow is None:
            return frozenset()
        pending = {
            row: self._slow.start(rules, rows[row][0], _outputs_of(rows[row][1]))
            for row, rules in rules_of.items()
            if rules.tokenizer is not None and (rules.num_fast_masks < NUM_FAST_MASKS or rows[row][0] in rules.pending)
        }
        deferred, failed = self._slow.wait(pending)
        failures.update(failed)
        for row in pending.keys() - deferred:
            rules_of[row].pending.pop(rows[row][0], None)
        return deferred

    def _prepare(self, sampling: Sampling, outputs: TokenIds) -> SamplingRules:
        check_rules(sampling, self._vocab_size)
        tokenizer = self._load_tokenizer() if sampling.grammar else None
        rules = SamplingRules(
            sampling,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            tokenizer=tokenizer,
            compiled=self._compiled(sampling.grammar, tokenizer) if tokenizer is not None else None,
        )
        rules.replay(outputs)
        with self._lock:
            self._rules[id(sampling)] = rules
        return rules

    def _load_tokenizer(self) -> GrammarTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._new_tokenizer()
            if isinstance(self._tokenizer, Refused):
                raise self._tokenizer
            return self._tokenizer

    def _new_tokenizer(self) -> GrammarTokenizer | Refused:
        if self._build_tokenizer is None:
            return no_grammar_support("it has no tokenizer")
        try:
            return self._build_tokenizer()
        except ModelError as error:
            return no_grammar_support(str(error))

    def _compiled(self, grammar: str, tokenizer: GrammarTokenizer) -> CompiledGrammar:
        with self._lock:
            if (known := self._grammars.get(grammar)) is not None:
                self._grammars.move_to_end(grammar)
                return known
        compiled = CompiledGrammar(grammar, tokenizer)  # without the lock: it may take tens of milliseconds
        with self._lock:
            if grammar not in self._grammars:
                self._grammars[grammar] = compiled
                self._cached_bytes += len(grammar)
            while len(self._grammars) > MAX_CACHED_GRAMMARS or self._cached_bytes > MAX_CACHED_GRAMMAR_BYTES:
                self._cached_bytes -= len(self._grammars.popitem(last=False)[0])
        return compiled

    def _rules_of(self, sampling: Sampling) -> SamplingRules:
        """Return the prepared rules of a request; prepare them if no job holds them."""
        with self._lock:
            rules = self._rules.get(id(sampling))
        if rules is None:
            rules = self._prepare(sampling, token_ids())
            self._unowned[id(sampling)] = rules
            if len(self._unowned) > MAX_UNOWNED_RULES:
                self._unowned.popitem(last=False)
        return rules

    def _grammar_masks(self, matchers: Sequence[GrammarMatcher | None]) -> Bits:
        """Return what each grammar allows next, [len(matchers), num_words]; all tokens without a grammar."""
        words = num_words(self._vocab_size)
        masks = np.tile(self._all, (len(matchers), 1))
        followed = [(index, matcher) for index, matcher in enumerate(matchers) if matcher is not None]
        if followed:
            tokenizer = self._load_tokenizer()
            found = np.zeros((len(followed), tokenizer.num_words), dtype=np.uint32)
            if self._executor is None and self._num_threads > 1:  # its threads exist only where grammars are used
                self._executor = LLExecutor(self._num_threads)
            fill_masks([matcher for _, matcher in followed], found, self._executor)
            masks[[index for index, _ in followed]] = found[:, :words]
        return masks

    def _apply(self, bits: Bits, request: SampleRequest, rules: SamplingRules, matcher: GrammarMatcher | None) -> None:
        """Apply the rules other than the grammar to one mask. Raises Refused if no token is left."""
        if matcher is not None:
            matcher.check()
            bits &= rules.inside_bits
            if matcher.is_accepting:
                bits |= rules.end_bits
        if rules.allowed is not None:
            bits &= rules.allowed
        if rules.bad_words is not None:
            clear(bits, rules.bad_words.banned_after(_outputs_of(request)))
        clear(bits, [token_id for token_id in request.banned_token_ids if token_id < self._vocab_size])
        if not bits.any():
            raise Refused(no_token_left(_no_token_message(request, matcher)))


def _outputs_of(request: SampleRequest) -> TokenIds:
    return request.history[request.num_prompt_tokens : request.position]


def _no_token_message(request: SampleRequest, matcher: GrammarMatcher | None) -> str:
    where = f"no token is left at position {request.position - request.num_prompt_tokens} of the response"
    if matcher is not None and matcher.is_accepting:
        return (
            f"{where}: its grammar is complete, and ignore_eos, min_tokens, allowed_token_ids or bad_words forbid "
            "the end; relax them"
        )
    return f"{where}: grammar, allowed_token_ids, bad_words and min_tokens exclude every token; relax one of them"
