"""A request inside the engine (or one sample of it): tokens, blocks, state, and the rule for its end."""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from baton.core.kv.block_hash import NO_HASH, BlockHash, TokenIds, chain, num_blocks_for
from baton.core.kv.kv_tables import NO_BLOCK
from baton.core.request import FinishReason, PromptLogprobs, Sampling
from baton.core.state_machines import SEQUENCE_TRANSITIONS, Lifecycle, SequenceState
from baton.core.step_targets import LatencyTargets
from baton.engine.retention.content_owner import ContentOwner
from baton.engine.state.block_grant import BlockGrant


def max_cached_blocks(num_tokens: int, block_size_tokens: int) -> int:
    """Return how many leading blocks of a prompt may come from the cache.

    At least one token is always computed, because its logits are needed.
    """
    return (num_tokens - 1) // block_size_tokens


class ReloadWait(Enum):
    """The wait of a preempted sequence for blocks that are reloaded from a slower tier."""

    NOT_BEGUN = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """A request as a worker gives it to its engine.

    seq_id: chosen by the caller; unique among the sequences in the engine.
    token_ids: the prompt, followed by the output tokens that an earlier attempt has delivered.
    num_prompt_tokens: how many of `token_ids` are the prompt.
    root_hash: parent of the first block's hash.
    tenant_root: hash of the tenant, see `core.kv.block_hash.tenant_root`.
    block_hashes: hash of every full block of `token_ids`, in order. The engine extends the chain over new
        tokens.
    sample_indices: which samples of the request to generate.
    priority: lower values are scheduled first.
    prefill_only: ends after the first token of each sample, whatever `max_tokens` says. Never preempted.
    for_reader: another worker reads its KV. Not admitted while more than half of the pool is held for
        readers.
    pulled: its KV is read from another worker instead of computed. Admission reserves all missing blocks, and
        `Engine.received` starts the sequence.
    ttft_slo_s: SLO for the time to the first token, from the arrival at the gateway, in seconds; 0 for none.
    tpot_slo_s: SLO for the mean time per output token, in seconds; 0 for none.
    waited_s: time since the arrival at the gateway, in seconds.
    owner: of the content that it leaves; None if it is unknown.
    """

    seq_id: int
    token_ids: TokenIds
    num_prompt_tokens: int
    sampling: Sampling
    root_hash: BlockHash
    block_hashes: tuple[BlockHash, ...] = ()
    tenant_root: BlockHash = NO_HASH
    sample_indices: tuple[int, ...] = (0,)
    priority: int = 0
    prefill_only: bool = False
    for_reader: bool = False
    pulled: bool = False
    ttft_slo_s: float = 0.0
    tpot_slo_s: float = 0.0
    waited_s: float = 0.0
    owner: ContentOwner | None = None

    @property
    def num_slots(self) -> int:
        """Number of sequences after its samples have forked. `max_num_seqs` limits their sum."""
        return 1 if self.prefill_only else len(self.sample_indices)

    def max_kv_tokens(self, max_model_len: int) -> int:
        """Return the most KV entries that one sample can need. The last sampled token is never computed."""
        if self.prefill_only:
            return len(self.token_ids)
        return max(len(self.token_ids), min(self.num_prompt_tokens + self.sampling.max_tokens, max_model_len) - 1)


