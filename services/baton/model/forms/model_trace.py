"""Runs a model once on a few tokens and records what each of its modules received and returned."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from baton.model.attention.attention_inputs import AttentionParams, AttentionStep, CausalMasks, Segment
from baton.model.attention.paged_attention import STEP_ARGUMENT, paged_attention
from baton.model.device.kv_tensors import KvCache
from baton.model.forms.decoder_form import FormUnknown
from baton.model.loading.model_loader import LoadedModel

NUM_TOKENS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of a module.

    hidden: its first tensor, [num_tokens, size] for modules of a layer.
    output: what it returned.
    keywords: its keyword arguments.
    """

    module: nn.Module
    hidden: torch.Tensor
    output: Any
    keywords: Mapping[str, Any]

    @property
    def first_output(self) -> torch.Tensor:
        """The output, or its first element, as [num_tokens, size]."""
        output = self.output[0] if isinstance(self.output, tuple) else self.output
        if not isinstance(output, torch.Tensor):
            raise FormUnknown(f"{type(self.module).__name__} does not return hidden states")
        return _rows(output)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Attention of one layer.

    query, out: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim].
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    params: AttentionParams


class ModelTrace:
    """Records one forward pass, see `trace_model`."""

    def __init__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        self.token_ids = token_ids
        self.positions = positions
        self.calls: list[ModuleCall] = []
        self.attention: dict[int, AttentionCall] = {}
        self.logits = torch.empty(0)

    def of(self, module: nn.Module) -> ModuleCall:
        """Return the call of a module. Raises FormUnknown if it was not called exactly once."""
        calls = [call for call in self.calls if call.module is module]
        if len(calls) != 1:
            raise FormUnknown(f"{type(module).__name__} is called {len(calls)} times in a pass")
        return calls[0]

    def of_children(self, module: nn.Module) -> list[ModuleCall]:
        """Return the calls of a module's direct children that may change something, in order."""
        children = [child for child in module.children() if not isinstance(child, (nn.Dropout, nn.Identity))]
        return [call for call in self.calls if any(call.module is child for child in children)]


@torch.inference_mode()
def trace_model(loaded: LoadedModel) -> ModelTrace:
    """Run the model's own code on a few tokens at positions from the first to the last. It is unchanged
    afterwards."""
    device, last = loaded.device, loaded.max_model_len - 1
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(loaded.vocab_size, (NUM_TOKENS,), generator=generator).to(device)
    positions = torch.tensor([0, 1, min(2, last), last // 2, last], device=device)
    trace = ModelTrace(token_ids, positions)
    cache = KvCache.zeros(replace(loaded, kv_dtype="auto").layout(NUM_TOKENS), 1, device)
    segment = Segment(token_begin=0, num_tokens=NUM_TOKENS, kv_begin=0, block_ids=np.zeros(1, dtype=np.int64))

    def kernel(
        query: torch.Tensor,
        layer: int,
        step: AttentionStep,
        scaling: float,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = paged_attention(query, layer, step, scaling, window, sinks)
        kv = step.cache.layers[layer]
        key, value = kv.keys[0].transpose(0, 1), kv.values[0].transpose(0, 1)
        params = AttentionParams(scaling, window, sinks)
        trace.attention[layer] = AttentionCall(
            query=query.transpose(0, 1), key=key, value=value, out=out, params=params
        )
        return out

    step = AttentionStep(cache, [segment], CausalMasks(cache.dtype, device), kernel)
    arguments: dict[str, Any] = {STEP_ARGUMENT: step}
    with _recorded(loaded.model, trace):
        output = loaded.model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **arguments)
    trace.logits = output.logits[0]
    return trace


@contextmanager
def _recorded(model: nn.Module, trace: ModelTrace) -> Iterator[None]:
    def record(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        values = (*inputs, keywords.get("hidden_states"), *keywords.values())
        hidden = next((value for value in values if isinstance(value, torch.Tensor)), None)
        if hidden is not None:
            trace.calls.append(ModuleCall(module=module, hidden=_rows(hidden), output=output, keywords=keywords))

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        yield


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its batch dimension of one."""
    return tensor[0] if tensor.dim() > 2 and tensor.shape[0] == 1 else tensor
