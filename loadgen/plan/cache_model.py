"""Simulates an ideal prefix cache on a plan, to get the best hit ratio that a cluster could reach.

The plan is replayed one request at a time, in the order of planned times as if responses took no time. A
request hits the longest run of blocks, from its prompt's start, that earlier requests left. Then its full
prompt and its response (for later turns) are in the cache. This is an upper bound: a real server computes a
prefix twice if two requests bring it at the same time, and several workers hold several copies.

As in engines, only full blocks are cached. The last token of a prompt is always computed, so at most
`num_prompt_tokens - 1` tokens count as cached. The last token of a response is never cached, because it was
never an input. With a limited capacity, the least recently used block is evicted, of one request the last
block first. The memory of all workers counts as one cache.

It works on segments instead of tokens, so `AnswerOf` needs no responses. Blocks are stored in a radix tree
whose nodes are runs of blocks that were always used together. Source of the tree: SGLang's RadixAttention
(Zheng et al. 2024), section 3.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from loadgen.loadgen_errors import BadPlan
from loadgen.plan.plan import AnswerOf, Exact, Generated, Plan, PlannedRequest, Segment, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """Result for each request, by index.

    - `num_prompt_tokens`: tokens of the prompt
    - `num_shared_tokens`: those found in the cache
    - `num_cached_tokens`: those that an engine can use: full blocks, without the last token
    """

    block_size_tokens: int
    capacity_tokens: int | None
    num_prompt_tokens: tuple[int, ...]
    num_shared_tokens: tuple[int, ...]
    num_cached_tokens: tuple[int, ...]

    @property
    def hit_ratio(self) -> float:
        """Share of all prompt tokens that need not be computed."""
        return sum(self.num_cached_tokens) / sum(self.num_prompt_tokens)


def best_hits(plan: Plan, *, block_size_tokens: int = 1, capacity_tokens: int | None = None) -> CacheUse:
    """Replay a plan on an ideal cache.

    `capacity_tokens` is that of the whole cluster, None for infinite. Raises BadPlan for a plan with texts,
    whose tokens are unknown.
    """
    if block_size_tokens < 1:
        raise BadPlan(f"the block size is {block_size_tokens} tokens; it must be at least 1")
    if capacity_tokens is not None and capacity_tokens < block_size_tokens:
        raise BadPlan(
            f"the cache size is {capacity_tokens} tokens; it must hold at least one block of {block_size_tokens}"
        )
    tree = _Tree(block_size_tokens, None if capacity_tokens is None else capacity_tokens // block_size_tokens)
    count = len(plan.requests)
    num_prompt, num_shared, num_cached = [0] * count, [0] * count, [0] * count
    for request in in_planned_order(plan):
        num_prompt_tokens = plan.num_prompt_tokens(request)
        if num_prompt_tokens is None:
            raise BadPlan(
                f"request {request.index} is a text, whose tokens only the server knows; plan with --tokenizer to "
                "get token ids"
            )
        prompt = [_part(segment, plan, block_size_tokens) for segment in request.segments]
        num_answer = (request.cancel_after_tokens or request.output_tokens) - 1
        # No other request has this response, so all hits are in the prompt.
        answer = _Run(("answer", request.index), 0, num_answer, block_size_tokens)
        shared = tree.use(_blocks([*prompt, answer], block_size_tokens)) * block_size_tokens
        num_prompt[request.index] = num_prompt_tokens
        num_shared[request.index] = shared
        num_cached[request.index] = min(shared, (num_prompt_tokens - 1) // block_size_tokens * block_size_tokens)
    return CacheUse(
        block_size_tokens=block_size_tokens,
        capacity_tokens=capacity_tokens,
        num_prompt_tokens=tuple(num_prompt),
        num_shared_tokens=tuple(num_shared),
        num_cached_tokens=tuple(num_cached),
    )


def in_planned_order(plan: Plan) -> list[PlannedRequest]:
    """Return the requests by time, as if responses took no time; ties by index."""
    times: list[float] = []
    for request in plan.requests:
        if request.after is None:
            assert request.at_s is not None
            times.append(request.at_s)
        else:
            times.append(times[request.after] + request.think_s)
    return sorted(plan.requests, key=lambda request: (times[request.index], request.index))


@dataclass(slots=True)
class _Run:
    """A run of `length` tokens (or blocks, after `_blocks`) of one source, from token `first` on.

    The source is a generated segment's id, a response's name, or the tokens themselves.
    """

    source: object
    first: int
    length: int
    block_size: int

    @property
    def key(self) -> object:
        """Identifies the first block, given that everything before it is equal."""
        if isinstance(self.source, _Tokens):
            return self.source.token_ids[self.first : self.first + self.block_size]
        return (self.source, self.first)

    def common(self, other: _Run) -> int:
        """Return the number of blocks that both runs share; the first one is known to be shared."""
        length = min(self.length, other.length)
        if not isinstance(self.source, _Tokens) or not isinstance(other.source, _Tokens):
            return length
        num_tokens = length * self.block_size
        mine = self.source.token_ids[self.first : self.first + num_tokens]
        theirs = other.source.token_ids[other.first : other.first + num_tokens]
        if mine == theirs:
            return length
        return (
            next(position for position, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
            // self.block_size
        )

    def after(self, num_blocks: int) -> _Run:
        return _Run(self.source, self.first + num_blocks * self.block_size, self.length - num_blocks, self.block_size)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Source of exact tokens, which are compared one by one."""

    token_ids: tuple[int, ...]


