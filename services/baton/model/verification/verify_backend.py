"""Prove, at every start, that paged attention computes what the model's own attention computes, or refuse to
serve the model.

Two halves. What each layer may see is compared with the mask that transformers would build for it, up to the
longest context: exact, in any dtype. Then a packed, chunked, paged pass over memory full of NaN is compared
with the model's own sdpa pass.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from baton.core.errors import BatonError, ModelError
from baton.model.attention.attention_inputs import Asked, AttentionStep, CausalMasks, Segment
from baton.model.attention.paged_attention import PAGED, STEP_ARGUMENT, PagedKernel, attend, paged_attention
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_loader import LoadedModel
from baton.model.step.forward import Forward, ModelForward
from baton.model.step.step_inputs import Part, pack

_PAGED_WITH_MASKS = "baton_paged_proof"
_NUM_PROBES = 64
_FLOAT32_LIMIT = 1e-3
_HALF_LIMIT = 0.1
_NOISE_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class _Mask:
    """Stands where transformers would put a mask: the function that says who sees whom."""

    function: Any


def _describe_mask(*, mask_function: Any, **_others: Any) -> _Mask:
    return _Mask(mask_function)


AttentionInterface.register(_PAGED_WITH_MASKS, attend)
AttentionMaskInterface.register(_PAGED_WITH_MASKS, _describe_mask)


def verify_model(loaded: LoadedModel, *, block_size_tokens: int, kernel: PagedKernel = paged_attention) -> None:
    """Both halves, for a model that runs by its own code."""
    verify_masks(loaded, block_size_tokens)
    verify_logits(loaded, block_size_tokens, kernel=kernel)


def verify_masks(loaded: LoadedModel, block_size_tokens: int) -> tuple[Asked, ...]:
    """What each layer asks of attention, which is proven to be all that its own mask says. Takes one short
    pass. Raises ModelError naming the layer that differs. The model is as it was afterwards."""
    with _told(loaded):
        return _prove_masks(loaded, block_size_tokens)


def verify_logits(
    loaded: LoadedModel,
    block_size_tokens: int,
    *,
    kernel: PagedKernel = paged_attention,
    forward: Forward | None = None,
    longest: int = 0,
) -> None:
    """The model computes what it does with sdpa: by its own code with `kernel`, or as `forward` runs it.
    Takes a few short passes, and more for one prompt of `longest` tokens. Raises ModelError saying by how
    much it differs. The model is as it was afterwards."""
    with _told(loaded):
        _prove_numbers(loaded, block_size_tokens, kernel, forward, longest)


@contextmanager
def _told(loaded: LoadedModel) -> Iterator[None]:
    """Whatever a foreign architecture does with our arguments, it cannot be served."""
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


class _WatchedStep(AttentionStep):
    """Notes what each layer was given."""

    def __init__(self, cache: KvCache, segments: Sequence[Segment], masks: CausalMasks, kernel: PagedKernel) -> None:
        super().__init__(cache, segments, masks, kernel)
        self.seen: list[tuple[int, Any, Asked]] = []

    def observe(self, layer: int, attention_mask: Any, asked: Asked) -> None:
        self.seen.append((layer, attention_mask, asked))


def _prove_masks(loaded: LoadedModel, block_size_tokens: int) -> tuple[Asked, ...]:
    """Every layer attends once, and sees exactly the tokens that its own mask would show it."""
    name = type(loaded.model).__name__
    cache = KvCache.zeros(loaded.layout(block_size_tokens), 1, loaded.device)
    num_tokens = min(4, block_size_tokens)
    segment = Segment(token_begin=0, num_tokens=num_tokens, kv_begin=0, block_ids=np.zeros(1, dtype=np.int64))
    step = _WatchedStep(cache, [segment], CausalMasks(cache.dtype, cache.device), paged_attention)
    tokens = torch.arange(num_tokens, device=loaded.device)[None]
    with _attention_of(loaded.model, _PAGED_WITH_MASKS):
        arguments: dict[str, Any] = {STEP_ARGUMENT: step}
        loaded.model(input_ids=tokens, position_ids=tokens, use_cache=False, **arguments)
    if sorted(layer for layer, _, _ in step.seen) != list(range(cache.num_layers)):
        raise ModelError(f"{name} does not attend exactly once in each of its {cache.num_layers} layers")
    proven: set[tuple[int, int | None]] = set()  # layers of a kind share one mask
    for layer, mask, asked in step.seen:
        window = asked.window
        if not isinstance(mask, _Mask):
            raise ModelError(f"layer {layer} of {name} makes its attention mask itself, so what it may see is unknown")
        if (id(mask), window) in proven:
            continue
        proven.add((id(mask), window))
        for query in _probes(loaded.max_model_len, window):
            keys = torch.arange(max(0, query - 2 * (window or query)), min(query + 2, loaded.max_model_len))
            zero = torch.zeros((), dtype=torch.int64)
            shown = torch.as_tensor(mask.function(zero, zero, torch.tensor(query), keys)).expand(keys.shape)
            paged = (keys <= query) & (keys > query - (window or query + 1))
            if not torch.equal(shown, paged):
                raise ModelError(
                    f"layer {layer} of {name} masks attention in a way that its sliding_window {window} does not tell"
                )
    return tuple(asked for _, _, asked in sorted(step.seen, key=lambda seen: seen[0]))


def _probes(max_model_len: int, window: int | None) -> list[int]:
    """Query positions to compare masks at: the ends, both sides of the window and of powers of two, some in
    between."""
    rng = random.Random(0)
    powers = [1 << bit for bit in range(max_model_len.bit_length())]
    places = [
        0,
        max_model_len - 1,
        *powers,
        *(p - 1 for p in powers),
        *(rng.randrange(max_model_len) for _ in range(_NUM_PROBES)),
    ]
    if window is not None:
        places += [window - 2, window - 1, window, window + 1, 2 * window]
    return sorted({p for p in places if 0 <= p < max_model_len})


def _prove_numbers(
    loaded: LoadedModel, block_size_tokens: int, kernel: PagedKernel, forward: Forward | None, longest: int
) -> None:
    """Prompts around block boundaries, computed together in uneven chunks and single tokens, against each
    alone with sdpa."""
    rng = random.Random(0)
    size = block_size_tokens
    lengths = [min(n, loaded.max_model_len) for n in (size + 3, 2 * size, 5, *([longest] if longest else ()))]
    prompts = [torch.tensor([rng.randrange(loaded.vocab_size) for _ in range(n)]) for n in lengths]
    with _attention_of(loaded.model, "sdpa" if loaded.model._supports_sdpa else "eager"):
        alone = [_logits(loaded, prompt[None])[0] for prompt in prompts]
        doubled = [_logits(loaded, prompt.repeat(3, 1))[1] for prompt in prompts]
    noise = _difference(doubled, alone, loaded.dtype)
    with nullcontext(forward) if forward is not None else closing(ModelForward(loaded.model)) as computing:
        ways = [
            _paged_logits(loaded, prompts, size, kernel, computing, rng, only_ends=only_ends)
            for only_ends in (False, True)
        ]
    errors = [
        _difference(
            [logits for _, logits in found],
            [each[at] for each, (at, _) in zip(alone, found, strict=True)],
            loaded.dtype,
        )
        for found in ways
    ]
    error = float(np.max(errors))  # not a number, if one is none
    limit = max(_FLOAT32_LIMIT if loaded.dtype == torch.float32 else _HALF_LIMIT, _NOISE_FACTOR * noise)
    if not error <= limit:
        raise ModelError(
            f"{type(loaded.model).__name__} computes something else with paged attention: its logits differ from its own sdpa pass by "
            f"{error:.2g} of their spread, where {limit:.2g} could be rounding; it needs more than causal or sliding-window attention"
        )


def _logits(loaded: LoadedModel, tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
    logits: torch.Tensor = loaded.model(input_ids=tokens.to(loaded.device), use_cache=False, **arguments).logits
    return logits.float().cpu()


def _paged_logits(
    loaded: LoadedModel,
    prompts: Sequence[torch.Tensor],
    size: int,
    kernel: PagedKernel,
    forward: Forward,
    rng: random.Random,
    *,
    only_ends: bool,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each prompt's (positions, logits) from one packed pass after another, a random share of each prompt at
    a time, in scattered blocks; what is longer than some blocks in larger shares until its last one. Of every
    token, or, as requests ask, of the last of each share."""
    tables = [np.array([0] * -(-len(p) // size), dtype=np.int64) for p in prompts]
    free = list(range(sum(len(table) for table in tables) + 1))
    rng.shuffle(free)
    for table in tables:
        table[:] = [free.pop() for _ in table]
    cache = KvCache.zeros(loaded.layout(size), sum(len(table) for table in tables) + 1, loaded.device)
    cache.blocks.fill_(float("nan"))
    masks = CausalMasks(cache.dtype, cache.device)
    done = [0] * len(prompts)
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    at: list[list[int]] = [[] for _ in prompts]
    while any(done[i] < len(prompt) for i, prompt in enumerate(prompts)):
        shares = [_share(rng, len(prompt) - done[i], size) for i, prompt in enumerate(prompts)]
        parts = [
            Part(
                seq_id=i,
                token_ids=prompts[i][done[i] : done[i] + share].numpy(),
                position_begin=done[i],
                kv_begin=done[i],
                block_ids=tables[i][: -(-(done[i] + share) // size)],
                sample=None,
            )
            for i, share in enumerate(shares)
            if share
        ]
        if not parts:
            continue
        step = pack(parts, cache, masks, kernel)
        ends = np.cumsum([part.token_ids.size for part in parts])
        rows = ends - 1 if only_ends else np.arange(ends[-1])
        logits = forward(replace(step, sample_rows=torch.from_numpy(rows).to(loaded.device))).logits.float().cpu()
        for part, end in zip(parts, ends.tolist(), strict=True):
            begin = end - part.token_ids.size
            is_own = (rows >= begin) & (rows < end)
            found[part.seq_id].append(logits[is_own])
            at[part.seq_id].extend((rows[is_own] - begin + done[part.seq_id]).tolist())
            done[part.seq_id] += part.token_ids.size
    return [(torch.tensor(positions), torch.cat(own)) for positions, own in zip(at, found, strict=True)]


def _share(rng: random.Random, num_left: int, size: int) -> int:
    if num_left > 4 * size:
        return 4 * size - 1
    return min(rng.choice((0, 1, 1, 3, size)), num_left)


def _difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], dtype: torch.dtype) -> float:
    """Root mean square difference of a position's logits over their spread: the worst position in float32,
    the median one in half precision, where a router near a tie may well send one token elsewhere."""
    errors = []
    for a, b in zip(ours, theirs, strict=True):
        spread = (b - b.mean(dim=-1, keepdim=True)).pow(2).mean(dim=-1).sqrt()
        errors.append((a - b).pow(2).mean(dim=-1).sqrt() / spread)
    joined = torch.cat(errors)
    return float(joined.max() if dtype == torch.float32 else joined.median())
