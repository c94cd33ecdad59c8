"""Verifies at every start that paged attention computes what the model's own attention computes.

There are two checks. The first compares what each layer may see with the mask that transformers would build,
up to the longest context; it is exact in every dtype. The second compares the logits of packed, chunked,
paged passes with those of the model's own SDPA pass. Unwritten KV memory is NaN in these passes, so that
reading it shows.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from baton.core.errors import BatonError, ModelError
from baton.core.kv.kv_layout import INT8
from baton.model.attention.attention_inputs import AttentionParams, AttentionStep, CausalMasks, Segment
from baton.model.attention.paged_attention import PAGED, STEP_ARGUMENT, PagedKernel, attend, paged_attention
from baton.model.device.kv_tensors import KvCache
from baton.model.linear.pack_model import rounds_activations
from baton.model.loading.model_loader import LoadedModel
from baton.model.step.forward import Forward, ModelForward
from baton.model.step.step_inputs import PreparedSequence, pack

_PAGED_WITH_MASKS = "baton_paged_verification"
"""Paged attention for which transformers hands over a description of the mask."""
_NUM_PROBES = 64
"""Random query positions at which masks are compared."""
_FLOAT32_LIMIT = 1e-3
_ROUNDED_LIMIT = 0.1
"""Relative error of the logits that rounding may cause, in float32, and where numbers are rounded to fewer
bits: in half precision, and in products with codes, which round activations to 8 bits."""
_LAST_BITS_FACTOR, _MAX_ROUNDED_LIMIT = 2.0, 0.4
"""Some weights make the logits depend much on the last bit of any number. Products with codes do, too: they
round activations to 8 bits, so that any other rounding before them changes some codes.
Allowed error as a multiple of what other embeddings in the last bit change, and its upper bound."""
_INT8_KV_LIMIT = 0.1
"""Relative error of the logits that KV in int8 may cause."""
_NOISE_FACTOR = 10.0
"""Allowed error as a multiple of the model's own error between batch sizes, if that is larger."""


Windows = tuple[int | None, ...]
"""Number of tokens that each layer sees, None for all."""


@dataclass(frozen=True, slots=True)
class _MaskFunction:
    """Takes the place of a mask in transformers. `function` tells if a query sees a key."""

    function: Any


def _describe_mask(*, mask_function: Any, **_others: Any) -> _MaskFunction:
    return _MaskFunction(mask_function)


AttentionInterface.register(_PAGED_WITH_MASKS, attend)
AttentionMaskInterface.register(_PAGED_WITH_MASKS, _describe_mask)


def verify_masks(loaded: LoadedModel, block_size_tokens: int) -> tuple[AttentionParams, ...]:
    """Check that each layer's scale and window describe its mask completely, and return them by layer.

    Takes one short pass. Raises ModelError that names the layer that differs. The model is unchanged
    afterwards.
    """
    with _as_model_error(loaded):
        return _check_masks(loaded, block_size_tokens)


def verify_logits(
    loaded: LoadedModel,
    block_size_tokens: int,
    *,
    kernel: PagedKernel = paged_attention,
    forward: Forward | None = None,
    longest: int = 0,
    windows: Windows = (),
) -> None:
    """Check that the model computes the same logits as with SDPA, within rounding.

    kernel: paged attention for the model's own code.
    forward: runs the model; None: its own code.
    longest: length of one additional prompt, 0 for none.
    windows: of each layer, from which block tables follow, see `LoadedModel.layout`.
    Takes a few short passes. Raises ModelError with the size of the difference. The model is unchanged
    afterwards.
    """
    with _as_model_error(loaded):
        _check_logits(loaded, block_size_tokens, kernel, forward, longest, windows)


