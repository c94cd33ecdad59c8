"""Loads GGUF files that llama.cpp's own library writes, for each architecture, and compares logits."""

import asyncio
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from baton.core.errors import ModelError
from baton.gateway.text.tokenizer import HfTokenizer
from baton.model.attention.paged_attention import PAGED
from baton.model.backends.backend_selection import choose_backend
from baton.model.linear.embedding import WeightEmbedding
from baton.model.linear.linear import Linear
from baton.model.loading.gguf import gguf_directory
from baton.model.loading.gguf.gguf_directory import write_gguf_directory
from baton.model.loading.gguf.gguf_file import GgufFile
from baton.model.loading.gguf.gguf_source import GgufSource
from baton.model.loading.model_loader import load_model
from baton.model.loading.model_source import DEMO_DIR, resolve_model
from tests.scale import sized
from tests.unit.model.loading.gguf_models import demo_tokenizer_metadata, random_state, write_gguf
from tests.unit.model.loading.quantised_models import distance, logits, paged_logits, reference_logits, tokens

pytest.importorskip("gguf", reason="the gguf library is not installed")

ROPE = {"rope_type": "default", "rope_theta": 20_000.0}
"""Not the defaults of transformers, so that a frequency that is not read changes the logits."""
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
"""That of Gemma's layers with windows, which is not in a file."""
_SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 20_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
OLMO3_YARN = {
    "rope_type": "yarn",
    "rope_theta": 20_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.3,
}
Extra = Callable[[Any], object]


def sizes(**changes: Any) -> dict[str, Any]:
    """Return the sizes of a small model. Configurations change rotary parameters, so each gets a copy."""
    return copy.deepcopy({**_SIZES, "rope_parameters": ROPE, **changes})


def no_more(writer: Any) -> None:
    """Add no more metadata."""


def moe(writer: Any) -> None:
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(256)


def mixtral(writer: Any) -> None:
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)


def granite(writer: Any) -> None:
    writer.add_attention_scale(0.2)
    writer.add_embedding_scale(2.0)
    writer.add_residual_scale(0.5)
    writer.add_logit_scale(3.0)


def ministral(writer: Any) -> None:
    import gguf

    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_rope_scaling_yarn_beta_fast(32.0)
    writer.add_rope_scaling_yarn_beta_slow(1.0)
    writer.add_rope_scaling_yarn_log_mul(1.0)
    writer.add_attn_temperature_scale(0.1)


def olmo3(writer: Any) -> None:
    import gguf

    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_rope_scaling_yarn_attn_factor(1.3)
    writer.add_sliding_window(8)
    writer.add_sliding_window_pattern([True, False])


