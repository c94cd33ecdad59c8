"""Blocks that a worker is about to hold, because a prompt that contains them has been placed there.

A radix tree over chains of block hashes. A block's hash covers everything before it, so two chains that agree
at one position agree before it too: where they part is found by bisection, and adding or asking costs by how
often chains branch, not by their length.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from baton.core.kv.block_hash import BlockHash

MAX_EXPECTED_BLOCKS = 1_048_576
"""Of all expectations together, each counted in full: about 75 MB at most, if no two share a block."""


class _TrieNode:
    """Positions [start, end) of all chains that pass through here. `hashes` is one such chain, from its first
    position to its last."""

    __slots__ = ("children", "end", "hashes", "mask", "num_ends", "parent", "passing", "start")

    def __init__(self, parent: "_TrieNode | None", hashes: tuple[BlockHash, ...], start: int, end: int) -> None:
        self.parent = parent
        self.hashes = hashes
        self.start = start
        self.end = end
        self.children: dict[BlockHash, _TrieNode] = {}
        self.passing: dict[int, int] = {}  # bit of a worker -> its expectations that pass through or end here
        self.mask = 0  # of the workers in `passing`
        self.num_ends = 0

    def let_go(self, hashes: tuple[BlockHash, ...]) -> None:
        """One of the chains that pass through here has ended: another stands for them from now on, so that
        none stays in memory."""
        if self.hashes[-1:] == hashes[-1:]:
            below = next(iter(self.children.values()), None)
            self.hashes = hashes[: self.end] if below is None else below.hashes

    @property
    def key(self) -> BlockHash:
        return self.hashes[self.start]

    def common(self, hashes: Sequence[BlockHash]) -> int:
        """Up to which position `hashes`, which passes through the first one here, agrees with this node."""
        low, high = self.start + 1, min(self.end, len(hashes))
        if self.hashes[high - 1] == hashes[high - 1]:
            return high
        while low < high:  # agrees up to `low`, and not up to `high`
            middle = (low + high) // 2
            if middle == low:
                break
            if self.hashes[middle - 1] == hashes[middle - 1]:
                low = middle
            else:
                high = middle
        return low


class _Expectation:
    __slots__ = ("bit", "hashes", "is_over", "node", "until_s")

    def __init__(self, bit: int, node: _TrieNode, hashes: tuple[BlockHash, ...], until_s: float) -> None:
        self.bit = bit
        self.node = node
        self.hashes = hashes
        self.until_s = until_s
        self.is_over = False


class ExpectedBlocks:
    """Workers are bits of a mask. One expectation a worker and chain: expecting the same again extends it.

    Bounded in blocks; beyond that those that would end first are dropped.
    """

    def __init__(self, max_blocks: int = MAX_EXPECTED_BLOCKS) -> None:
        self.num_blocks = 0
        self._max_blocks = max_blocks
        self._root = _TrieNode(None, (), 0, 0)
        self._by_last: dict[BlockHash, dict[int, _Expectation]] = {}
        self._of_worker: dict[int, int] = {}
        self._ends: list[
            tuple[float, int, _Expectation]
        ] = []  # a heap; an extended one stands at its old time until then
        self._order = count()

    def add(self, bit: int, hashes: tuple[BlockHash, ...], until_s: float) -> None:
        """The worker will hold these soon; ends at `until_s`, or with `stored`."""
        if not hashes:
            return
        of_last = self._by_last.setdefault(hashes[-1], {})
        if bit in of_last:
            of_last[bit].until_s = max(of_last[bit].until_s, until_s)
            return
        node = self._place(hashes)
        node.num_ends += 1
        expectation = of_last[bit] = _Expectation(bit, node, hashes, until_s)
        self._of_worker[bit] = self._of_worker.get(bit, 0) + 1
        self.num_blocks += len(hashes)
        passed: _TrieNode | None = node
        while passed is not None:
            passed.passing[bit] = passed.passing.get(bit, 0) + 1
            passed.mask |= bit
            passed = passed.parent
        heappush(self._ends, (until_s, next(self._order), expectation))
        while self.num_blocks > self._max_blocks:
            self._end(heappop(self._ends)[2])

    def levels(self, hashes: Sequence[BlockHash], now_s: float) -> list[tuple[int, int]]:
        """(number of leading blocks, mask of the workers that are expected to hold that many), growing; each
        mask contains the next."""
        self._expire(now_s)
        found: list[tuple[int, int]] = []
        node: _TrieNode | None = self._root
        while node is not None and node.end < len(hashes):
            node = node.children.get(hashes[node.end])
            if node is not None:
                agrees = node.common(hashes)
                found.append((agrees, node.mask))
                if agrees < node.end:
                    break
        return found

    def stored(self, bit: int, hashes: Sequence[BlockHash]) -> None:
        """What the worker was expected to hold up to one of these it holds now: a prompt's blocks are stored
        from its first on."""
        if not self._of_worker.get(bit):
            return
        for block_hash in hashes:
            of_last = self._by_last.get(block_hash)
            if of_last is not None and bit in of_last:
                self._end(of_last[bit])

    def num_of(self, bit: int) -> int:
        """Expectations of one worker that have not ended; `levels` ends those whose time is over."""
        return self._of_worker.get(bit, 0)

    def _expire(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            _, _, expectation = heappop(self._ends)
            if expectation.until_s > now_s and not expectation.is_over:
                heappush(self._ends, (expectation.until_s, next(self._order), expectation))
            else:
                self._end(expectation)

    def _place(self, hashes: tuple[BlockHash, ...]) -> _TrieNode:
        """The node at which this chain ends, made if need be."""
        node = self._root
        while node.end < len(hashes):
            child = node.children.get(hashes[node.end])
            if child is None:
                child = node.children[hashes[node.end]] = _TrieNode(node, hashes, node.end, len(hashes))
                return child
            agrees = child.common(hashes)
            node = child if agrees == child.end else self._split(child, agrees)
        return node

    def _split(self, lower: _TrieNode, at: int) -> _TrieNode:
        """A new node for the positions of `lower` before `at`."""
        assert lower.parent is not None
        upper = _TrieNode(lower.parent, lower.hashes, lower.start, at)
        upper.passing, upper.mask = lower.passing.copy(), lower.mask
        lower.parent.children[lower.key] = upper
        lower.parent, lower.start = upper, at
        upper.children[lower.key] = lower
        return upper

    def _end(self, expectation: _Expectation) -> None:
        if expectation.is_over:
            return
        expectation.is_over = True
        bit, hashes = expectation.bit, expectation.hashes
        self.num_blocks -= len(hashes)
        self._of_worker[bit] -= 1
        if not self._of_worker[bit]:
            del self._of_worker[bit]
        of_last = self._by_last[hashes[-1]]
        del of_last[bit]
        if not of_last:
            del self._by_last[hashes[-1]]
        expectation.node.num_ends -= 1
        node: _TrieNode | None = expectation.node
        kept: _TrieNode | None = None  # the lowest one on the way up that others pass through
        while node is not None:
            node.passing[bit] -= 1
            if not node.passing[bit]:
                del node.passing[bit]
                node.mask ^= bit
            if node.parent is not None and not node.passing:
                del node.parent.children[node.key]
            else:
                node.let_go(hashes)
                kept = kept or node
            node = node.parent
        if kept is not None:
            self._join_only_child(kept)

    def _join_only_child(self, node: _TrieNode) -> None:
        """Where nothing branches off or ends, two nodes are one."""
        if node.parent is None or node.num_ends or len(node.children) != 1:
            return
        (child,) = node.children.values()
        node.parent.children[node.key] = child
        child.parent, child.start = node.parent, node.start
