"""Settings of packing a model's weights, and of the cache of packed weights."""

from typing import TYPE_CHECKING, TypedDict

from baton.runtime.config.settings import WorkerConfig

if TYPE_CHECKING:
    from baton.model.linear.packer import PackerForDtype
    from baton.model.loading.image.image_cache import PackedModelCache


class Packing(TypedDict):
    """Arguments of `load_model`."""

    packer_for: "PackerForDtype"
    cache: "PackedModelCache"


def packing(config: WorkerConfig, num_threads: int) -> Packing:
    """Return how `load_model` packs weights for this worker: not at all without kernels."""
    from baton.model.backends.native_layers import packer_at_loading
    from baton.model.loading.image.image_cache import PackedModelCache

    return Packing(
        packer_for=packer_at_loading(num_threads) if config.kernels == "auto" else lambda _dtype: None,
        cache=PackedModelCache(config.weight_cache),
    )