MODELS: dict[str, tuple[str, Callable[[], PreTrainedConfig], Extra]] = {
    "llama": ("llama", lambda: LlamaConfig(**sizes(), rms_norm_eps=1e-5), no_more),
    "qwen2": ("qwen2", lambda: Qwen2Config(**sizes()), no_more),
    "qwen3": ("qwen3", lambda: Qwen3Config(**sizes(), head_dim=128, tie_word_embeddings=True), no_more),
    "qwen3moe": (
        "qwen3moe",
        lambda: Qwen3MoeConfig(
            **sizes(), head_dim=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True
        ),
        moe,
    ),
    "mixtral": (
        "llama",
        lambda: MixtralConfig(**sizes(), head_dim=64, num_local_experts=4, num_experts_per_tok=2),
        mixtral,
    ),
    "gemma3": (
        "gemma3",
        lambda: Gemma3TextConfig(
            **sizes(rope_parameters={"full_attention": ROPE, "sliding_attention": LOCAL_ROPE}),
            head_dim=64,
            sliding_window=8,
            query_pre_attn_scalar=64,
            layer_types=["sliding_attention", "full_attention"],
        ),
        lambda writer: (writer.add_sliding_window(8), writer.add_sliding_window_pattern(2)),
    ),
    "ministral 3": ("mistral3", lambda: Ministral3Config(**sizes(rope_parameters=YARN), head_dim=64), ministral),
    "phi3": ("phi3", lambda: Phi3Config(**sizes()), no_more),
    "olmo2": ("olmo2", lambda: Olmo2Config(**sizes()), no_more),
    "olmo3": (
        "olmo2",
        lambda: Olmo3Config(
            **sizes(rope_parameters={"full_attention": OLMO3_YARN, "sliding_attention": ROPE}),
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
        olmo3,
    ),
    "granite": (
        "granite",
        lambda: GraniteConfig(
            **sizes(),
            attention_multiplier=0.2,
            embedding_multiplier=2.0,
            residual_multiplier=0.5,
            logits_scaling=3.0,
        ),
        granite,
    ),
    "smollm3": ("smollm3", lambda: SmolLM3Config(**sizes(num_hidden_layers=4)), no_more),
}
MIXED = (12, 14, 8, 2, 13)
"""Q4_K, Q6_K, Q8_0, Q4_0 and Q5_K."""


def mixed(name: str) -> int:
    """Return a type that depends on a tensor's name. Routers are never quantised."""
    return 0 if "gate_inp" in name else MIXED[sum(map(ord, name)) % len(MIXED)]


def convert(path: Path) -> Path:
    directory = path.with_suffix("")
    directory.mkdir()
    write_gguf_directory(path, directory)
    return directory


@pytest.mark.parametrize("name", MODELS)
def test_model_has_the_logits_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    """The configuration comes from the file's metadata alone, the reference's from transformers."""
    architecture, make_config, extra = MODELS[name]
    config, path = make_config(), tmp_path / "m.gguf"
    means = write_gguf(path, architecture, config, random_state(config), pick=mixed, extra=extra)  # type: ignore[arg-type]
    loaded = load_model(convert(path), dtype="float32", device="cpu")
    assert type(loaded.config) is type(config)
    assert distance(logits(loaded.model, tokens(config)), reference_logits(config, means)) < 1e-5
    assert not [module for module in loaded.model.modules() if type(module) is torch.nn.Linear]


@pytest.mark.parametrize("name", sized(["qwen3moe"], ["llama", "mixtral", "qwen3moe", "gemma3", "phi3"]))
def test_native_decoder_runs_layers_of_mixed_types(name: str, tmp_path: Path) -> None:
    """Projections of one layer, joined ones too, have different types. The choice includes verification."""
    architecture, make_config, extra = MODELS[name]
    config, path = make_config(), tmp_path / "m.gguf"
    write_gguf(path, architecture, config, random_state(config), pick=mixed, extra=extra)  # type: ignore[arg-type]
    require_native_decoder(path, config)


def require_native_decoder(path: Path, config: PreTrainedConfig) -> None:
    """Load a GGUF file of random weights, and compare the native decoder's logits with the model's own."""
    loaded = load_model(convert(path), dtype="float32", device="cpu", max_model_len=128)
    right = logits(loaded.model, tokens(config))
    loaded.model.set_attn_implementation(PAGED)
    backend = choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=16)
    assert backend.name == "native decoder"
    found = paged_logits(loaded, tokens(config), backend.forward)
    assert 1e-4 < float((found - right).std() / right.std()) < 0.05


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Qwen3 in Q4_K and Q6_K with the demo's tokenizer and a chat template, once."""
    path = tmp_path_factory.mktemp("qwen3") / "m.gguf"
    config = Qwen3Config(**sizes(), head_dim=64, tie_word_embeddings=True)

    def extra(writer: Any) -> None:
        writer.add_chat_template(
            [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "{{ bos_token }}d"}]
        )
        writer.add_eos_token_id(2)
        writer.add_bos_token_id(3)

    def pick(name: str) -> int:
        return 12 if "ffn" in name else 14

    write_gguf(path, "qwen3", config, random_state(config), pick=pick, extra=extra)
    return path


@pytest.fixture(scope="module")
def qwen3_directory(qwen3: Path) -> Path:
    """Convert `qwen3`, once; tests must not write to it."""
    return convert(qwen3)


def test_files_of_the_directory(qwen3_directory: Path) -> None:
    directory = qwen3_directory
    content = json.loads((directory / "tokenizer_config.json").read_text())
    assert (content["bos_token"], content["add_bos_token"]) == (content["bos_token"], False)
    assert (directory / "chat_template.jinja").read_text() == "{{ bos_token }}d"
    assert (directory / "additional_chat_templates" / "tool_use.jinja").read_text() == "t"
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"][0] == 2
    config = AutoConfig.from_pretrained(directory)
    assert (config.dtype, config.vocab_size, config.tie_word_embeddings) == (torch.bfloat16, 4096, True)


