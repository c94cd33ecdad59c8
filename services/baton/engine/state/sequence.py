"""One request (or one sample of it) inside the engine: its tokens, its blocks, where it stands and when it
ends."""

from array import array
from collections.abc import Collection
from dataclasses import dataclass

from baton.core.kv.block_hash import BlockHash, TokenIds, chain, num_blocks_for
from baton.core.request import FinishReason, Sampling
from baton.core.state_machines import SEQUENCE_TRANSITIONS, Lifecycle, SequenceState


def max_cached_blocks(num_tokens: int, block_size_tokens: int) -> int:
    """How many leading blocks may come from cache: at least one token is left to compute, whose logits are
    needed."""
    return (num_tokens - 1) // block_size_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """What a worker asks of its engine. `seq_id` is the caller's, unique among those that live here.

    `token_ids`: prompt, then outputs that an earlier attempt has delivered. `root_hash`: parent of the first
    block's hash; `block_hashes`: of every full block of `token_ids`, in order. The engine goes on with that
    chain over the outputs. `prefill_only`: ends after its first token(s), whatever `max_tokens`; never
    preempted. `for_reader`: its KV is for another worker, so it is not started while more than half of the
    pool is held only for others. `pulled`: its KV is not computed here but lands: admission gives all missing
    blocks at once, and `Engine.landed` starts it. `tpot_slo_s`: promised between two tokens in the mean, 0
    for nothing.
    """

    seq_id: int
    token_ids: TokenIds
    num_prompt_tokens: int
    sampling: Sampling
    root_hash: BlockHash
    block_hashes: tuple[BlockHash, ...] = ()
    sample_indices: tuple[int, ...] = (0,)
    priority: int = 0
    prefill_only: bool = False
    for_reader: bool = False
    pulled: bool = False
    tpot_slo_s: float = 0.0

    @property
    def num_slots(self) -> int:
        """Sequences that it will be once its samples have parted (`max_num_seqs` counts them)."""
        return 1 if self.prefill_only else len(self.sample_indices)

    def max_kv_tokens(self, max_model_len: int) -> int:
        """Tokens of KV that one sample may come to hold. The last token sampled is never computed."""
        if self.prefill_only:
            return len(self.token_ids)
        return max(len(self.token_ids), min(self.num_prompt_tokens + self.sampling.max_tokens, max_model_len) - 1)


class EngineSequence:
    """A sequence that lives in one engine. Until its first token it stands for all `sample_indices`; then
    each has a sequence of its own.

    `key` is the engine's own number (`StepSequence.seq_id`): samples of one request share `request.seq_id`
    and differ in `key`. `num_cached_blocks` counts the leading blocks that this life of the sequence took
    from cache; `num_cached_tokens` is that of its first admission (None before), as usage reports it.
    `due_s`: by when its next token is to come, 0 where none is promised (`engine.scheduling.slo_slack`).
    """

    __slots__ = (
        "_table",
        "arrival",
        "block_table",
        "due_s",
        "hashes",
        "key",
        "lifecycle",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_hashed_blocks",
        "request",
        "sample_indices",
        "token_ids",
    )

    def __init__(self, request: SequenceRequest, *, key: int, arrival: int) -> None:
        self.request = request
        self.key = key
        self.arrival = arrival
        self.sample_indices = request.sample_indices
        self.token_ids: TokenIds = request.token_ids[:]
        self.num_computed_tokens = 0
        self.num_cached_blocks = 0
        self.num_cached_tokens: int | None = None
        self.block_table: list[int] = []
        self.due_s = 0.0
        self.hashes: list[BlockHash] = list(request.block_hashes)
        self.num_hashed_blocks = 0
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
        """Smaller goes first: priority, then arrival, then sample."""
        return self.request.priority, self.arrival, self.sample_indices[0]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_slots(self) -> int:
        """As `SequenceRequest.num_slots`, of the samples that it still stands for."""
        return 1 if self.request.prefill_only else len(self.sample_indices)

    @property
    def waits_for_pull(self) -> bool:
        """Whether its admission is one to land in. A pulled sequence that was preempted is computed here."""
        return self.request.pulled and self.state is SequenceState.WAITING

    @property
    def can_be_preempted(self) -> bool:
        return self.state is SequenceState.RUNNING and not self.request.prefill_only

    @property
    def block_ids(self) -> tuple[int, ...]:
        """`block_table` as a tuple, made anew only when it has changed."""
        if len(self._table) != len(self.block_table):
            self._table = tuple(self.block_table)
        return self._table

    def replace_block(self, index: int, block_id: int) -> None:
        self.block_table[index] = block_id
        self._table = ()

    def take_blocks(self, cached: list[int], new: list[int], block_size_tokens: int) -> None:
        """Start (again) from these blocks, the leading ones computed before."""
        self.block_table = [*cached, *new]
        self._table = ()
        self.num_cached_blocks = self.num_hashed_blocks = len(cached)
        self.num_computed_tokens = len(cached) * block_size_tokens
        if self.num_cached_tokens is None:
            self.num_cached_tokens = self.num_computed_tokens

    def drop_blocks(self) -> list[int]:
        """Forget all KV; the tokens stay. Returns the blocks, whose references are now the caller's."""
        blocks, self.block_table, self._table = self.block_table, [], ()
        self.num_cached_blocks = self.num_hashed_blocks = self.num_computed_tokens = 0
        return blocks

    def hash_of_block(self, index: int, block_size_tokens: int) -> BlockHash:
        """The chained hash of full block `index`, whose tokens are final. Blocks are asked for in order."""
        while len(self.hashes) <= index:
            begin = len(self.hashes) * block_size_tokens
            parent = self.hashes[-1] if self.hashes else self.request.root_hash
            self.hashes.extend(chain(parent, self.token_ids[begin : begin + block_size_tokens], block_size_tokens))
        return self.hashes[index]

    def append(self, token_id: int) -> None:
        try:
            self.token_ids.append(token_id)
        except BufferError:  # somebody still looks into the array through its buffer, which then cannot grow
            self.token_ids = self.token_ids + array("I", (token_id,))

    def fork(self, *, key: int, sample_index: int) -> "EngineSequence":
        """Another sequence over the same tokens and blocks. The caller takes a reference on each block for
        it."""
        child = EngineSequence(self.request, key=key, arrival=self.arrival)
        child.sample_indices = (sample_index,)
        child.token_ids = self.token_ids[:]
        child.num_computed_tokens = self.num_computed_tokens
        child.num_cached_blocks = self.num_cached_blocks
        child.num_cached_tokens = self.num_cached_tokens
        child.block_table = self.block_table[:]
        child.due_s = self.due_s
        child.hashes = self.hashes[:]
        child.num_hashed_blocks = self.num_hashed_blocks
        child.lifecycle = Lifecycle(SEQUENCE_TRANSITIONS, self.state)
        return child


