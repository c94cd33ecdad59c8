"""How a model is run here: the fastest way that is proven to compute what the model itself does."""

from dataclasses import dataclass

from baton.core.errors import ModelError
from baton.engine.model.attention import PagedKernel, paged_attention
from baton.engine.model.forward import Forward, ModelForward
from baton.engine.model.fused import FusedForward, can_fuse
from baton.engine.model.loading import LoadedModel
from baton.engine.model.native.build import NoKernels
from baton.engine.model.native.library import kernel_of, load_kernels
from baton.engine.model.self_proof import prove_masks, prove_numbers
from baton.runtime.logging import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """`name`: for people. `kernel`: the attention of a `forward` that runs the model's own code."""

    name: str
    forward: Forward
    kernel: PagedKernel = paged_attention


def choose_way(loaded: LoadedModel, *, kernels: str, num_threads: int, block_size_tokens: int) -> Way:
    """`kernels`: as the setting. Raises ModelError if the model cannot be served in any way; one that is not proven is said in the log."""
    asked = prove_masks(loaded, block_size_tokens)
    if kernels == "auto" and loaded.device.type == "cpu":
        try:
            ours = load_kernels(num_threads)
            if can_fuse(loaded.model):
                fused = FusedForward(loaded.model, asked, ours)
                prove_numbers(loaded, block_size_tokens, forward=fused)
                return Way(name="our kernels", forward=fused)
            prove_numbers(loaded, block_size_tokens, kernel=kernel_of(ours))
            return Way(name="our attention", forward=ModelForward(loaded.model), kernel=kernel_of(ours))
        except NoKernels as error:
            log.warning("no_kernels", problem=str(error), hint="the model runs through torch, slower; see `baton doctor`")
        except ModelError as error:
            log.warning("kernels_not_proven", problem=str(error), hint="the model runs through torch, slower")
    prove_numbers(loaded, block_size_tokens)
    return Way(name="torch", forward=ModelForward(loaded.model))