def test_gateway_and_worker_read_the_same_tokenizer(qwen3_directory: Path) -> None:
    """It gives the ids of the tokenizer from which the file was made."""
    tokenizer, demo = HfTokenizer(qwen3_directory), HfTokenizer(DEMO_DIR)
    try:
        loaded = load_model(tokenizer.model_dir, device="cpu")
        assert loaded.tokenizer_fingerprint == tokenizer.fingerprint
        assert loaded.eos_token_ids[0] == 2
        special = next(token.text for token in demo.added_tokens.values() if token.hidden)
        for text in ("def f(x):\n    return x + 12  # naïve", f"Hello  world's 日本語 {special} x\r\n", "   ", ""):
            ids = asyncio.run(tokenizer.encode(text))
            assert list(ids) == list(asyncio.run(demo.encode(text)))
            assert tokenizer.decode(ids) == text
    finally:
        tokenizer.close()
        demo.close()


def test_weights_stay_coded_and_the_backend_is_verified(qwen3_directory: Path) -> None:
    loaded = load_model(qwen3_directory, device="cpu", max_model_len=128)
    base = loaded.model.base_model
    assert isinstance(base.embed_tokens, WeightEmbedding)
    assert isinstance(loaded.model.lm_head, Linear)
    assert loaded.model.lm_head.weight is base.embed_tokens.weight  # one copy
    assert loaded.dtype == torch.bfloat16
    assert {parameter.dim() for parameter in loaded.model.parameters()} == {1}
    assert choose_backend(loaded, kernels="torch", num_threads=1, block_size_tokens=16).name == "torch"


def test_quantised_files_are_not_quantised_again(qwen3_directory: Path) -> None:
    with pytest.raises(ModelError, match=r"is quantised already \(GGUF .*use --weights auto"):
        load_model(qwen3_directory, device="cpu", weights="int8")


def test_fingerprint_covers_the_bytes_of_the_file(qwen3: Path, qwen3_directory: Path, tmp_path: Path) -> None:
    first = load_model(qwen3_directory, device="cpu").model_fingerprint
    changed = bytearray(qwen3.read_bytes())
    changed[-5] ^= 1
    (tmp_path / "other.gguf").write_bytes(changed)
    assert load_model(convert(tmp_path / "other.gguf"), device="cpu").model_fingerprint != first


def test_frequencies_are_divided_by_the_factors_of_the_file(tmp_path: Path) -> None:
    """A file of Llama 3 has the result of its rotary scaling, and not its parameters."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    plain = LlamaConfig(**sizes())
    scaled = LlamaConfig(**sizes(rope_parameters=scaling))
    inverse = [type_of_rotary(config)(config=config).inv_freq for config in (plain, scaled)]
    path = tmp_path / "m.gguf"

    def factors(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", (inverse[0] / inverse[1]).numpy())

    means = write_gguf(path, "llama", plain, random_state(plain), extra=factors)
    loaded = load_model(convert(path), dtype="float32", device="cpu")
    assert distance(logits(loaded.model, tokens(scaled)), reference_logits(scaled, means)) < 1e-4
    assert distance(logits(loaded.model, tokens(plain)), reference_logits(plain, means)) > 1e-2


def type_of_rotary(config: LlamaConfig) -> Any:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding


def test_rare_types_are_named_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The embedding of the file is in IQ3_XXS, which becomes bfloat16."""
    config = LlamaConfig(**sizes())
    path = tmp_path / "m.gguf"
    means = write_gguf(path, "llama", config, random_state(config), pick=lambda name: 18 if "token_embd" in name else 8)
    loaded = load_model(convert(path), dtype="float32", device="cpu")
    (said,) = (record.msg for record in caplog.records if "gguf_tensors_dequantised" in str(record.msg))
    assert "IQ3_XXS" in str(said)
    embedding = means["model.embed_tokens.weight"].bfloat16().float()
    assert torch.equal(loaded.model.base_model.embed_tokens.weight, embedding)


def test_weights_of_16_bits_are_as_they_are(tmp_path: Path) -> None:
    config = Qwen3Config(**sizes(), head_dim=64)
    path = tmp_path / "m.gguf"
    means = write_gguf(path, "qwen3", config, random_state(config), pick=lambda name: 30 if "ffn" in name else 1)
    loaded = load_model(convert(path), dtype="float32", device="cpu")
    assert loaded.weight_format == "GGUF float16, bfloat16, float32"
    assert distance(logits(loaded.model, tokens(config)), reference_logits(config, means)) < 1e-5


