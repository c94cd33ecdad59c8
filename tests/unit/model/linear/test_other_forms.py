"""Compares models that hold linear layers or experts in another form with transformers' own code."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from baton.core.errors import ModelError
from baton.model.backends.backend_selection import choose_backend
from baton.model.backends.native_products import ProductsForward
from baton.model.kernels.cpu.kernel_library import Kernels, load_kernels
from baton.model.linear.experts import is_experts, replace_experts
from baton.model.linear.packer import WeightPacker
from baton.model.linear.quantise import quantise
from baton.model.linear.weights import FloatWeight, Weight
from baton.model.loading.checkpoint_weights import LoadOptions, open_by_module
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.loading.quantised.module_tensors import Tensors
from baton.model.loading.safetensors_source import SafetensorsSource
from baton.model.step.forward import ModelForward
from tests.model_families import OTHER_FORMS, save_random
from tests.unit.model.linear.test_coded_experts import FORMATS, code, distances
from tests.unit.model.test_decoder_backends import LENGTH, Prompts, answers, transformers_logits
from tests.unit.model.test_text_part import save_muse_spark


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return load_kernels(1)


def load(path: Path, kernels: Kernels, *, dtype: str = "float32", weights: str = "auto") -> LoadedModel:
    """Load a model as a worker does on a CPU where the native products are the faster ones."""
    return load_model(
        path,
        dtype=dtype,
        device="cpu",
        weights=weights,
        packer_for=lambda own: WeightPacker(kernels, dtype=own, native_is_faster=True),
    )


def matrices(loaded: LoadedModel) -> set[str]:
    """Return the names of the parameters that are still matrices, except embeddings and routers."""
    modules = dict(loaded.model.named_modules())
    names = [name for name, parameter in loaded.model.named_parameters() if parameter.dim() > 1]
    embeddings = {name for name in names if isinstance(modules[name.rpartition(".")[0]], nn.Embedding)}
    return {name for name in names if "router" not in name} - embeddings


@pytest.mark.parametrize("name", list(OTHER_FORMS))
def test_packed_and_plain_weights_give_transformers_logits_in_float32(
    name: str, tmp_path: Path, kernels: Kernels
) -> None:
    path = save_random(OTHER_FORMS[name](), tmp_path / "model")
    plain, packed = load_model(path, dtype="float32", device="cpu"), load(path, kernels)
    assert not matrices(packed)
    right = transformers_logits(plain, LENGTH)
    with closing(ModelForward(plain.model)) as own:
        assert (answers(plain, own, LENGTH) - right).abs().max() < 2e-4
    with closing(ProductsForward(packed.model, kernels)) as products:
        assert (answers(packed, products, LENGTH) - right).abs().max() < 2e-4


@pytest.mark.parametrize("name", list(OTHER_FORMS))
def test_weights_that_are_read_one_by_one_are_those_that_transformers_reads(name: str, tmp_path: Path) -> None:
    """As those of a checkpoint are that has some of its layers quantised."""
    path = save_random(OTHER_FORMS[name](), tmp_path / "model")
    plain = load_model(path, dtype="float32", device="cpu").model
    options = LoadOptions(dtype=torch.float32, device=torch.device("cpu"), weights="auto")
    with open_by_module(path, type(plain), plain.config, options) as pending:
        model, _ = pending.load()
    found, expected = (dict(each.named_parameters()) for each in (model, plain))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize(("weights", "limit"), [("int8", 0.1), ("int4", 0.5)])
@pytest.mark.parametrize("name", list(OTHER_FORMS))
def test_all_weights_are_quantised_and_run_natively(
    name: str, weights: str, limit: float, tmp_path: Path, kernels: Kernels
) -> None:
    """The choice of the backend includes its verification in bfloat16."""
    path = save_random(OTHER_FORMS[name](), tmp_path / "model")
    right = transformers_logits(load_model(path, dtype="float32", device="cpu"), LENGTH)
    loaded = load(path, kernels, dtype="bfloat16", weights=weights)
    assert not matrices(loaded)
    backend = choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=16)
    assert backend.name == "native products"
    assert distances(answers(loaded, backend.forward, LENGTH), right).median() < limit


def test_names_of_the_base_model_are_read(tmp_path: Path, kernels: Kernels) -> None:
    """GPT-2's published checkpoints lack the prefix of the base model."""
    path = save_random(OTHER_FORMS["gpt2"](), tmp_path / "model")
    expected = load(path, kernels, weights="int8")
    tensors = load_file(path / "model.safetensors")
    stored = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert not stored.keys() & tensors.keys()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    found = load(path, kernels, weights="int8")
    with closing(ModelForward(found.model)) as own, closing(ModelForward(expected.model)) as right:
        assert torch.equal(answers(found, own, LENGTH), answers(expected, right, LENGTH))


def test_experts_may_have_a_norm_of_their_outputs(tmp_path: Path, kernels: Kernels) -> None:
    """In Muse Spark. Its projections before and after the experts are no routers."""
    whole: Any = save_muse_spark(tmp_path / "model")
    loaded, coded = load(tmp_path / "model", kernels), load(tmp_path / "model", kernels, weights="int8")
    for each in (loaded, coded):
        assert {name.split(".", 3)[3] for name in matrices(each)} == {"mlp.gate.weight"}
    with torch.inference_mode():
        right = whole(input_ids=torch.from_numpy(Prompts(loaded, LENGTH).token_ids), use_cache=False).logits
    with closing(ProductsForward(loaded.model, kernels)) as products:
        assert (answers(loaded, products, LENGTH) - right).abs().max() < 2e-4


def test_coded_experts_have_the_norm_of_their_outputs(tmp_path: Path) -> None:
    save_muse_spark(tmp_path / "model")
    model = load_model(tmp_path / "model", dtype="float32", device="cpu").model
    experts: Any = next(module for module in model.modules() if is_experts(module))
    coded = code(experts, FORMATS["int8"], apart=False)
    tokens, chosen = torch.randn(9, 32), torch.rand(9, 4).topk(2)
    right = experts(tokens, chosen.indices, chosen.values)
    replace_experts(experts, coded)
    assert (experts(tokens, chosen.indices, chosen.values) - right).abs().max() < 1e-5 * right.abs().max()


class OneWeight:
    """A layout in which each module has this weight."""

    description = "one weight"

    def __init__(self, weight: Weight) -> None:
        self._weight = weight

    def weight(self, module: str, tensors: Tensors) -> Weight:
        return self._weight


def test_only_plain_weights_are_transposed(tmp_path: Path, kernels: Kernels) -> None:
    """Codes of GPTQ are by output also where the plain weight is by input."""
    path, name = save_random(OTHER_FORMS["gpt2"](), tmp_path / "model"), "transformer.h.0.attn.c_proj"
    model, values = load(path, kernels).model, torch.randn(64, 64)

    def read(weight: Weight) -> Weight | None:
        with SafetensorsSource(path, model, OneWeight(weight), transposed={name}) as source:
            return source.weight(name)

    plain, coded = read(FloatWeight(values)), quantise(values, 8, 32)
    assert isinstance(plain, FloatWeight)
    assert torch.equal(plain.values, values.T)
    assert read(coded) is coded
    with pytest.raises(ModelError, match=r"c_proj has a transposed weight with scales"):
        read(FloatWeight(values, torch.ones(1, 1), (64, 64)))
