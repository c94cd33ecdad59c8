"""Measures whether the native product is faster than torch's here, once per machine, kernels and dtype."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import torch

from baton.model.kernels.cpu.kernel_library import Kernels, WeightArena
from baton.model.linear.packed_linear import LinearPart, PackedGemm
from baton.model.linear.packed_weight import ArenaMemory, pack_weight
from baton.model.linear.weights import FloatWeight
from baton.runtime import user_cache
from baton.runtime.logging import get_logger

log = get_logger(__name__)

ROW_COUNTS = (1, 8, 128)
"""Rows of one decode, of a batch of decodes, and of a prompt chunk."""
SHAPE = (4096, 2048)
NUM_WEIGHTS = 3
"""Weights of this shape that take turns, 96 MiB in float32, so that no cache holds them."""
REPEATS = 5
MAX_VERDICTS = 64

TimedProduct = Callable[[torch.Tensor, int], object]
"""Multiplies rows by the weight of this number."""


def native_is_faster_here(
    kernels: Kernels,
    dtype: torch.dtype,
    *,
    directory: Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """True if the native product of plain weights was measured to be faster than torch's.

    It is measured once; then the verdict is in `directory`, by default the user's cache directory. All
    workers of a machine get the same one, whatever their number of threads: they then compute the same bytes,
    and share one file of packed weights.
    """
    directory = directory or user_cache.cache_directory("products")
    path = directory / f"{_key(kernels, dtype)}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with user_cache.locked(directory / "lock"):
            known = _read(path)
            if known is None:
                known = _measured(kernels, dtype, clock)
                _write(path, known)
            return is_faster(known)
    except OSError as error:
        log.warning("product_verdict_not_kept", problem=str(error), hint="it is measured at each start")
        return is_faster(_measured(kernels, dtype, clock))


def is_faster(ratios: Mapping[str, float]) -> bool:
    """True if the native product is faster on average, given torch's time over its own by number of rows."""
    return sum(math.log(ratio) for ratio in ratios.values()) > 0


def measure_ratios(
    native: TimedProduct, own: TimedProduct, inputs: Sequence[torch.Tensor], clock: Callable[[], float]
) -> dict[str, float]:
    """Return the time of `own` over that of `native` for each of the inputs, by its number of rows.

    Both are timed in turns, and the shortest time of each counts, so that other processes matter little.
    """
    ratios = {}
    for x in inputs:
        best = [math.inf, math.inf]
        for repeat in range(REPEATS + 1):  # the first is not counted: threads start and caches fill
            for number, product in enumerate((native, own)):
                begin = clock()
                product(x, repeat % NUM_WEIGHTS)
                elapsed = clock() - begin
                best[number] = min(best[number], elapsed) if repeat else math.inf
        ratios[str(len(x))] = best[1] / best[0]
    return ratios


@torch.inference_mode()
def _measured(kernels: Kernels, dtype: torch.dtype, clock: Callable[[], float]) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(NUM_WEIGHTS)]
    memory = ArenaMemory(WeightArena())  # freed with the products
    products = [
        PackedGemm(kernels, LinearPart(pack_weight(kernels, FloatWeight(weight), memory, dtype))) for weight in weights
    ]
    ratios = measure_ratios(
        lambda x, number: products[number](x),
        lambda x, number: torch.nn.functional.linear(x, weights[number]),
        [torch.randn(rows, SHAPE[1], generator=generator).to(dtype) for rows in ROW_COUNTS],
        clock,
    )
    log.info("products_measured", dtype=str(dtype), torch_over_native=ratios, native_is_faster=is_faster(ratios))
    return ratios


def _key(kernels: Kernels, dtype: torch.dtype) -> str:
    facts = [kernels.name, str(dtype), torch.__version__]
    return blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _read(path: Path) -> dict[str, float] | None:
    """Return a verdict that was kept; None if there is none, or it is not usable."""
    if not user_cache.use(path):
        return None
    try:
        found = {str(rows): float(ratio) for rows, ratio in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return found if found and all(0 < ratio < math.inf for ratio in found.values()) else None


def _write(path: Path, ratios: Mapping[str, float]) -> None:
    made = path.with_suffix(f".{os.getpid()}")
    made.write_text(json.dumps(ratios))
    user_cache.publish(made, path)
    user_cache.remove_oldest(path.parent.glob("*.json"), keep=path, max_number=MAX_VERDICTS)