def test_old_files_of_mixtral_have_a_tensor_for_each_expert(tmp_path: Path) -> None:
    architecture, make_config, extra = MODELS["mixtral"]
    config, path = make_config(), tmp_path / "m.gguf"
    state = random_state(config)  # type: ignore[arg-type]
    means = write_gguf(path, architecture, config, state, pick=mixed, extra=extra, separate_experts=True)
    loaded = load_model(convert(path), dtype="float32", device="cpu")
    assert distance(logits(loaded.model, tokens(config)), reference_logits(config, means)) < 1e-5
    assert GgufSource(GgufFile(path), config).is_coded("model.layers.0.mlp.experts")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    architecture, make_config, _ = MODELS["mixtral"]
    config, path = make_config(), tmp_path / "m.gguf"

    def five_experts(writer: Any) -> None:
        writer.add_expert_count(5)
        writer.add_expert_used_count(2)

    state = random_state(config)  # type: ignore[arg-type]
    write_gguf(path, architecture, config, state, extra=five_experts, separate_experts=True)
    with pytest.raises(ModelError, match=r"lacks expert 4 of 5 of model\.layers\.0\.mlp\.experts\.gate_proj"):
        load_model(convert(path), device="cpu")


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "blk.1.attn_output.bias"])
def test_tensors_without_a_place_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """llama.cpp uses them, so without them the model would compute something else."""
    config, path = LlamaConfig(**sizes()), tmp_path / "m.gguf"

    def extra(writer: Any) -> None:
        writer.add_tensor(name, torch.zeros(256).numpy())

    write_gguf(path, "llama", config, random_state(config), extra=extra)
    with pytest.raises(ModelError, match=f"1 of its tensors have no place in this model, the first is {name}"):
        load_model(convert(path), device="cpu")


@pytest.mark.parametrize(("model", "pre"), [("gpt2", "no-such-split"), ("bert", "qwen2")])
def test_unknown_tokenizers_are_refused_by_name(tmp_path: Path, model: str, pre: str) -> None:
    config = LlamaConfig(**sizes())

    def tokenizer(writer: Any) -> None:
        demo_tokenizer_metadata(writer, model=model, pre=pre)

    write_gguf(tmp_path / "m.gguf", "llama", config, random_state(config), tokenizer=tokenizer)
    with pytest.raises(ModelError, match=f"{pre if model == 'gpt2' else model}"):
        convert(tmp_path / "m.gguf")


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    """Texts begin with BOS and a space, unless the file says that they do not."""
    config = LlamaConfig(**sizes(vocab_size=300))
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]

    def tokenizer(writer: Any, **flags: bool) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(texts)
        writer.add_token_scores([0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 5)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for name, value in flags.items():
            getattr(writer, f"add_{name}")(value)

    for number, (flags, expected) in enumerate(
        [
            ({}, [1, texts.index("▁ab"), texts.index("b")]),
            ({"add_bos_token": False}, [texts.index("▁ab"), texts.index("b")]),
            ({"add_space_prefix": False, "add_eos_token": True}, [1, texts.index("ab"), texts.index("b"), 2]),
        ]
    ):
        path = tmp_path / f"{number}.gguf"
        write_gguf(
            path,
            "llama",
            config,
            random_state(config),
            tokenizer=lambda writer, flags=flags: tokenizer(writer, **flags),  # type: ignore[misc]
        )
        found = HfTokenizer(convert(path))
        assert list(asyncio.run(found.encode("abb"))) == expected
        for text in ("abb", "b ab", *([" ab"] if "add_space_prefix" in flags else [])):
            ids = asyncio.run(found.encode(text))
            assert found.decode(ids, skip_special_tokens=True) == text
        assert list(asyncio.run(found.encode("é", add_special_tokens=False)))[-2:] == [3 + 0xC3, 3 + 0xA9]
        found.close()


@pytest.mark.slow
def test_model_is_resolved_in_a_process_of_its_own(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = resolve_model(str(qwen3))
    assert (directory / "model.gguf").resolve() == qwen3.resolve()
    assert resolve_model(str(directory)) == directory


def test_the_process_says_what_is_wrong_with_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUFx")
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "bad.gguf"), str(tmp_path)])
    gguf_directory.main()
    assert "bad.gguf is not a usable GGUF file" in json.loads(capsys.readouterr().out)["problem"]
