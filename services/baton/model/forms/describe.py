"""Finds the form of a model: which norms, projections, rotary embeddings and multipliers its layers have.

The model's own code runs once on a few tokens, with every module observed. Attribute names that transformers'
models share say what a module may be; the observed numbers decide whether it is. Whatever does not fit raises
FormUnknown with the part that differs, and so does a parameter that the form does not contain.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from baton.model.attention.attention_inputs import AttentionParams
from baton.model.forms.attention_form import describe_attention
from baton.model.forms.decoder_form import (
    DecoderForm,
    ExpertsForm,
    FormUnknown,
    LayerForm,
    QueryScaleForm,
)
from baton.model.forms.mlp_form import describe_mlp
from baton.model.forms.model_trace import ModelTrace, ModuleCall, trace_model
from baton.model.forms.recognise import as_rms_norm, is_linear, near, rotary_candidates
from baton.model.kernels.layer_values import RmsNorm
from baton.model.linear.pack_model import holds_weight
from baton.model.loading.model_loader import LoadedModel


@torch.inference_mode()
def describe_decoder(loaded: LoadedModel, attention_params: Sequence[AttentionParams]) -> DecoderForm:
    """Return the form of a model. Raises FormUnknown if it is none that backends run.

    `attention_params`: one per layer, from `verify_masks`. Runs the model once; it is unchanged afterwards.
    """
    model: Any = loaded.model
    base: Any = model.base_model
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != len(attention_params):
        raise FormUnknown(f"{type(base).__name__} has no list of {len(attention_params)} layers")
    trace = trace_model(loaded)
    rotaries = [form for child in base.children() for form in rotary_candidates(child)]
    query_scale = _query_scale(loaded.config)
    found = []
    for index, (layer, params) in enumerate(zip(layers, attention_params, strict=True)):
        try:
            found.append(_describe_layer(trace, layer, index, params, rotaries, query_scale, loaded.config))
        except FormUnknown as error:
            raise FormUnknown(f"layer {index} of {type(model).__name__}: {error}") from error
    embedding, multiplier = _embedding(trace, model, layers[0])
    head, logits_multiplier, softcap = _head(trace, model)
    form = DecoderForm(
        dtype=loaded.dtype,
        vocab_size=loaded.vocab_size,
        embedding=embedding,
        embedding_multiplier=multiplier,
        layers=tuple(found),
        rotaries=tuple(rotaries),
        query_scale=query_scale,
        final_norm=_final_norm(trace, base, layers[-1], head),
        head=head,
        logits_multiplier=logits_multiplier,
        softcap=softcap,
    )
    _require_all_parameters(model, form, trace)
    return form


def _describe_layer(
    trace: ModelTrace,
    layer: nn.Module,
    index: int,
    params: AttentionParams,
    rotaries: Sequence[Any],
    query_scale: QueryScaleForm | None,
    config: Any,
) -> LayerForm:
    calls = trace.of_children(layer)
    whole = trace.of(layer)
    multiplier = float(getattr(layer, "residual_multiplier", 1.0))
    before_attention, attention, after_attention, hidden = _branch(calls, whole.hidden, whole, multiplier)
    before_mlp, mlp, after_mlp, hidden = _branch(calls, hidden, whole, multiplier)
    if calls:
        raise FormUnknown(f"it has a third part, {type(calls[0].module).__name__}")
    if not near(whole.first_output, hidden):
        raise FormUnknown("its output is not the sum of its parts")
    attention_form = describe_attention(trace, attention, index, rotaries, query_scale)
    return LayerForm(
        before_attention=before_attention,
        qkv=attention_form.qkv,
        head_norms=attention_form.head_norms,
        rotary=attention_form.rotary,
        attention_params=params,
        o=attention_form.o,
        after_attention=after_attention,
        before_mlp=before_mlp,
        mlp=describe_mlp(trace, mlp, config),
        after_mlp=after_mlp,
        multiplier=multiplier,
    )


def _branch(
    calls: list[ModuleCall], hidden: torch.Tensor, whole: ModuleCall, multiplier: float
) -> tuple[RmsNorm | None, ModuleCall, RmsNorm | None, torch.Tensor]:
    """Take the calls of one branch from the list: perhaps a norm, attention or MLP, perhaps a norm.

    Returns (norm before, the branch itself, norm after, hidden states after it was added).
    """
    before, x = _take_norm(calls, hidden)
    if not calls:
        raise FormUnknown("it has only one part beside norms")
    branch = calls.pop(0)
    if not torch.equal(branch.hidden, x):
        raise FormUnknown(f"{type(branch.module).__name__} does not read the hidden states or their norm")
    after, added = _take_norm(calls, branch.first_output)
    expected = hidden.float() + multiplier * added.float()
    following = calls[0].hidden if calls else whole.first_output
    if not near(following, expected):
        raise FormUnknown(f"the output of {type(branch.module).__name__} is not added to the hidden states")
    return before, branch, after, following


def _take_norm(calls: list[ModuleCall], x: torch.Tensor) -> tuple[RmsNorm | None, torch.Tensor]:
    """Return (norm, its output) if the next call is a norm of `x`, and remove the call; else (None, x)."""
    if not calls or not torch.equal(calls[0].hidden, x):
        return None, x
    norm = as_rms_norm(calls[0].module)
    return (None, x) if norm is None else (norm, calls.pop(0).first_output)


def _query_scale(config: Any) -> QueryScaleForm | None:
    """Return the scale of Ministral 3's and Llama 4's queries, if the configuration has one."""
    parameters = getattr(config, "rope_parameters", None) or {}
    beta, period = parameters.get("llama_4_scaling_beta"), parameters.get("original_max_position_embeddings")
    return None if beta is None or period is None else QueryScaleForm(float(beta), int(period))


def _embedding(trace: ModelTrace, model: Any, first_layer: nn.Module) -> tuple[nn.Module, float]:
    """Return (module that embeds token ids, multiplier of its result)."""
    embedding: nn.Module = model.get_input_embeddings()
    hidden, rows = trace.of(first_layer).hidden, trace.of(embedding).first_output
    for multiplier in (1.0, float(getattr(model.config, "embedding_multiplier", 1.0) or 1.0)):
        if torch.equal(hidden, rows * multiplier):
            return embedding, multiplier
    raise FormUnknown("its first layer does not read the embedding, or a multiple of it")


def _final_norm(trace: ModelTrace, base: Any, last_layer: nn.Module, head: nn.Module) -> RmsNorm:
    hidden, wanted = trace.of(last_layer).first_output, trace.of(head).hidden
    for call in trace.of_children(base):
        norm = as_rms_norm(call.module)
        if norm is not None and torch.equal(call.hidden, hidden) and torch.equal(call.first_output, wanted):
            return norm
    raise FormUnknown("its head does not read an RMS norm of the last layer")


def _head(trace: ModelTrace, model: Any) -> tuple[nn.Module, float, float | None]:
    """Return (module, multiplier of its outputs, soft cap).

    What the configuration names is tried first: on small logits a soft cap changes less than rounding does.
    """
    head, config = model.get_output_embeddings(), model.config
    if not is_linear(head):
        raise FormUnknown(f"its output layer is a {type(head).__name__}")
    outputs = trace.of(head).first_output.float()
    cap = getattr(config, "final_logit_softcapping", None)
    divisor, factor = getattr(config, "logits_scaling", None) or 1.0, getattr(config, "logit_scale", None) or 1.0
    for softcap in (None,) if cap is None else (float(cap), None):
        for multiplier in dict.fromkeys((1.0 / float(divisor), float(factor), 1.0)):
            logits = outputs * multiplier
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            if near(trace.logits, logits):
                return head, multiplier, softcap
    raise FormUnknown("its logits are not those of its output layer")


def _require_all_parameters(model: nn.Module, form: DecoderForm, trace: ModelTrace) -> None:
    """Raise FormUnknown if the model has a parameter or a weight that the form does not contain."""
    modules: list[nn.Module] = [call.module for call in trace.calls if as_rms_norm(call.module) is not None]
    modules += [form.embedding, *form.linear_modules()]
    products = {id(module) for module in modules}
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    for layer in form.layers:
        known.add(id(layer.attention_params.sinks))
        if isinstance(layer.mlp, ExpertsForm):
            known |= {id(layer.mlp.router), id(layer.mlp.router_bias)}
            known |= {id(parameter) for parameter in layer.mlp.experts.parameters()}
            products |= {id(module) for module in layer.mlp.experts.modules()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise FormUnknown(f"{type(model).__name__} has the parameter {name}, which is not part of a known form")
    for name, module in model.named_modules():
        if holds_weight(module) and id(module) not in products:
            raise FormUnknown(f"{type(model).__name__} has the product {name}, which is not part of a known form")
