"""Prompts of random tokens for the benchmarks of engines, and the pauses between their measurements."""

import random

FIRST_ID = 300
"""Lower token ids are special tokens and single bytes."""
SETTLE_S = 60.0
"""Wait after startup, because Baton prefaults its KV memory in the background."""
REST_S = 0.5
"""Pause before each measurement, because threads of the previous engine may still spin."""


def random_prompts(num: int, num_tokens: int, vocab_size: int, rng: random.Random) -> list[list[int]]:
    """Return `num` new prompts, of which nothing is cached."""
    return [[rng.randrange(FIRST_ID, vocab_size) for _ in range(num_tokens)] for _ in range(num)]
