"""Estimates how much of each queued prompt will already be cached when it runs.

Queued prompts often share prefixes, so the work in the queue is less than the sum of its prompts.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from baton.core.kv.block_hash import BlockHash
from baton.core.state_machines import SequenceState
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.scheduling.step_budget import PrefillPart
from baton.engine.state.sequence import EngineSequence, SequenceRequest, max_cached_blocks


class QueuedPrefixEstimate:
    """Tracks prompts from `add` until their request has ended.

    This is an estimate: a shared prefix may be evicted, or the request that would compute it may be
    cancelled.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._num_of: Counter[BlockHash] = Counter()
        self._shared_tokens: dict[int, int] = {}
        self._hashes: dict[int, tuple[BlockHash, ...]] = {}

    def add(self, request: SequenceRequest) -> None:
        """Register a prompt. Does nothing if the request is registered already."""
        if request.seq_id in self._hashes:
            return
        num_shared = 0
        for block_hash in request.block_hashes[
            : max_cached_blocks(len(request.token_ids), self._pool.block_size_tokens)
        ]:
            if block_hash not in self._num_of and not self._pool.lookup((block_hash,)):
                break
            num_shared += 1
        self._shared_tokens[request.seq_id] = num_shared * self._pool.block_size_tokens
        self._hashes[request.seq_id] = request.block_hashes
        self._num_of.update(request.block_hashes)

    def remove(self, seq_id: int) -> None:
        """Forget a request that has ended. Unknown ids are ignored."""
        self._shared_tokens.pop(seq_id, None)
        for block_hash in self._hashes.pop(seq_id, ()):
            self._num_of[block_hash] -= 1
            if not self._num_of[block_hash]:
                del self._num_of[block_hash]

    def shared_tokens(self, seq_id: int) -> int:
        """Return how many leading tokens were cached at `add` or will be computed by an earlier prompt."""
        return self._shared_tokens.get(seq_id, 0)

    def remaining(self, prompts: Iterable[EngineSequence]) -> Iterator[PrefillPart]:
        """Yield (tokens to compute, tokens before them) of each of these prompts, which are not complete."""
        for seq in prompts:
            before = seq.num_computed_tokens
            if seq.state is SequenceState.WAITING:
                before = self.shared_tokens(seq.seq_id)
            yield len(seq.token_ids) - before, before

    def __len__(self) -> int:
        return len(self._hashes)