@contextmanager
def _as_model_error(loaded: LoadedModel) -> Iterator[None]:
    """Turn any error of foreign model code into a ModelError: such a model cannot be served."""
    try:
        with torch.inference_mode():
            yield
    except BatonError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(loaded.model).__name__} cannot run with paged attention: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _attention_of(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    model.set_attn_implementation(implementation)
    if model.config._attn_implementation != implementation:
        raise ModelError(f"{type(model).__name__} does not let its attention be chosen ({implementation})")
    try:
        yield
    finally:
        model.set_attn_implementation(PAGED)


class _RecordingStep(AttentionStep):
    """Records what each layer passes to attention."""

    def __init__(self, cache: KvCache, segments: Sequence[Segment], masks: CausalMasks, kernel: PagedKernel) -> None:
        super().__init__(cache, segments, masks, kernel)
        self.seen: list[tuple[int, Any, AttentionParams]] = []

    def observe(self, layer: int, attention_mask: Any, attention_params: AttentionParams) -> None:
        self.seen.append((layer, attention_mask, attention_params))


def _check_masks(loaded: LoadedModel, block_size_tokens: int) -> tuple[AttentionParams, ...]:
    """Check that every layer attends exactly once, and sees exactly the tokens that its own mask shows."""
    name = type(loaded.model).__name__
    cache = KvCache.zeros(loaded.layout(block_size_tokens), 1, loaded.device, loaded.dtype)
    num_tokens = min(4, block_size_tokens)
    segment = Segment(token_begin=0, num_tokens=num_tokens, kv_begin=0, block_ids=np.zeros(1, dtype=np.int64))
    step = _RecordingStep(cache, [segment], CausalMasks(cache.dtype, cache.device), paged_attention)
    tokens = torch.arange(num_tokens, device=loaded.device)[None]
    with _attention_of(loaded.model, _PAGED_WITH_MASKS):
        arguments: dict[str, Any] = {STEP_ARGUMENT: step}
        loaded.model(input_ids=tokens, position_ids=tokens, use_cache=False, **arguments)
    if sorted(layer for layer, _, _ in step.seen) != list(range(cache.num_layers)):
        raise ModelError(f"{name} does not attend exactly once in each of its {cache.num_layers} layers")
    checked: set[tuple[int, int | None]] = set()  # layers of one kind share a mask
    for layer, mask, attention_params in step.seen:
        window = attention_params.window
        if not isinstance(mask, _MaskFunction):
            raise ModelError(f"layer {layer} of {name} builds its own attention mask, so what it may see is unknown")
        if (id(mask), window) in checked:
            continue
        checked.add((id(mask), window))
        for query in _probes(loaded.max_model_len, window):
            keys = torch.arange(max(0, query - 2 * (window or query)), min(query + 2, loaded.max_model_len))
            zero = torch.zeros((), dtype=torch.int64)
            shown = torch.as_tensor(mask.function(zero, zero, torch.tensor(query), keys)).expand(keys.shape)
            paged = (keys <= query) & (keys > query - (window or query + 1))
            if not torch.equal(shown, paged):
                raise ModelError(
                    f"layer {layer} of {name} has an attention mask that differs from its sliding_window {window}"
                )
    return tuple(attention_params for _, _, attention_params in sorted(step.seen, key=lambda seen: seen[0]))


def _probes(max_model_len: int, window: int | None) -> list[int]:
    """Return query positions to compare masks at.

    These are both ends, both sides of the window and of powers of two, and some random positions.
    """
    rng = random.Random(0)
    powers = [1 << bit for bit in range(max_model_len.bit_length())]
    positions = [
        0,
        max_model_len - 1,
        *powers,
        *(p - 1 for p in powers),
        *(rng.randrange(max_model_len) for _ in range(_NUM_PROBES)),
    ]
    if window is not None:
        positions += [window - 2, window - 1, window, window + 1, 2 * window]
    return sorted({p for p in positions if 0 <= p < max_model_len})


def _check_logits(
    loaded: LoadedModel,
    block_size_tokens: int,
    kernel: PagedKernel,
    forward: Forward | None,
    longest: int,
    windows: Windows,
) -> None:
    """Compare prompts computed together with each prompt alone under SDPA.

    Their lengths are around block boundaries.
    """
    rng = random.Random(0)
    block_size = block_size_tokens
    lengths = [
        min(n, loaded.max_model_len) for n in (block_size + 3, 2 * block_size, 5, *([longest] if longest else ()))
    ]
    prompts = [torch.tensor([rng.randrange(loaded.vocab_size) for _ in range(n)]) for n in lengths]
    with _own_attention(loaded.model):
        reference = [_logits(loaded, prompt[None])[0] for prompt in prompts]
    is_rounded = loaded.dtype != torch.float32 or rounds_activations(loaded.model)
    with nullcontext(forward) if forward is not None else closing(ModelForward(loaded.model)) as computing:
        computed = _paged_passes(loaded, prompts, block_size, kernel, computing, rng, windows)
    errors = [
        _difference(
            [logits for _, logits in results],
            [each[at] for each, (at, _) in zip(reference, results, strict=True)],
            is_rounded=is_rounded,
        )
        for results in computed
        if any(len(at) for at, _ in results)  # short prompts may take one pass
    ]
    error = float(np.max(errors))  # NaN if any error is NaN
    is_int8 = loaded.kv_dtype == INT8
    limit = max(_ROUNDED_LIMIT if is_rounded else _FLOAT32_LIMIT, _INT8_KV_LIMIT if is_int8 else 0.0)
    if not error <= limit:
        limit = max(limit, _limit_of_model(loaded, prompts, reference, is_rounded=is_rounded))
    if not error <= limit:
        raise ModelError(
            f"{type(loaded.model).__name__} computes different logits with paged attention: "
            f"they differ from its own SDPA pass by {error:.2g} of their standard deviation, "
            f"and rounding explains at most {limit:.2g}; "
            "only models with plain causal or sliding-window attention can be served"
            + (", and some of them only with --kv-dtype auto" if is_int8 else "")
        )


def _limit_of_model(
    loaded: LoadedModel, prompts: Sequence[torch.Tensor], reference: Sequence[torch.Tensor], *, is_rounded: bool
) -> float:
    """Return the error that is allowed because of this model's own, see _NOISE_FACTOR and _LAST_BITS_FACTOR.

    reference: the logits of `prompts`.
    """
    with _own_attention(loaded.model):
        batched = [_logits(loaded, prompt.repeat(3, 1))[1] for prompt in prompts]
        effect = _effect_of_last_bits(loaded, prompts, reference) if is_rounded else 0.0
    noise = _difference(batched, reference, is_rounded=is_rounded)
    return max(min(_LAST_BITS_FACTOR * effect, _MAX_ROUNDED_LIMIT), _NOISE_FACTOR * noise)  # max ignores NaN here


def _own_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    return _attention_of(model, "sdpa" if model._supports_sdpa else "eager")


def _logits(loaded: LoadedModel, tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
    logits: torch.Tensor = loaded.model(input_ids=tokens.to(loaded.device), use_cache=False, **arguments).logits
    return logits.float().cpu()


def _effect_of_last_bits(
    loaded: LoadedModel, prompts: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]
) -> float:
    """Return how much the logits change if the embeddings change in their last bit, as `_difference` does.

    reference: the logits of `prompts`. The present attention is used.
    """
    generator = torch.Generator().manual_seed(0)

    def change(_module: nn.Module, _args: object, embeddings: torch.Tensor) -> torch.Tensor:
        up = torch.randint(0, 2, embeddings.shape, generator=generator).to(embeddings.device) * 2 - 1
        return embeddings * (1 + torch.finfo(embeddings.dtype).eps * up).to(embeddings.dtype)

    hook = loaded.model.get_input_embeddings().register_forward_hook(change)
    try:
        changed = [_logits(loaded, prompt[None])[0] for prompt in prompts]
    finally:
        hook.remove()
    return _difference(changed, reference, is_rounded=True)


def _paged_passes(
    loaded: LoadedModel,
    prompts: Sequence[torch.Tensor],
    block_size: int,
    kernel: PagedKernel,
    forward: Forward,
    rng: random.Random,
    windows: Windows,
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Compute prompts in packed passes, a random chunk of each at a time, in scattered blocks.

    Prompts much longer than a block go in larger chunks until the last. Every other pass computes the logits
    of the last token of each chunk, as requests ask for them, and the others those of every token. Returns
    (positions, logits) of each prompt, apart for the two kinds of passes.
    """
    layout = loaded.layout(block_size, windows)
    num_tables = layout.windows.num_tables
    tables = [np.array([0] * -(-len(p) // block_size) * num_tables, dtype=np.int64) for p in prompts]
    free = list(range(sum(len(table) for table in tables) + 1))
    rng.shuffle(free)
    for table in tables:
        table[:] = [free.pop() for _ in table]
    cache = KvCache.zeros(layout, sum(len(table) for table in tables) + 1, loaded.device, loaded.dtype)
    cache.fill_with_nan()
    masks = CausalMasks(cache.dtype, cache.device)
    done = [0] * len(prompts)
    results: list[list[list[torch.Tensor]]] = [[[] for _ in prompts] for _ in range(2)]
    at: list[list[list[int]]] = [[[] for _ in prompts] for _ in range(2)]
    only_ends = True
    while any(done[i] < len(prompt) for i, prompt in enumerate(prompts)):
        parts = [
            PreparedSequence(
                seq_id=i,
                token_ids=prompt[done[i] : end].numpy(),
                position_begin=done[i],
                kv_begin=done[i],
                block_ids=tables[i][: -(-end // block_size) * num_tables],
                sample=None,
            )
            for i, prompt in enumerate(prompts)
            if (end := done[i] + _chunk_size(rng, len(prompt) - done[i], block_size)) > done[i]
        ]
        if not parts:
            continue
        step = pack(parts, cache, masks, kernel)
        ends = np.cumsum([part.token_ids.size for part in parts])
        only_ends = not only_ends
        rows = ends - 1 if only_ends else np.arange(ends[-1])
        logits = forward(replace(step, sample_rows=torch.from_numpy(rows).to(loaded.device))).logits.float().cpu()
        for part, end in zip(parts, ends.tolist(), strict=True):
            begin = end - part.token_ids.size
            is_own = (rows >= begin) & (rows < end)
            results[only_ends][part.seq_id].append(logits[is_own])
            at[only_ends][part.seq_id].extend((rows[is_own] - begin + done[part.seq_id]).tolist())
            done[part.seq_id] += part.token_ids.size
    none = torch.empty(0, loaded.vocab_size)
    return [
        [(torch.tensor(i, dtype=torch.int64), torch.cat([*own, none])) for i, own in zip(*of_kind, strict=True)]
        for of_kind in zip(at, results, strict=True)
    ]


def _chunk_size(rng: random.Random, num_left: int, block_size: int) -> int:
    """Return how many tokens of a prompt to compute next."""
    if num_left > 4 * block_size:
        return 4 * block_size - 1
    return min(rng.choice((0, 1, 1, 3, block_size)), num_left)


def _difference(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], *, is_rounded: bool) -> float:
    """Return the root mean square difference of a position's logits, divided by their standard deviation.

    This is the worst position, or the median if numbers are rounded to fewer bits than float32, because MoE
    routing of single tokens may then differ.
    """
    errors = []
    for a, b in zip(actual, expected, strict=True):
        spread = (b - b.mean(dim=-1, keepdim=True)).pow(2).mean(dim=-1).sqrt()
        errors.append((a - b).pow(2).mean(dim=-1).sqrt() / spread)
    joined = torch.cat(errors)
    return float(joined.median() if is_rounded else joined.max())
