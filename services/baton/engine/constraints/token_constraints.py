"""Computes which tokens each constrained sequence of a step may draw.

State is only a cache: a matcher is found by its sequence and the output tokens that it has consumed, or is
built by consuming them again. A retry, a hand-over to another worker, a preemption and a fork of samples
therefore need nothing else.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from threading import Lock, local
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from baton.core.errors import Failure, ModelError, Refused
from baton.core.kv.block_hash import TokenIds, token_ids
from baton.core.request import Sampling
from baton.engine.constraints.compiled_grammar import CompiledGrammar, no_token_at
from baton.engine.constraints.grammar_tokenizer import GrammarTokenizer
from baton.engine.constraints.mask_tasks import MaskTask, MaskThreads, PositionMask, by_grammar, compute_masks
from baton.engine.constraints.matcher_executor import NO_CLOCKS, MaskClocks, MatcherExecutor
from baton.engine.constraints.sampling_rules import SamplingRules, check_rules, no_grammar_support
from baton.engine.constraints.sequence_matchers import SequenceMatchers
from baton.engine.constraints.token_bits import Bits, bits_of, clear, num_words
from baton.engine.state.draft_rows import DrawnTokens, RowRequests
from baton.engine.state.step import SampleRequest

MAX_CACHED_GRAMMARS = 256
MAX_CACHED_GRAMMAR_BYTES = 64 << 20
"""Compiled grammars that are kept after their requests have ended: their number and memory."""
MAX_GRAMMAR_MEMORY = 256 << 20
"""Memory of all compiled grammars. Above it, the largest are compiled again, because their lexers grow."""
MAX_UNOWNED_RULES = 16
"""Prepared rules that are kept without a job that holds them."""
MAX_FORCED_TOKENS = 64
"""Forced tokens that a step returns for a sequence. A draft is shorter."""
MAX_FORCED_S = 0.001
"""Time in which a step searches them, for all sequences. The device waits for it."""
_GRAMMAR_THREADS = 2
_CHECK_MEMORY_FROM = 4 << 20
"""Memory of a grammar from which its growth is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """The tokens that the constrained rows of a step may draw.

    rows: the constrained rows that can be drawn, ascending.
    bits: [len(rows), num_words] tokens that each of them may draw; at least one.
    failures: failures of constrained rows, by row.
    deferred: constrained rows whose masks are not ready, or that follow a draft which the grammar forbids.
        Their tokens are drawn in a later step.
    """

    rows: tuple[int, ...] = ()
    bits: Bits = field(default_factory=lambda: np.zeros((0, 0), dtype=np.uint32))
    failures: Mapping[int, Failure] = field(default_factory=dict)
    deferred: frozenset[int] = frozenset()

    def by_row(self) -> dict[int, Bits]:
        """Return the bits of each row that has them."""
        return dict(zip(self.rows, self.bits, strict=True))


NO_MASKS = TokenMasks()


