"""The correct response of a worker with `--device emulated`. Only correct KV of the whole prefix produces
it."""

from collections.abc import Sequence

from baton.core.kv.block_hash import token_ids
from baton.engine.kv_cache.checksum import extend, slots_of, token_after

DEMO_EOS_TOKEN_IDS = (0, 2)


def emulated_answer(prompt: Sequence[int], *, seed: int, max_tokens: int, vocab_size: int) -> list[int]:
    """Return the correct response of a sampled request to the demo model, computed without a cluster."""
    content, answer = int(slots_of(token_ids(prompt))[-1]), list[int]()
    for position in range(len(prompt), len(prompt) + max_tokens):
        token_id = token_after(content, seed, 0, position, vocab_size)
        answer.append(token_id + 1 if token_id in DEMO_EOS_TOKEN_IDS else token_id)
        content = extend(content, answer[-1])
    return answer
