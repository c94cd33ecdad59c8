"""Contents of simulated slots, computed in parts, are those of the whole sequence."""

from random import Random

import pytest

from baton.core.kv.block_hash import token_ids
from baton.sim.sim_executor import MAX_KNOWN_SEQS, _ExpectedSlots
from baton.sim.sim_memory import MAX_LOOP_TOKENS, SimMemory, contents


@pytest.mark.parametrize("seed", range(20))
def test_contents_in_parts_are_those_of_the_whole(seed: int) -> None:
    rng = Random(seed)
    tokens = [rng.randrange(256) for _ in range(rng.randint(2, 4 * MAX_LOOP_TOKENS))]
    cut = rng.randint(1, len(tokens) - 1)
    first = contents(tokens[:cut])
    assert first + contents(tokens[cut:], first[-1]) == contents(tokens)


@pytest.mark.parametrize("seed", range(20))
def test_expected_slots_follow_from_the_tokens_alone(seed: int) -> None:
    """Sequences grow, have drafts that were wrong, and ids are used again for other tokens."""
    rng, expected = Random(seed), _ExpectedSlots()
    tokens: dict[int, list[int]] = {}
    for _ in range(300):
        seq_id = rng.randrange(2 * MAX_KNOWN_SEQS)
        own = tokens.setdefault(seq_id, [rng.randrange(256) for _ in range(rng.randint(1, 40))])
        if rng.random() < 0.1:
            own[:] = [rng.randrange(256) for _ in range(rng.randint(1, 40))]
        own += [rng.randrange(256) for _ in range(rng.randint(0, 3))]
        drafts = [rng.randrange(256) for _ in range(rng.randint(0, 3))]
        found = expected.of(seq_id, token_ids(own + drafts), len(own))
        assert found == contents(own + drafts)


@pytest.mark.parametrize("seed", range(20))
def test_slots_are_those_of_each_position(seed: int) -> None:
    rng, memory = Random(seed), SimMemory(8, 4)
    table = tuple(rng.sample(range(8), 5))
    for index in range(20):
        memory.write_slot(table, index, 100 + index)
    begin = rng.randrange(20)
    end = rng.randint(begin, 20)
    assert memory.slots(table, begin, end) == [memory.slot(table, index) for index in range(begin, end)]