@dataclass(frozen=True, slots=True)
class _ConstrainedRows:
    """The constrained rows of a step: their rules, tasks of those with a grammar, and failures, by row.

    All rows of a sequence with drafts share one task. positions: place of a row among them, by row.
    """

    rows: RowRequests
    rules: dict[int, SamplingRules] = field(default_factory=dict)
    tasks: dict[int, MaskTask] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)

    def mask_of(self, row: int) -> PositionMask | None:
        """Return what the grammar of a row allows; None without a grammar. Its mask must be computed."""
        task = self.tasks.get(row)
        return None if task is None else task.positions[self.positions[row]]


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
        clocks: MaskClocks | None = None,
        finds_forced: bool = False,
    ) -> None:
        """vocab_size: width of the logits. eos_token_ids: end tokens of the model.

        tokenizer: builds the table when it is first needed, or when `load` is called. It may raise
            ModelError. None: grammars are refused.
        num_threads: threads that compute the masks of a step; used with `clocks`.
        in_threads: whether grammars are compiled in threads. False: in the event loop, for simulations.
        clocks: with them, masks are computed in threads, and sequences with slow masks are deferred.
        finds_forced: whether `forced_after` finds tokens.
        """
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._all = bits_of(range(vocab_size), vocab_size)
        self._inside = self._all  # of a grammar
        self._build_tokenizer = tokenizer
        self._tokenizer: GrammarTokenizer | Refused | None = None
        self._in_threads = in_threads
        self._finds_forced = finds_forced
        self._local = local()
        self._clocks = clocks or NO_CLOCKS
        self._mask_threads = None if clocks is None else MaskThreads(num_threads, clocks, self._new_executor)
        self._threads: ThreadPoolExecutor | None = None
        self._lock = Lock()
        self._grammars: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._in_use: WeakSet[CompiledGrammar] = WeakSet()
        self._rules: WeakValueDictionary[int, SamplingRules] = WeakValueDictionary()
        self._unowned: OrderedDict[int, SamplingRules] = OrderedDict()
        self._begun: _ConstrainedRows | None = None
        self._in_last_step: dict[int, SamplingRules] = {}  # a step that was planned ahead may need them once more

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
        if self._mask_threads is not None:
            self._mask_threads.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    # -- at every token ------------------------------------------------------------------------------------------------

    def begin(self, rows: RowRequests) -> None:
        """Begin to compute the masks of a step, which `masks` returns later. Only threads begin anything."""
        if self._mask_threads is not None:
            self._begun = self._constrained(rows)
            self._mask_threads.start(dict.fromkeys(self._begun.tasks.values()))

    def masks(self, rows: RowRequests) -> TokenMasks:
        """Return the masks of the constrained rows of a step.

        rows: as in `begin`. `history` of a request must be complete.
        """
        step, self._begun = self._begun, None
        if step is None or step.rows is not rows:
            step = self._constrained(rows)
        rules, tasks, failures = step.rules, step.tasks, step.failures
        self._in_last_step = {id(own.sampling): own for own in rules.values()}
        if not rules:
            return TokenMasks(failures=failures) if failures else NO_MASKS
        self._run(dict.fromkeys(tasks.values()))
        deferred = set()
        for row, task in tasks.items():
            position = step.positions[row]
            if task.is_done:
                rules[row].pending.pop(task.seq_id, None)
            if task.failure is not None and not position:
                failures[row] = task.failure
            elif not task.is_done or position >= task.num_positions(_drafts_before(rows, row, position)):
                deferred.add(row)
        found = [row for row in rules if row not in failures and row not in deferred]
        bits = self._allowed_by_grammars([step.mask_of(row) for row in found], [rules[row] for row in found])
        for place, row in enumerate(found):
            if rules[row].have_token_lists or rows[row][1].banned_token_ids:
                self._apply_other_rules(bits[place], rows[row][1], rules[row])
        drawable = bits.any(axis=1)
        for index in np.flatnonzero(~drawable):
            row = found[index]
            mask, request = step.mask_of(row), rows[row][1]
            num_outputs = request.position - request.num_prompt_tokens
            failures[row] = no_token_at(num_outputs, is_complete=mask is not None and mask.is_accepting)
        return TokenMasks(
            rows=tuple(row for row in found if row not in failures),
            bits=bits if drawable.all() else bits[drawable],
            failures=failures,
            deferred=frozenset(deferred),
        )

    def forced_after(self, drawn: Iterable[DrawnTokens]) -> dict[int, tuple[int, ...]]:
        """Return the tokens that grammars force after tokens that were drawn, by `seq_id`. They are drafts.

        Called at the end of a step, so the next step verifies them. Sequences after `MAX_FORCED_S` have none,
        nor those whose grammar is slow or in use by a thread. Those of several samples have none yet.
        """
        found: dict[int, tuple[int, ...]] = {}
        began_s = self._clocks.wall_s() if self._finds_forced else 0.0
        for seq_id, request, tokens in drawn if self._finds_forced else ():
            if not request.sampling.grammar or not tokens or len(request.sample_indices) > 1:
                continue
            if self._clocks.wall_s() - began_s > MAX_FORCED_S:
                break
            rules = self._in_last_step.get(id(request.sampling))  # it had a mask in this step
            if rules is None or rules.matchers is None or tokens[-1].token_id in rules.end_token_ids:
                continue
            outputs = _outputs_of(request) + token_ids(token.token_id for token in tokens)
            forced = rules.matchers.forced_after(seq_id, outputs, self._executor_of_thread())
            if known := tuple(takewhile(lambda token_id: token_id < self._vocab_size, forced)):
                found[seq_id] = known[:MAX_FORCED_TOKENS]
        return found

    # -- internal ------------------------------------------------------------------------------------------------------

    def _constrained(self, rows: RowRequests) -> _ConstrainedRows:
        step = _ConstrainedRows(rows)
        position, continues = 0, False
        for row, (seq_id, request) in enumerate(rows):
            position = position + 1 if continues else 0
            continues = bool(request.drafts)
            if request.sampling.is_constrained:
                try:
                    rules = step.rules[row] = self._rules_of(request.sampling)
                except Refused as refused:
                    step.failures[row] = refused.failure
                    continue
                if rules.matchers is not None:
                    step.positions[row] = position
                    step.tasks[row] = (
                        step.tasks[row - 1] if position else self._task(rules, rules.matchers, seq_id, request)
                    )
        return step

    def _task(self, rules: SamplingRules, matchers: SequenceMatchers, seq_id: int, request: SampleRequest) -> MaskTask:
        return rules.task(matchers, seq_id, _outputs_of(request), token_ids(request.drafts))

    def _run(self, tasks: Collection[MaskTask]) -> None:
        """Compute masks. With threads, tasks that take too long are not done afterwards."""
        if self._mask_threads is not None:
            self._mask_threads.start(tasks)
            self._mask_threads.wait(tasks)
        else:
            for compiled, own in by_grammar(tasks).items():
                compute_masks(compiled, own, self._executor_of_thread())
        if any(compiled.num_bytes > _CHECK_MEMORY_FROM for compiled in {task.matchers.compiled for task in tasks}):
            with self._lock:
                self._bound_memory()

    def _prepare(self, sampling: Sampling, outputs: TokenIds) -> SamplingRules:
        check_rules(sampling, self._vocab_size)
        rules = SamplingRules(
            sampling,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            compiled=self._compiled(sampling.grammar, self._load_tokenizer()) if sampling.grammar else None,
        )
        if rules.matchers is not None:
            rules.matchers.replay(outputs, self._executor_of_thread())
        with self._lock:
            self._rules[id(sampling)] = rules
        return rules

    def _executor_of_thread(self) -> MatcherExecutor:
        executor: MatcherExecutor | None = getattr(self._local, "executor", None)
        if executor is None:
            executor = self._local.executor = self._new_executor()
        return executor

    def _new_executor(self) -> MatcherExecutor:
        return MatcherExecutor(self._load_tokenizer().table, self._clocks)

    def _load_tokenizer(self) -> GrammarTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._new_tokenizer()
                if isinstance(self._tokenizer, GrammarTokenizer):
                    self._inside = self._tokenizer.inside(self._eos_token_ids)
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
            compiled = self._grammars.setdefault(grammar, compiled)
            self._in_use.add(compiled)
            self._bound_memory()
        return compiled

    def _bound_memory(self) -> None:
        """Drop cached grammars, then let the largest of those in use be compiled again. Needs the lock."""
        while len(self._grammars) > MAX_CACHED_GRAMMARS or (
            len(self._grammars) > 1 and _bytes_of(self._grammars.values()) > MAX_CACHED_GRAMMAR_BYTES
        ):
            self._grammars.popitem(last=False)
        in_use = sorted(self._in_use, key=lambda compiled: compiled.num_bytes)
        excess = _bytes_of(in_use) - MAX_GRAMMAR_MEMORY
        while excess > 0 and in_use:
            largest = in_use.pop()
            excess -= largest.num_bytes
            largest.ask_to_renew()

    def _rules_of(self, sampling: Sampling) -> SamplingRules:
        """Return the prepared rules of a request; prepare them if no job holds them."""
        if (rules := self._in_last_step.get(id(sampling))) is not None:
            return rules
        with self._lock:
            rules = self._rules.get(id(sampling))
        if rules is None:
            rules = self._prepare(sampling, token_ids())
            self._unowned[id(sampling)] = rules
            if len(self._unowned) > MAX_UNOWNED_RULES:
                self._unowned.popitem(last=False)
        return rules

    def _allowed_by_grammars(self, masks: Sequence[PositionMask | None], rules: Sequence[SamplingRules]) -> Bits:
        """Return what each grammar allows next, [len(masks), num_words]; all tokens without a grammar."""
        words = num_words(self._vocab_size)
        bits = np.empty((len(masks), words), dtype=np.uint32)
        for row, position in zip(bits, masks, strict=True):
            if position is not None:
                row[:] = position.mask[:words]
        bits &= self._inside
        for index, position in enumerate(masks):
            if position is None:
                bits[index] = self._all
            elif position.is_accepting:
                for token_id in rules[index].end_token_ids:
                    bits[index, token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return bits

    def _apply_other_rules(self, bits: Bits, request: SampleRequest, rules: SamplingRules) -> None:
        """Apply the rules other than the grammar to one mask."""
        if rules.allowed is not None:
            bits &= rules.allowed
        if rules.bad_words is not None:
            clear(bits, rules.bad_words.banned_after(_outputs_of(request)))
        if request.banned_token_ids:
            clear(bits, [token_id for token_id in request.banned_token_ids if token_id < self._vocab_size])


def _outputs_of(request: SampleRequest) -> TokenIds:
    return request.history[request.num_prompt_tokens : request.position]


def _bytes_of(grammars: Iterable[CompiledGrammar]) -> int:
    return sum(compiled.num_bytes for compiled in grammars)


def _drafts_before(rows: RowRequests, row: int, position: int) -> TokenIds:
    """Return the drafts before a row that is at this place among those of its sequence."""
    return token_ids(rows[row - position][1].drafts[:position])
