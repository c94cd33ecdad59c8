"""The engine compared with the definition of responses: random requests, pulls, cancels and failures in small
pools."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.kv.block_hash import NO_HASH, table_hash
from baton.core.kv.kv_events import KvEventKind
from baton.core.kv.kv_tables import NO_BLOCK, entries_from, hashes_of_prefix
from baton.core.step_cost import StepCostModel
from baton.engine.state.sequence import SequenceRequest
from baton.engine.state.step import StepPlan, StepSequence
from tests.builders import hashes_of, sequence_request
from tests.engine_rig import EngineRig
from tests.fake_executor import contents, in_table
from tests.scale import sized

INJECTED = Failure(code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message="injected")
PULL_FAILED = Failure(code=Code.UNAVAILABLE, reason=Reason.TRANSFER_FAILED, message="injected", retriable=True)
EOS = (3, 4)
WINDOWS = ((0,), (0, 5), (9,), (0,), (2,), (0, 5, 5), (0, 9), (0,), (0, 0, 2), (5,), (0,), (0, 17), (9, 2), (17,))
"""Windows of the block tables, by seed."""
NUM_WORLDS = sized(1, 25) * len(WINDOWS)


class World:
    """One engine with random requests, and workers that read its KV, send KV to it, and fail."""

    def __init__(self, seed: int, **rig: Any) -> None:
        """rig: arguments of `EngineRig` that replace random ones, and further ones."""
        self.rng = rng = random.Random(seed)
        max_num_seqs = rng.randint(1, 6)
        kv_windows = WINDOWS[seed % len(WINDOWS)]
        sizes = {
            "num_blocks": rng.randint(6, 30) + 4 * (len(kv_windows) - 1),
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": rng.randint(max_num_seqs, 24),
            "max_model_len": rng.randint(30, 60),
        }
        self.rig = EngineRig(
            **(sizes | rig),
            eos_token_ids=EOS,
            max_waiting_seqs=16,
            kv_windows=kv_windows,
            step_costs=lambda: self.costs,
            clock=lambda: self.now_s,
        )
        self.requests: dict[int, SequenceRequest] = {}
        self.cancelled: set[tuple[int, int]] = set()  # samples
        self.pulls: dict[int, list[int]] = {}  # seq_id -> entries of the block table that are still receiving
        self.read_blocks: dict[int, set[int]] = {}  # seq_id -> blocks that were pinned for a reader
        self.received: set[int] = set()
        self.pins: list[list[int]] = []
        self.quarantined: list[int] = []
        self.published: set[bytes] = set()
        self.contents_of_hash: dict[bytes, list[int]] = {}
        self.happened: Counter[str] = Counter()
        self.prefixes = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]
        self.rig.executor.failing = self.maybe_fail
        self.fail_rate = rng.choice([0.0, 0.0, 0.01])
        self.now_s = 0.0
        token_s = rng.choice([1e-5, 1e-3, 1e-2])
        costs = StepCostModel(
            step_s=4e-3, prefill_token_s=token_s, prefill_attended_s=1e-8, decode_seq_s=2e-4, decode_context_s=1e-7
        )
        self.costs = costs if rng.random() < 0.7 else None

    def maybe_fail(self, _: StepSequence) -> Failure | None:
        return INJECTED if self.rng.random() < self.fail_rate else None

    def new_request(self) -> SequenceRequest:
        rng = self.rng
        tokens = rng.choice(self.prefixes)[: rng.randint(0, 30)] + [rng.randrange(50) for _ in range(rng.randint(1, 8))]
        n = rng.choice([1, 1, 1, 2, 3])
        sampling = {
            "min_tokens": rng.choice([0, 0, 3]),
            "ignore_eos": rng.random() < 0.3,
            "stop_token_ids": rng.choice([(), (7,), (3, 9)]),
            "seed": rng.randrange(3),
        }
        kind = rng.choice(["local", "local", "prefill", "pull"])
        request = sequence_request(
            len(self.requests) + 1,
            tokens,
            max_tokens=rng.randint(1, 25),
            sampling=sampling,
            sample_indices=tuple(range(n)),
            priority=rng.choice([0, 0, 0, 1, -1]),
            prefill_only=kind == "prefill",
            for_reader=kind == "prefill" and rng.random() < 0.7,
            pulled=kind == "pull",
            tpot_slo_s=rng.choice([0.0, 0.005, 0.05]),
        )
        if (
            rng.random() < 0.2 and len(tokens) < self.rig.config.max_model_len
        ):  # a sample that is replayed after a lost attempt
            sample = rng.randrange(3)
            answer, _ = self.rig.expected(request, sample)
            replayed = tokens + answer[: rng.randrange(len(answer))]
            request = sequence_request(
                request.seq_id,
                replayed,
                max_tokens=request.sampling.max_tokens,
                sampling=sampling,
                num_prompt_tokens=len(tokens),
                sample_indices=(sample,),
                priority=request.priority,
                prefill_only=request.prefill_only,
                pulled=request.pulled,
                tpot_slo_s=request.tpot_slo_s,
            )
            self.happened["replays"] += 1
        return request

    def learn_contents(self, request: SequenceRequest) -> None:
        """Record what each block that this request can produce must hold."""
        for i in request.sample_indices:
            tokens = [*request.token_ids, *self.rig.expected(request, i)[0]]
            held = contents(tokens)
            self.learn_blocks(hashes_of(tokens), held)

    def learn_blocks(self, hashes: Sequence[bytes], held: list[int]) -> None:
        for index, block_hash in enumerate(hashes):
            for table in range(self.rig.pool.windows.num_tables):
                self.contents_of_hash[table_hash(block_hash, table)] = [
                    in_table(content, table) for content in held[index * 4 : index * 4 + 4]
                ]

    def add(self) -> None:
        request = self.new_request()
        try:
            self.rig.add(request)
        except Refused as refused:
            self.happened[refused.failure.reason.value] += 1
            return
        self.requests[request.seq_id] = request
        self.learn_contents(request)

    def live(self, seq_id: int) -> bool:
        return bool(self.rig.engine._sequences.of_request(seq_id))

    def cancel(self) -> None:
        if not self.requests:
            return
        seq_id = self.rng.choice(list(self.requests))
        samples = self.requests[seq_id].sample_indices
        chosen = () if self.rng.random() < 0.5 else tuple(self.rng.sample(samples, self.rng.randint(1, len(samples))))
        was = {i for seq in self.rig.engine._sequences.of_request(seq_id) for i in seq.sample_indices}
        states = {seq.state.name for seq in self.rig.engine._sequences.of_request(seq_id)}
        self.rig.engine.cancel(seq_id, chosen)
        self.cancelled |= {(seq_id, i) for i in was & set(chosen or samples)}
        self.happened.update(f"cancel {state}" for state in states)

    def after_admissions(self) -> None:
        """React to admissions as a worker does: pin blocks for a reader, start a pull."""
        for seq_id, admission in self.rig.admissions.items():
            request = self.requests[seq_id]
            if request.pulled and seq_id not in self.pulls and seq_id not in self.received:
                self.pulls[seq_id] = self.rig.receiving_entries(request)
                assert self.pulls[seq_id] == sorted(self.pulls[seq_id])
                self.happened["pulls"] += 1
            elif request.for_reader and not request.pulled and seq_id not in self.received and self.live(seq_id):
                self.received.add(seq_id)
                self.pin_for_reader(request, admission.block_table)
        for growth in self.rig.growths:
            if growth.seq_id in self.read_blocks and self.live(growth.seq_id):
                self.pin_for_reader(self.requests[growth.seq_id], growth.block_table)
                self.happened["growths"] += 1
        self.rig.growths.clear()

    def pin_for_reader(self, request: SequenceRequest, block_table: Sequence[int]) -> None:
        """Pin what a reader needs of a prompt's blocks, as far as it was not pinned before."""
        windows, pinned = self.rig.pool.windows, self.read_blocks.setdefault(request.seq_id, set())
        entries = entries_from(windows.first_blocks(len(request.token_ids)), len(block_table) // windows.num_tables)
        needed = [b for entry in entries if (b := block_table[entry]) != NO_BLOCK and b not in pinned]
        self.rig.pool.pin(needed)
        self.pins.append(needed)
        pinned.update(needed)
        self.happened["pins"] += 1

    def pull(self) -> None:
        """Advance one random pull: receive a block, fail, or complete."""
        rng, pool, rig = self.rng, self.rig.pool, self.rig
        if not self.pulls:
            return
        seq_id = rng.choice(list(self.pulls))
        request, left = self.requests[seq_id], self.pulls[seq_id]
        table = rig.admissions[seq_id].block_table
        chance = rng.random()
        if left and chance < 0.75:
            self.receive_one(seq_id)
        elif left and (chance > 0.95 or not self.live(seq_id)):
            doubtful = rng.sample(left, rng.randint(0, len(left)))
            pool.quarantine([table[i] for i in doubtful])
            pool.drop_receiving([table[i] for i in left if i not in doubtful])
            self.quarantined += [table[i] for i in doubtful]
            self.happened["quarantines"] += bool(doubtful)
            rig.engine.check()
            self.received.add(seq_id)
            del self.pulls[seq_id]
            if rng.random() < 0.5:
                self.step()  # the worker may call `fail` only after a step
            rig.engine.fail(seq_id, PULL_FAILED)
        elif not left:
            del self.pulls[seq_id]
            self.received.add(seq_id)
            rig.engine.received(seq_id, rig.first_tokens(request))

    def receive_one(self, seq_id: int | None = None) -> None:
        """Receive one block of this pull, or of a random one."""
        pulls = [s for s, left in self.pulls.items() if left] if seq_id is None else [seq_id]
        if pulls:
            seq_id = self.rng.choice(pulls)
            left = self.pulls[seq_id]
            self.rig.mark_received(self.requests[seq_id], [left.pop(self.rng.randrange(len(left)))])
            self.happened["received blocks"] += 1

    def spoil(self) -> None:
        """Overwrite all blocks to which a read may still write."""
        receiving = [self.rig.admissions[s].block_table[i] for s, left in self.pulls.items() for i in left]
        for block_id in [*receiving, *self.quarantined]:
            self.rig.executor.memory[block_id] = [self.rng.randrange(10**6) for _ in range(4)]

    def pull_prefix(self) -> None:
        """Pull the prefix of later prompts from another worker's cache, completely or in part."""
        rng, pool = self.rng, self.rig.pool
        tokens = rng.choice(self.prefixes)[: 4 * rng.randint(1, 7)]
        hashes, windows = hashes_of(tokens), pool.windows
        self.learn_blocks(hashes, contents(tokens))
        needed = hashes_of_prefix(hashes, windows)
        held = pool.match(needed, len(needed))
        entries = entries_from(windows.first_blocks(len(tokens)), len(hashes))[len(held) :]
        if len(entries) <= pool.num_allocatable - self.rig.engine.num_reserved_blocks:
            receiving = pool.allocate_receiving(len(entries), entries) or []
        else:
            receiving = []
        pool.mark_replicas(receiving)
        pool.evict_replicas(max(0, pool.num_replicas - max(len(receiving), pool.num_blocks // 4)))
        num_received = rng.choice([len(receiving), rng.randint(0, len(receiving))])
        for block_id, entry, block_hash in zip(receiving[:num_received], entries, needed[len(held) :], strict=False):
            self.rig.executor.memory[block_id] = self.contents_of_hash[block_hash][:]
            assert table_hash(hashes[entry // windows.num_tables], entry % windows.num_tables) == block_hash
            pool.mark_received(block_id, block_hash)
        pool.drop_receiving(receiving[num_received:])
        pool.unref(receiving)
        pool.unref(held)
        self.happened["replicas pulled"] += num_received
        self.rig.engine.check()

    def unpin(self) -> None:
        if self.pins and self.rng.random() < 0.5:
            self.rig.pool.unpin(self.pins.pop(self.rng.randrange(len(self.pins))))
        if self.quarantined and self.rng.random() < 0.3:
            self.rig.pool.end_quarantine([self.quarantined.pop(self.rng.randrange(len(self.quarantined)))])

    def step(self) -> bool:
        """Run a step, and often steps planned ahead of it. Returns True if there was one."""
        plan = self.rig.plan()
        self.after_admissions()
        self.spoil()
        has_run = False
        while not plan.is_empty:
            has_run = True
            self.happened["steps"] += 1
            self.happened["steps after freed blocks"] += any(NO_BLOCK in part.block_table for part in plan.sequences)
            self.happened["steps with a limited chunk"] += (
                self.rig.engine.next_step_budget().num_tokens < self.rig.config.max_num_batched_tokens
            )
            self.happened["steps limited by a target"] += self.rig.engine.next_step_budget().target_step_s > 0
            self.happened["steps with late requests"] += self.rig.engine.next_step_budget().num_late > 0
            self.now_s += self.rng.uniform(0.002, 0.02)
            after = self.plan_ahead(plan)
            result = self.rig.executor.run(plan)
            while after is None and self.rng.random() < 0.1:
                self.cancel()
                self.rig.engine.check()
            self.rig.note(self.rig.engine.apply(plan, result))
            self.rig.engine.check()
            assert plan.num_tokens <= self.rig.config.max_num_batched_tokens
            if after is None:
                break
            self.happened["steps ahead"] += 1
            self.happened["steps ahead of an end"] += any(
                p.seq_id not in self.rig.engine._sequences.running for p in after.sequences
            )
            self.meanwhile()
            plan = after
        return has_run

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Return the step after `plan`, or None if none can be planned or it was withdrawn."""
        if self.rng.random() < 0.3:
            return None
        after = self.rig.engine.plan_ahead(plan)
        self.rig.engine.check()
        if after.is_empty:
            return None
        if self.rng.random() < 0.2:
            self.rig.engine.step_withdrawn()
            self.rig.engine.check()
            self.happened["withdrawn"] += 1
            return None
        return after

    def meanwhile(self) -> None:
        """Let reads start and end while a step runs that may still write to freed blocks."""
        if self.rng.random() < 0.3:
            self.pull_prefix()
        for _ in range(self.rng.randint(0, 2)):
            self.receive_one()
        self.unpin()
        self.spoil()

    def audit(self) -> None:
        """Check that events equal the cached content, and that each block has the content of its hash."""
        for kind, block_hash in self.rig.pool.take_events():
            assert (kind is KvEventKind.STORED) is (block_hash not in self.published)
            self.published ^= {block_hash}
        assert self.published == set(self.rig.pool.hashes())
        for block_id in range(self.rig.pool.num_blocks):
            block_hash = self.rig.pool.hash_of(block_id)
            if block_hash != NO_HASH:
                assert self.rig.executor.memory[block_id] == self.contents_of_hash[block_hash]
                assert self.rig.generation_table.hashes[block_id] == block_hash

    def assert_right(self) -> None:
        """Check that each output is a prefix of the defined response, and complete unless cancelled or
        failed."""
        for seq_id, request in self.requests.items():
            for i in request.sample_indices:
                answer, its_end = self.rig.expected(request, i)
                finish = None if request.prefill_only and len(answer) > 1 else its_end
                answer = answer[:1] if request.prefill_only else answer
                got, end = self.rig.outputs[seq_id, i], self.rig.ends.get((seq_id, i))
                assert got == answer[: len(got)]
                if (seq_id, i) not in self.cancelled and not isinstance(end, Failure):
                    assert (got, end) == (answer, finish), request
        for output in self.rig.all_outputs:
            if output.tokens:
                request = self.requests[output.seq_id]
                prompt_and_outputs = len(request.token_ids) - request.num_prompt_tokens
                assert output.output_index >= prompt_and_outputs

    def live_through(self, num_turns: int) -> None:
        for _ in range(num_turns):
            if self.rng.random() < 0.4:
                self.add()
            if self.rng.random() < 0.06:
                self.cancel()
            if self.rng.random() < 0.15:
                self.pull_prefix()
            for _ in range(self.rng.randint(0, 3)):
                self.pull()
            self.unpin()
            self.step()
            self.audit()

    def come_to_an_end(self, max_steps: int) -> None:
        """Run without new requests until everything has ended. Fails after `max_steps`: that is a
        livelock."""
        for _ in range(max_steps):
            if self.rig.engine.is_idle and not (self.pins or self.pulls or self.quarantined):
                return
            self.pull()
            self.unpin()
            self.step()
        raise AssertionError(f"no end after {max_steps} steps")


HAPPENED: dict[int, Counter[str]] = {}
"""What has happened in each world before it came to an end, by seed."""


def lived_world(seed: int) -> World:
    """Return a world that has lived, and keep in HAPPENED what has happened in it."""
    world = World(seed)
    world.live_through(120)
    counters = world.rig.engine.counters
    own = Counter(preemptions=counters.preemptions, copies=counters.block_copies, cached=counters.cached_tokens)
    HAPPENED[seed] = world.happened + own
    return world


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed >= 10 else []) for seed in range(NUM_WORLDS)]
)
def test_every_token_is_correct_and_no_block_leaks(seed: int) -> None:
    world = lived_world(seed)
    world.come_to_an_end(max_steps=3000)
    world.audit()
    world.assert_right()
    world.rig.assert_clean()


@pytest.mark.slow
def test_random_worlds_cover_all_events() -> None:
    """Without these events the test above would check too little. Worlds that it has run are not repeated."""
    happened: Counter[str] = Counter()
    for seed in range(15):
        if seed not in HAPPENED:
            lived_world(seed)
        happened += HAPPENED[seed]
    seen = {
        "preemptions",
        "copies",
        "cached",
        "pulls",
        "received blocks",
        "quarantines",
        "pins",
        "replays",
        "queue_full",
        "no_capacity",
    }
    seen |= {"steps ahead", "steps ahead of an end", "withdrawn", "replicas pulled"} | {
        f"cancel {state}" for state in ("WAITING", "RUNNING", "RECEIVING")
    }
    seen |= {"steps with a limited chunk", "steps limited by a target", "steps with late requests"}
    seen |= {"steps after freed blocks", "growths"}
    assert all(happened[what] >= 3 for what in seen), happened
    assert happened["steps"] / 15 >= 100