def end_token_ids(sampling: Sampling, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    """Token ids that end this request."""
    eos = () if sampling.ignore_eos else tuple(eos_token_ids)
    return (*eos, *(t for t in sampling.stop_token_ids if t not in eos))


def finish_reason(
    token_id: int, request: SequenceRequest, *, num_tokens: int, eos_token_ids: Collection[int], max_model_len: int
) -> FinishReason | None:
    """Does this token, sampled after `num_tokens` of prompt and outputs, end its sample? Counts from the
    request's own `num_prompt_tokens`, so a replayed attempt ends where the first would have."""
    sampling, num_output_tokens = request.sampling, num_tokens - request.num_prompt_tokens
    if num_output_tokens >= sampling.min_tokens and token_id in end_token_ids(sampling, eos_token_ids):
        return FinishReason.STOP
    return FinishReason.LENGTH if reaches_max_length(request, num_tokens + 1, max_model_len) else None


def reaches_max_length(request: SequenceRequest, num_tokens: int, max_model_len: int) -> bool:
    """Whether a sample of so many tokens, prompt and outputs, ends whatever its last token is."""
    return num_tokens - request.num_prompt_tokens >= request.sampling.max_tokens or num_tokens >= max_model_len


def num_blocks_needed(seq: EngineSequence, block_size_tokens: int) -> int:
    """Blocks for all tokens that it has now: what admission gives."""
    return num_blocks_for(len(seq.token_ids), block_size_tokens)
