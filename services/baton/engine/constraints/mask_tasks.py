"""Computes masks of grammars in threads, so that an expensive grammar does not hold up a step.

Each task has the mask of one sequence, and those after each of its drafts. Tasks of one grammar run one after
the other, because its matchers share a lexer. A sequence whose mask is not ready in time is deferred: its
token is drawn in a later step. So time decides when a token is drawn, and never which.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from baton.core.errors import Failure, Refused
from baton.core.kv.block_hash import TokenIds
from baton.engine.constraints.compiled_grammar import CompiledGrammar, LexerFull
from baton.engine.constraints.matcher_executor import MaskClocks, MatcherExecutor
from baton.engine.constraints.sequence_matchers import SequenceMatchers
from baton.engine.constraints.token_bits import Bits, has

MAX_WAIT_S = 0.004
"""Time that a step waits for the masks that were begun in it, after its forward pass was launched."""
MAX_WAIT_FOR_SLOW_S = 0.001
"""The same if only grammars with slow masks are not ready."""


@dataclass(frozen=True, slots=True)
class PositionMask:
    """The tokens that a grammar allows at one position [num_words], and whether a response may end there."""

    mask: Bits
    is_accepting: bool


@dataclass(eq=False, slots=True)
class MaskTask:
    """The mask of one sequence after its `outputs`, and the masks after each of its drafts.

    drafts: guesses of the tokens after `outputs`.
    positions: the masks, once they are computed: at least that after `outputs`, then those after drafts, up
        to one that the grammar does not allow.
    failure: why there is no mask.
    ended: done when a thread has computed this task and those that were started with it; None before.
    was_awaited: a step has waited for the task before.
    """

    matchers: SequenceMatchers
    seq_id: int
    outputs: TokenIds
    drafts: TokenIds
    positions: tuple[PositionMask, ...] = ()
    failure: Failure | None = None
    ended: Future[None] | None = None
    was_awaited: bool = False

    @property
    def is_done(self) -> bool:
        """True if there is a mask or a failure."""
        return bool(self.positions) or self.failure is not None

    def num_positions(self, drafts: TokenIds) -> int:
        """Return how many of the masks are those of these drafts, of which the task may have others."""
        same = next((n for n, pair in enumerate(zip(drafts, self.drafts, strict=False)) if pair[0] != pair[1]), None)
        return min(len(self.positions), 1 + (min(len(drafts), len(self.drafts)) if same is None else same))


Batch = tuple[Sequence[MaskTask], Future[None]]


class MaskThreads:
    """Threads that compute masks. Grammars with slow masks share one of their own.

    A grammar never has more than one thread, however many sequences wait for it.
    """

    def __init__(self, num_threads: int, clocks: MaskClocks, new_executor: Callable[[], MatcherExecutor]) -> None:
        """new_executor: called once in each thread."""
        self._clocks = clocks
        self._local = threading.local()
        self._new_executor = new_executor
        self._fast = ThreadPoolExecutor(num_threads, thread_name_prefix="masks")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="slow-masks")
        self._lock = threading.Lock()
        self._batches: dict[CompiledGrammar, deque[Batch]] = {}  # of grammars that have a thread

    def start(self, tasks: Iterable[MaskTask]) -> None:
        """Begin the tasks that have not begun."""
        for compiled, own in by_grammar(task for task in tasks if task.ended is None).items():
            self._start(compiled, own)

    def wait(self, tasks: Collection[MaskTask]) -> None:
        """Wait for tasks for a limited time, and for no task twice. Raises the error of a thread."""
        open_tasks = [task for task in tasks if not task.is_done]
        if not open_tasks:
            return
        new = [task for task in open_tasks if not task.was_awaited]
        began_s = self._clocks.wall_s()
        if fast := {task.ended for task in new if task.ended and not task.matchers.compiled.is_slow}:
            wait(fast, timeout=MAX_WAIT_S)
        if slow := {task.ended for task in new if task.ended and task.matchers.compiled.is_slow}:
            wait(slow, timeout=max(0.0, began_s + MAX_WAIT_FOR_SLOW_S - self._clocks.wall_s()))
        for task in open_tasks:
            task.was_awaited = True
            if not task.is_done and task.ended and task.ended.done() and (error := task.ended.exception()) is not None:
                raise error

    def close(self) -> None:
        """End the threads."""
        for threads in (self._fast, self._slow):
            threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, compiled: CompiledGrammar, tasks: Sequence[MaskTask]) -> None:
        ended: Future[None] = Future()
        for task in tasks:
            task.ended = ended
        with self._lock:
            batches = self._batches.get(compiled)
            if batches is None:
                self._batches[compiled] = batches = deque()
                (self._slow if compiled.is_slow else self._fast).submit(self._compute, compiled, batches)
            batches.append((tasks, ended))

    def _compute(self, compiled: CompiledGrammar, batches: deque[Batch]) -> None:
        while True:
            with self._lock:
                if not batches:
                    del self._batches[compiled]
                    return
                tasks, ended = batches.popleft()
            try:
                compute_masks(compiled, tasks, self._executor())
                ended.set_result(None)
            except BaseException as error:  # passed to the step
                ended.set_exception(error)

    def _executor(self) -> MatcherExecutor:
        executor: MatcherExecutor | None = getattr(self._local, "executor", None)
        if executor is None:
            executor = self._local.executor = self._new_executor()
        return executor


def by_grammar(tasks: Iterable[MaskTask]) -> Mapping[CompiledGrammar, Sequence[MaskTask]]:
    """Return the tasks of each grammar."""
    found: dict[CompiledGrammar, list[MaskTask]] = {}
    for task in tasks:
        found.setdefault(task.matchers.compiled, []).append(task)
    return found


def compute_masks(compiled: CompiledGrammar, tasks: Sequence[MaskTask], executor: MatcherExecutor) -> None:
    """Compute the masks of one grammar, in the calling thread."""
    with compiled.lock:
        compiled.renew_if_asked()
        while tasks:
            together = tasks[: compiled.num_together]
            tasks = tasks[len(together) :]
            if len(together) > 1:
                together = _compute_together(compiled, together, executor)
            for task in together:
                _compute_alone(compiled, task, executor)


def _compute_alone(compiled: CompiledGrammar, task: MaskTask, executor: MatcherExecutor) -> None:
    try:
        try:
            first = _mask_after(compiled, task, task.outputs, executor)
        except LexerFull:  # perhaps only because of the responses of others
            compiled.renew()
            first = _mask_after(compiled, task, task.outputs, executor)
    except Refused as refused:
        task.failure = refused.failure
        return
    positions = [first]
    for number, draft in enumerate(task.drafts, 1):
        if not has(positions[-1].mask, draft):
            break
        try:
            position = _mask_after(compiled, task, task.outputs + task.drafts[:number], executor)
        except Refused:  # if the draft is right, the next step finds the cause
            break
        positions.append(position)
    task.positions = tuple(positions)  # last: a step that does not wait sees all or nothing


def _mask_after(
    compiled: CompiledGrammar, task: MaskTask, outputs: TokenIds, executor: MatcherExecutor
) -> PositionMask:
    """Return the mask of a task's sequence after `outputs`. Raises Refused."""
    matcher = task.matchers.after(task.seq_id, outputs, executor)
    mask = matcher.mask
    if mask is None:
        masks = np.empty((1, compiled.tokenizer.num_words), dtype=np.uint32)
        began_s = executor.clocks.cpu_s()
        executor.fill([matcher.matcher], masks)
        compiled.count_mask(executor.clocks.cpu_s() - began_s)
        mask = masks[0]
        matcher.keep_mask(mask, may_accept=compiled.tokenizer.have_end_marks(masks)[0])
    return PositionMask(mask, matcher.is_accepting)


