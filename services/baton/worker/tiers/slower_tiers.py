"""The tiers of one worker below its device: where content is, how long it takes to load, and loading it."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_events import Tier
from baton.engine.tiers.kv_tier import KvTier


class SlowerTiers:
    """Tiers, the fastest first. Content that several have is loaded from the fastest of them."""

    def __init__(self, tiers: Sequence[KvTier]) -> None:
        self.tiers = tuple(tiers)

    def fastest(self, *, uses_disk: bool = True) -> Iterator["SlowerTiers"]:
        """Yield the fastest tier alone, then it with the next one, and so on.

        A disk that does not answer is left out. uses_disk: False leaves it out anyway.
        """
        for count, tier in enumerate(self.tiers, 1):
            if (tier.tier is Tier.DISK and not uses_disk) or not tier.answers:
                return
            yield SlowerTiers(self.tiers[:count])

    def holds(self, block_hash: BlockHash) -> bool:
        """Return True if a tier has the content."""
        return any(tier.holds(block_hash) for tier in self.tiers)

    def positions(self, hashes: Sequence[BlockHash]) -> dict[Tier, list[int]]:
        """Return the positions of the hashes whose content each tier would load."""
        found: dict[Tier, list[int]] = {}
        for position, block_hash in enumerate(hashes):
            tier = next((each.tier for each in self.tiers if each.holds(block_hash)), None)
            if tier is not None:
                found.setdefault(tier, []).append(position)
        return found

    def load_s(self, hashes: Sequence[BlockHash], num_loading_blocks: Mapping[Tier, int]) -> float | None:
        """Return the predicted time to load content; None if a tier that has some was never measured.

        num_loading_blocks: that each tier loads before. Tiers load at the same time.
        """
        num_blocks = {
            tier: len(found) + num_loading_blocks.get(tier, 0) for tier, found in self.positions(hashes).items()
        }
        seconds = [tier.load_s(num_blocks[tier.tier]) for tier in self.tiers if tier.tier in num_blocks]
        known = [each for each in seconds if each is not None]
        return max(known) if known and len(known) == len(seconds) else None

    async def load(
        self, hashes: Sequence[BlockHash], block_ids: Sequence[int], *, within_s: float | None = None
    ) -> int:
        """Load content into own blocks, from all tiers at a time. Otherwise as `KvTier.load`."""
        positions = self.positions(hashes)
        tiers = [tier for tier in self.tiers if tier.tier in positions]
        if len(tiers) == 1 and len(positions[tiers[0].tier]) == len(hashes):
            # Without a task, which takes a further iteration of the loop.
            return await tiers[0].load(hashes, block_ids, within_s=within_s)
        counts = await asyncio.gather(
            *(
                tier.load(
                    [hashes[i] for i in positions[tier.tier]],
                    [block_ids[i] for i in positions[tier.tier]],
                    within_s=within_s,
                )
                for tier in tiers
            )
        )
        loaded = {i for tier, count in zip(tiers, counts, strict=True) for i in positions[tier.tier][:count]}
        return next((i for i in range(len(hashes)) if i not in loaded), len(hashes))
