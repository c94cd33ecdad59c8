"""Blocks that a worker is expected to hold soon, because a prompt with these blocks was placed there.

The data structure is a radix tree over chains of block hashes. The hash of a block covers everything before
it, so two chains that are equal at one position are equal before it. The position where they diverge is found
by bisection. The cost of an operation therefore depends on the number of branches, not on the length of the
chain.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from baton.core.kv.block_hash import BlockHash

MAX_EXPECTED_BLOCKS = 1_048_576
"""Upper bound for the blocks of all expectations together, shared blocks counted repeatedly. About 75 MB of
memory if no blocks are shared."""


class _TrieNode:
    """Positions [start, end) of all chains that pass through this node.

    hashes: one of these chains, complete.
    passing: worker bit -> number of its expectations that pass through or end here.
    mask: bits of the workers in `passing`.
    num_ends: expectations that end here.
    """

    __slots__ = ("children", "end", "hashes", "mask", "num_ends", "parent", "passing", "start")

    def __init__(self, parent: "_TrieNode | None", hashes: tuple[BlockHash, ...], start: int, end: int) -> None:
        self.parent = parent
        self.hashes = hashes
        self.start = start
        self.end = end
        self.children: dict[BlockHash, _TrieNode] = {}
        self.passing: dict[int, int] = {}
        self.mask = 0
        self.num_ends = 0

    def replace_chain(self, hashes: tuple[BlockHash, ...]) -> None:
        """Drop the reference to the ended chain `hashes`, if it is the one that represents this node."""
        if self.hashes[-1:] == hashes[-1:]:
            below = next(iter(self.children.values()), None)
            self.hashes = hashes[: self.end] if below is None else below.hashes

    @property
    def key(self) -> BlockHash:
        """First hash of the node: its key in `parent.children`."""
        return self.hashes[self.start]

    def common(self, hashes: Sequence[BlockHash]) -> int:
        """Return the position up to which `hashes` is equal to this node.

        The first block of the node must be equal.
        """
        low, high = self.start + 1, min(self.end, len(hashes))
        if self.hashes[high - 1] == hashes[high - 1]:
            return high
        while low < high:  # equal up to `low`, different at `high` - 1
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
    """The expected chains of all workers. Workers are bits of a mask.

    A worker has one expectation per chain; adding it again extends its time. The number of blocks is bounded:
    the expectations that would expire first are dropped.
    """

    def __init__(self, max_blocks: int = MAX_EXPECTED_BLOCKS) -> None:
        self.num_blocks = 0
        self._max_blocks = max_blocks
        self._root = _TrieNode(None, (), 0, 0)
        self._by_last: dict[BlockHash, dict[int, _Expectation]] = {}
        self._of_worker: dict[int, int] = {}
        self._ends: list[tuple[float, int, _Expectation]] = []  # heap by time; extended ones are moved when popped
        self._order = count()

    def add(self, bit: int, hashes: tuple[BlockHash, ...], until_s: float) -> None:
        """Expect a worker to hold this chain soon. The expectation ends at `until_s`, or with `stored`."""
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
        """Return (number of leading blocks, mask of the workers that are expected to hold them), in ascending
        order.

        Each mask contains the next one.
        """
        self._expire(now_s)
        found: list[tuple[int, int]] = []
        node: _TrieNode | None = self._root
        while node is not None and node.end < len(hashes):
            node = node.children.get(hashes[node.end])
            if node is not None:
                common_end = node.common(hashes)
                found.append((common_end, node.mask))
                if common_end < node.end:
                    break
        return found

    def stored(self, bit: int, hashes: Sequence[BlockHash]) -> None:
        """End the worker's expectations whose last block is in `hashes`.

        Chains are stored from their front.
        """
        if not self._of_worker.get(bit):
            return
        for block_hash in hashes:
            of_last = self._by_last.get(block_hash)
            if of_last is not None and bit in of_last:
                self._end(of_last[bit])

    def num_of(self, bit: int) -> int:
        """Return the number of a worker's expectations.

        Expired ones count until the next call of `levels`.
        """
        return self._of_worker.get(bit, 0)

    def _expire(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            _, _, expectation = heappop(self._ends)
            if expectation.until_s > now_s and not expectation.is_over:
                heappush(self._ends, (expectation.until_s, next(self._order), expectation))
            else:
                self._end(expectation)

    def _place(self, hashes: tuple[BlockHash, ...]) -> _TrieNode:
        """Return the node at which this chain ends. Creates it if necessary."""
        node = self._root
        while node.end < len(hashes):
            child = node.children.get(hashes[node.end])
            if child is None:
                child = node.children[hashes[node.end]] = _TrieNode(node, hashes, node.end, len(hashes))
                return child
            common_end = child.common(hashes)
            node = child if common_end == child.end else self._split(child, common_end)
        return node

    def _split(self, lower: _TrieNode, at: int) -> _TrieNode:
        """Split `lower` at position `at`. Returns the new upper node."""
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
        lowest: _TrieNode | None = None  # lowest remaining node on the path
        while node is not None:
            node.passing[bit] -= 1
            if not node.passing[bit]:
                del node.passing[bit]
                node.mask ^= bit
            if node.parent is not None and not node.passing:
                del node.parent.children[node.key]
            else:
                node.replace_chain(hashes)
                lowest = lowest or node
            node = node.parent
        if lowest is not None:
            self._join_only_child(lowest)

    def _join_only_child(self, node: _TrieNode) -> None:
        """Merge a node with its only child if no chain ends at the node."""
        if node.parent is None or node.num_ends or len(node.children) != 1:
            return
        (child,) = node.children.values()
        node.parent.children[node.key] = child
        child.parent, child.start = node.parent, node.start