class EngineSequence:
    """The state of one sequence. Until the first token it stands for all samples; then each sample forks off.

    key: number given by the engine, used as `StepSequence.seq_id`. Samples of a request share `seq_id` and
        differ in `key`.
    arrival: order of arrival.
    sample_indices: the samples that it stands for.
    num_computed_tokens: leading tokens whose KV is in its blocks.
    block_table: flat, see `core.kv.kv_tables`; NO_BLOCK where it has no block.
    first_blocks: for each table, the blocks before it were freed, because no layer of the table sees them.
    num_covered_blocks: tables with a window have blocks up to this one only, because the tokens after it are
        not scheduled yet. Other tables have blocks for all tokens.
    num_cached_blocks: leading blocks of each table that its last admission found in the cache or did not
        need.
    num_cached_tokens: tokens that its first admission found in the cache; None before. Reported as usage.
    num_hashed_blocks: leading blocks of each table whose hash is published.
    prompt_logprobs: of the prompt tokens computed so far but the first, by step, if the request asks for
        them.
    has_sent_prompt: they were sent, so they are not computed again after a preemption.
    arrived_s: when the request arrived at the gateway, by the engine's clock.
    targets: its latency targets; None if the worker's step costs were unknown when it arrived.
    first_token_s: when its first token here was made, or its pulled KV had arrived; None before.
    num_earlier_tokens: output tokens before that one.
    num_lost_tokens: `num_computed_tokens` before its last preemption; 0 once it was admitted again.
    num_preemptions, num_recomputed_tokens: see `SequenceOutput`.
    reload: whether its return after a preemption has waited for a reload.
    """

    __slots__ = (
        "_table",
        "arrival",
        "arrived_s",
        "block_table",
        "first_blocks",
        "first_token_s",
        "has_sent_prompt",
        "hashes",
        "key",
        "lifecycle",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_covered_blocks",
        "num_earlier_tokens",
        "num_hashed_blocks",
        "num_lost_tokens",
        "num_preemptions",
        "num_recomputed_tokens",
        "prompt_logprobs",
        "reload",
        "request",
        "sample_indices",
        "targets",
        "token_ids",
    )

    def __init__(
        self,
        request: SequenceRequest,
        *,
        key: int,
        arrival: int,
        arrived_s: float = 0.0,
        targets: LatencyTargets | None = None,
    ) -> None:
        self.request = request
        self.key = key
        self.arrival = arrival
        self.arrived_s = arrived_s
        self.targets = targets
        self.first_token_s: float | None = None
        self.num_earlier_tokens = 0
        self.sample_indices = request.sample_indices
        self.token_ids: TokenIds = request.token_ids[:]
        self.num_computed_tokens = 0
        self.num_cached_blocks = 0
        self.num_cached_tokens: int | None = None
        self.block_table: list[int] = []
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.has_sent_prompt = False
        self.hashes: list[BlockHash] = list(request.block_hashes)
        self.num_hashed_blocks = 0
        self.first_blocks: tuple[int, ...] = (0,)
        self.num_covered_blocks = 0
        self.num_lost_tokens = self.num_preemptions = self.num_recomputed_tokens = 0
        self.reload = ReloadWait.NOT_BEGUN
        self.lifecycle = Lifecycle(SEQUENCE_TRANSITIONS, SequenceState.WAITING)
        self._table: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return (
            f"EngineSequence(seq_id={self.seq_id}, key={self.key}, samples={self.sample_indices}, {self.state.name}, "
            f"{self.num_computed_tokens}/{len(self.token_ids)} tokens, blocks={self.block_table})"
        )

    @property
    def seq_id(self) -> int:
        return self.request.seq_id

    @property
    def state(self) -> SequenceState:
        return self.lifecycle.state

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """Scheduling order, smallest first: priority, then arrival, then sample."""
        return self.request.priority, self.arrival, self.sample_indices[0]

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, including those of earlier attempts."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_timed_tokens(self) -> int:
        """Output tokens since `first_token_s`, that one included; 0 before."""
        return 0 if self.first_token_s is None else self.num_output_tokens - self.num_earlier_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is not computed yet: 1 for a decoding sequence, more for a prompt."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_slots(self) -> int:
        """`SequenceRequest.num_slots` of the samples that it still stands for."""
        return 1 if self.request.prefill_only else len(self.sample_indices)

    @property
    def waits_for_pull(self) -> bool:
        """True if its KV is to be pulled. A pulled sequence that was preempted is computed here instead."""
        return self.request.pulled and self.state is SequenceState.WAITING

    @property
    def reports_prompt(self) -> bool:
        """True if the logprobs of its prompt are still to be computed here. Every position is then
        computed."""
        is_asked = self.request.sampling.num_prompt_logprobs is not None
        return is_asked and not (self.has_sent_prompt or self.request.pulled)

    @property
    def can_be_preempted(self) -> bool:
        """True if it runs and may lose its blocks. `prefill_only` sequences may not."""
        return self.state is SequenceState.RUNNING and not self.request.prefill_only

    @property
    def block_ids(self) -> tuple[int, ...]:
        """`block_table` as a tuple, cached until the table changes."""
        if len(self._table) != len(self.block_table):
            self._table = tuple(self.block_table)
        return self._table

    @property
    def num_tables(self) -> int:
        """Number of its block tables."""
        return len(self.first_blocks)

    @property
    def num_blocks(self) -> int:
        """Length of each block table."""
        return len(self.block_table) // len(self.first_blocks)

    @property
    def held_blocks(self) -> list[int]:
        """The blocks to which it has a reference, in order."""
        return self.held_blocks_from(0)

    def held_blocks_from(self, index: int) -> list[int]:
        """Return the blocks to which it has a reference, without those before `index` in each table."""
        if self.num_tables == 1:
            return self.block_table[max(index, self.first_blocks[0]) : self.num_covered_blocks]
        return [block_id for block_id in self.block_table[index * self.num_tables :] if block_id != NO_BLOCK]

    def held_positions(self) -> list[int]:
        """Return the position of each of `held_blocks` in its table."""
        if self.num_tables == 1:
            first = self.first_blocks[0]
            return list(range(first, first + len(self.held_blocks)))
        return [entry // self.num_tables for entry, block_id in enumerate(self.block_table) if block_id != NO_BLOCK]

    def replace_block(self, entry: int, block_id: int) -> None:
        """Set an entry of the block table."""
        self.block_table[entry] = block_id
        self._table = ()

    def take_blocks(self, grant: BlockGrant, block_ids: Sequence[int], block_size_tokens: int) -> None:
        """Set the block table on admission. `block_ids`: of the grant's entries."""
        self.first_blocks, self.num_covered_blocks = grant.first_blocks, grant.num_covered_blocks
        num_entries = grant.num_blocks * self.num_tables
        if len(block_ids) == num_entries:
            self.block_table, self._table = list(block_ids), ()
        else:
            self.block_table = [NO_BLOCK] * num_entries
            self.fill_blocks(grant.entries, block_ids)
        self.num_cached_blocks = self.num_hashed_blocks = grant.num_cached_blocks
        self.num_computed_tokens = self.num_cached_blocks * block_size_tokens
        if self.num_cached_tokens is None:
            self.num_cached_tokens = self.num_computed_tokens

    def fill_blocks(self, entries: Sequence[int], block_ids: Sequence[int]) -> None:
        """Set entries of the block table that were empty."""
        for entry, block_id in zip(entries, block_ids, strict=True):
            self.block_table[entry] = block_id
        self._table = ()

    def append_blocks(self, block_ids: Sequence[int]) -> None:
        """Extend all block tables. `block_ids`: of the new entries of the flat table."""
        self.block_table += block_ids
        self.num_covered_blocks = self.num_blocks

    def drop_blocks(self) -> list[int]:
        """Drop all KV but keep the tokens. Returns the blocks; the caller must release their references."""
        blocks, self.block_table, self._table = self.held_blocks, [], ()
        self.prompt_logprobs = []
        self.first_blocks = (0,)
        self.num_cached_blocks = self.num_hashed_blocks = self.num_covered_blocks = self.num_computed_tokens = 0
        return blocks

    def drop_blocks_before(self, first_blocks: tuple[int, ...]) -> list[int]:
        """Drop the blocks before these, by table, which no layer sees any more, as `drop_blocks` does."""
        if first_blocks == self.first_blocks:
            return []
        step, blocks = self.num_tables, list[int]()
        for table, (begin, end) in enumerate(zip(self.first_blocks, first_blocks, strict=True)):
            for entry in range(begin * step + table, end * step + table, step):
                blocks.append(self.block_table[entry])
                self.block_table[entry] = NO_BLOCK
        self._table = ()
        self.first_blocks = first_blocks
        return blocks

    def drop_last_blocks(self, num_kept: int) -> list[int]:
        """Drop all but the first `num_kept` blocks of each table.

        Returns them; the caller must release them.
        """
        dropped = self.block_table[num_kept * self.num_tables :]
        if dropped:
            del self.block_table[num_kept * self.num_tables :]
            self.num_covered_blocks = num_kept
            self._table = ()  # it may grow again to the same length
        return dropped

    def hash_of_block(self, index: int, block_size_tokens: int) -> BlockHash:
        """Return the chained hash of full block `index`.

        Its tokens are final. Call it for blocks in order.
        """
        while len(self.hashes) <= index:
            begin = len(self.hashes) * block_size_tokens
            parent = self.hashes[-1] if self.hashes else self.request.root_hash
            self.hashes.extend(chain(parent, self.token_ids[begin : begin + block_size_tokens], block_size_tokens))
        return self.hashes[index]

    def append(self, token_id: int) -> None:
        """Add one output token."""
        try:
            self.token_ids.append(token_id)
        except BufferError:  # an array cannot grow while its buffer is exported, for example to numpy
            self.token_ids = self.token_ids + array("I", (token_id,))

    def fork(self, *, key: int, sample_index: int) -> "EngineSequence":
        """Return a new sequence for `sample_index` with the same tokens and blocks.

        The caller must add a reference to each block.
        """
        child = EngineSequence(
            self.request, key=key, arrival=self.arrival, arrived_s=self.arrived_s, targets=self.targets
        )
        child.sample_indices = (sample_index,)
        child.token_ids = self.token_ids[:]
        child.num_computed_tokens = self.num_computed_tokens
        child.num_cached_blocks = self.num_cached_blocks
        child.num_cached_tokens = self.num_cached_tokens
        child.block_table = self.block_table[:]
        child.first_token_s = self.first_token_s
        child.num_earlier_tokens = self.num_earlier_tokens
        child.has_sent_prompt = self.has_sent_prompt
        child.hashes = self.hashes[:]
        child.num_hashed_blocks = self.num_hashed_blocks
        child.first_blocks = self.first_blocks
        child.num_covered_blocks = self.num_covered_blocks
        child.lifecycle = Lifecycle(SEQUENCE_TRANSITIONS, self.state)
        return child


def end_token_ids(sampling: Sampling, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    """Return the token ids that end a response, without duplicates."""
    eos = () if sampling.ignore_eos else tuple(eos_token_ids)
    return (*eos, *(t for t in sampling.stop_token_ids if t not in eos))


def is_end_token(token_id: int, sampling: Sampling, eos_token_ids: Collection[int]) -> bool:
    """Return True if a token ends a response. Asked for each token, so it does not build `end_token_ids`."""
    return token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos)


def finish_reason(
    token_id: int, request: SequenceRequest, *, num_tokens: int, eos_token_ids: Collection[int], max_model_len: int
) -> FinishReason | None:
    """Return why `token_id` ends its sample, or None if the sample continues.

    num_tokens: prompt and output tokens before this one. Output is counted from `request.num_prompt_tokens`,
        so a replayed attempt ends at the same token as the first one.
    """
    sampling, num_output_tokens = request.sampling, num_tokens - request.num_prompt_tokens
    if num_output_tokens >= sampling.min_tokens and is_end_token(token_id, sampling, eos_token_ids):
        return FinishReason.STOP
    return FinishReason.LENGTH if reaches_max_length(request, num_tokens + 1, max_model_len) else None


def reaches_max_length(request: SequenceRequest, num_tokens: int, max_model_len: int) -> bool:
    """Return True if a sample with `num_tokens` prompt and output tokens ends, whatever its last token is."""
    return num_tokens - request.num_prompt_tokens >= request.sampling.max_tokens or num_tokens >= max_model_len


def max_new_tokens(seq: EngineSequence, max_model_len: int) -> int:
    """Return how many more tokens a sequence can get before it `reaches_max_length`, at least one."""
    return min(seq.request.sampling.max_tokens - seq.num_output_tokens, max_model_len - len(seq.token_ids))


def num_blocks_needed(seq: EngineSequence, block_size_tokens: int) -> int:
    """Return the number of blocks that admission gives: enough for all present tokens."""
    return num_blocks_for(len(seq.token_ids), block_size_tokens)