def _compute_together(
    compiled: CompiledGrammar, tasks: Sequence[MaskTask], executor: MatcherExecutor
) -> Sequence[MaskTask]:
    """Compute the masks of sequences with at most one new token and no drafts. Return the other tasks."""
    began_s = executor.clocks.wall_s()
    found = [(task, None if task.drafts else task.matchers.without_mask(task.seq_id, task.outputs)) for task in tasks]
    steps = [(task, matcher) for task, matcher in found if matcher is not None]
    remaining = [task for task, matcher in found if matcher is None]
    if not steps:
        return remaining
    executor.consume([(one.matcher, task.outputs[-1]) for task, one in steps if len(one.consumed) < len(task.outputs)])
    masks = np.empty((len(steps), compiled.tokenizer.num_words), dtype=np.uint32)
    executor.fill([matcher.matcher for _, matcher in steps], masks)
    may_accept = compiled.tokenizer.have_end_marks(masks)
    computed: list[tuple[MaskTask, PositionMask]] = []
    for (task, matcher), mask, may in zip(steps, masks, may_accept, strict=True):
        try:
            matcher.advance(task.outputs, mask, may_accept=may)
            computed.append((task, PositionMask(mask, matcher.is_accepting)))
        except Refused:  # the cause is found when it is computed alone
            task.matchers.drop(task.seq_id)
            remaining.append(task)
    compiled.count_call(executor.clocks.wall_s() - began_s, len(steps))
    for task, position in computed:
        task.positions = (position,)
    return remaining
