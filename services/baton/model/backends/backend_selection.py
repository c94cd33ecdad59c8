"""How a model is run here: the fastest way that is proven to compute what the model itself does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.core.errors import BatonError
from baton.model.attention.attention_inputs import Asked
from baton.model.attention.paged_attention import PagedKernel, paged_attention
from baton.model.backends.compiled_layers import CompiledForward
from baton.model.backends.cuda_graphs import BATCHES, GraphedForward
from baton.model.backends.decoder_layers import can_fuse
from baton.model.backends.fused_layers import FusedForward
from baton.model.backends.native_layers import DecoderForward, can_decode
from baton.model.device.device_memory import free_bytes, give_back_freed
from baton.model.kernels.cpu.kernel_library import Kernels, kernel_of, load_kernels
from baton.model.loading.model_loader import LoadedModel, check_room
from baton.model.step.forward import Forward, ModelForward
from baton.model.verification.verify_backend import verify_logits, verify_masks
from baton.runtime.logging import get_logger

log = get_logger(__name__)

COMPILED_TOKENS = (1, 2)
"""What is compiled for one number of tokens of a step is for all, but that one token is a case of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """`name`: for people. `kernel`: the attention of a `forward` that runs the model's own code.
    `warm_batches`: sizes of decode steps that take long the first time; `warm_tokens`: so of a prompt's part,
    and `warm_contexts` of what stands before it. `settle`: call it when they have run."""

    name: str
    forward: Forward
    kernel: PagedKernel = paged_attention
    warm_batches: tuple[int, ...] = ()
    warm_tokens: tuple[int, ...] = ()
    warm_contexts: tuple[int, ...] = ()
    settle: Callable[[], None] = lambda: None


def choose_backend(loaded: LoadedModel, *, kernels: str, num_threads: int, block_size_tokens: int) -> Backend:
    """`kernels`: as the setting. Raises ModelError if the model cannot be served in any way; a way that is
    not taken is said in the log, whatever it failed with. Afterwards the model may run in the way returned
    alone, see `FusedForward.own_weights`."""
    asked = verify_masks(loaded, block_size_tokens)
    way = None
    if kernels == "auto" and loaded.device.type == "cpu":
        way = _with_kernels(loaded, asked, num_threads, block_size_tokens)
    elif kernels == "auto":
        way = _with_triton(loaded, block_size_tokens)
    if way is None:
        verify_logits(loaded, block_size_tokens)
        way = Backend(name="torch", forward=ModelForward(loaded.model))
    give_back_freed()  # proofs leave a lot, and KV memory is sized next by what is free
    return way


def _with_kernels(
    loaded: LoadedModel, asked: Sequence[Asked], num_threads: int, block_size_tokens: int
) -> Backend | None:
    """The fastest way with our kernels that builds and is proven here, if any is."""
    try:
        kernels = load_kernels(num_threads)
    except (
        Exception
    ) as error:  # a compiler, a linker or a loader may fail in ways of its own, and torch needs none of them
        log.warning("no_kernels", problem=_said(error), hint="the model runs through torch, slower; see `baton doctor`")
        return None
    for is_whole in (True, False):
        try:
            if can_fuse(loaded.model) and (not is_whole or can_decode(loaded.model, kernels)):
                return _decoder(loaded, asked, kernels, block_size_tokens, is_whole)
        except (
            Exception
        ) as error:  # operations of oneDNN that this build of torch lacks, a layer that is not what it seems
            log.warning("not_fused", problem=_said(error), hint="the model runs in another way, slower")
    try:
        verify_logits(loaded, block_size_tokens, kernel=kernel_of(kernels))
    except Exception as error:
        log.warning("kernels_not_proven", problem=_said(error), hint="the model runs through torch, slower")
        return None
    return Backend(name="our attention", forward=ModelForward(loaded.model), kernel=kernel_of(kernels))


def _with_triton(loaded: LoadedModel, block_size_tokens: int) -> Backend | None:
    """The model's own code with attention that follows block tables, and with recorded decode steps, as far
    as these are proven."""
    try:
        from baton.model.kernels.triton.triton_attention import (
            LONG_TOKENS,
            split_contexts,
            triton_attention,
            triton_decode,
        )

        verify_logits(loaded, block_size_tokens, kernel=triton_attention, longest=LONG_TOKENS)
    except (
        Exception
    ) as error:  # triton compiles with a compiler of the host and of the driver, and may fail in ways of its own
        log.warning("kernels_not_proven", problem=_said(error), hint="attention gathers each context first, slower")
        return None
    compiled = compiled_backend(loaded, triton_attention, "Triton attention", block_size_tokens)
    way = compiled or Backend(name="Triton attention", forward=ModelForward(loaded.model), kernel=triton_attention)
    way = replace(way, warm_contexts=split_contexts(loaded.max_model_len))
    assert isinstance(way.forward, ModelForward)
    recorded = GraphedForward(way.forward, triton_decode, max_model_len=loaded.max_model_len)
    try:
        verify_logits(loaded, block_size_tokens, kernel=triton_attention, forward=recorded)
    except (
        Exception
    ) as error:  # code of a model that waits for the device, or asks for memory in ways that cannot be recorded
        log.warning(
            "not_recorded",
            problem=_said(error),
            hint="each kernel of a decode step is launched anew, slower for small batches",
        )
        return way
    if recorded.is_off:
        return way
    recorded.forget()  # those of the proof's KV memory
    return replace(way, name=f"{way.name}, recorded", forward=recorded, warm_batches=BATCHES)


def compiled_backend(
    loaded: LoadedModel, kernel: PagedKernel, name: str, block_size_tokens: int, *, backend: str = "inductor"
) -> Backend | None:
    """The model's own code, its layers compiled, with this attention; None if that cannot be, or is not
    proven."""
    forward = None
    try:
        forward = CompiledForward(loaded.model, backend=backend)
        verify_logits(loaded, block_size_tokens, kernel=kernel, forward=forward)
    except Exception as error:  # a compiler of others that traces code of others
        if forward is not None:
            forward.close()
        log.warning("not_compiled", problem=_said(error), hint="the model's layers run operation by operation, slower")
        return None
    return Backend(
        name=f"{name}, compiled", forward=forward, kernel=kernel, warm_tokens=COMPILED_TOKENS, settle=forward.settle
    )


def _decoder(
    loaded: LoadedModel, asked: Sequence[Asked], kernels: Kernels, block_size_tokens: int, is_whole: bool
) -> Backend:
    weights = sum(parameter.numel() * parameter.itemsize for parameter in loaded.model.parameters())
    check_room(
        weights,
        free_bytes(loaded.device),
        "packed weights, beside the plain ones until the proof is over,",
        str(loaded.device),
    )
    forward = (DecoderForward if is_whole else FusedForward)(loaded.model, asked, kernels)
    verify_logits(loaded, block_size_tokens, forward=forward)
    forward.own_weights()  # only now: the proof compares with the model's own pass, and what is not proven needs it
    return Backend(name="our decoder" if is_whole else "our kernels", forward=forward)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