def _part(segment: Segment, plan: Plan, block_size: int) -> _Run:
    match segment:
        case Generated(segment_id=segment_id, num_tokens=num_tokens):
            return _Run(segment_id, 0, num_tokens, block_size)
        case AnswerOf(index=index):
            return _Run(("answer", index), 0, plan.requests[index].output_tokens, block_size)
        case Exact(token_ids=token_ids):
            return _Run(_Tokens(token_ids), 0, len(token_ids), block_size)
        case Text():
            raise AssertionError("text has no tokens here")


def _blocks(parts: list[_Run], block_size: int) -> Iterator[_Run]:
    """Yield the full blocks of a prompt: runs of blocks of one source, and single blocks with several
    sources."""
    mixed: list[object] = []  # the unfinished block
    num_mixed = 0
    for part in parts:
        source, first, length = part.source, part.first, part.length
        if num_mixed:
            taken = min(length, block_size - num_mixed)
            mixed.append(_piece(source, first, taken))
            num_mixed, first, length = num_mixed + taken, first + taken, length - taken
            if num_mixed == block_size:
                yield _Run(_joined(mixed), 0, 1, block_size)
                mixed, num_mixed = [], 0
        num_blocks, rest = divmod(length, block_size)
        if num_blocks:
            yield _Run(source, first, num_blocks, block_size)
        if rest:
            mixed, num_mixed = [_piece(source, first + length - rest, rest)], rest


def _piece(source: object, first: int, length: int) -> object:
    return _Tokens(source.token_ids[first : first + length]) if isinstance(source, _Tokens) else (source, first, length)


def _joined(pieces: list[object]) -> object:
    """Return the source of a block that has several."""
    tokens = [piece.token_ids for piece in pieces if isinstance(piece, _Tokens)]
    return _Tokens(tuple(itertools.chain.from_iterable(tokens))) if len(tokens) == len(pieces) else tuple(pieces)


@dataclass(slots=True, eq=False)
class _CacheNode:
    """A run of blocks that follow the parent's. `used` is the number of the last request that used them."""

    run: _Run
    parent: _CacheNode | None
    used: int
    children: dict[object, _CacheNode] = field(default_factory=dict)


class _Tree:
    """Radix tree of cached blocks with LRU eviction."""

    def __init__(self, block_size: int, capacity_blocks: int | None) -> None:
        self._root = _CacheNode(_Run(None, 0, 0, block_size), None, 0)
        self._capacity = capacity_blocks
        self._num_blocks = 0
        self._now = 0
        self._leaves: list[tuple[int, int, _CacheNode]] = []  # a heap; outdated entries are skipped
        self._num_pushed = 0

    def use(self, runs: Iterable[_Run]) -> int:
        """Add these blocks to the cache and return how many leading ones were already there."""
        self._now += 1
        node, found, is_new = self._root, 0, False
        for run in runs:
            while run.length:
                child = None if is_new else node.children.get(run.key)
                if child is None:
                    is_new = True
                    child = _CacheNode(run, node, self._now)
                    node.children[run.key] = child
                    self._num_blocks += run.length
                    node, run = child, run.after(run.length)
                    continue
                common = child.run.common(run)
                if common < child.run.length:
                    child = self._split(child, common)
                child.used = self._now
                found += common
                node, run = child, run.after(common)
        if self._capacity is not None:
            if node is not self._root and not node.children:
                self._push(node)
            self._evict(self._capacity)
        return found

    def _split(self, node: _CacheNode, length: int) -> _CacheNode:
        """Split a node after `length` blocks and return the first part. The second part keeps the node's
        identity."""
        assert node.parent is not None
        first = _CacheNode(_Run(node.run.source, node.run.first, length, node.run.block_size), node.parent, node.used)
        node.parent.children[node.run.key] = first
        node.run, node.parent = node.run.after(length), first
        first.children[node.run.key] = node
        return first

    def _push(self, node: _CacheNode) -> None:
        self._num_pushed += 1
        heapq.heappush(self._leaves, (node.used, self._num_pushed, node))

    def _evict(self, capacity: int) -> None:
        """Evict least recently used blocks from the ends of chains."""
        while self._num_blocks > capacity:
            used, _, node = heapq.heappop(self._leaves)
            if node.children or node.used != used or node.parent is None:
                continue
            removed = min(self._num_blocks - capacity, node.run.length)
            self._num_blocks -= removed
            key = node.run.key
            node.run.length -= removed
            if node.run.length:
                self._push(node)
                continue
            parent, node.parent = node.parent, None
            del parent.children[key]
            if not parent.children and parent is not self._root:
                self._push(parent)
