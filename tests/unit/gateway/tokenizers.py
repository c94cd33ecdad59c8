"""Tokenizers with known split patterns, and texts with their seams, for tests of encoding."""

import json
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers, processors

from baton.gateway.text.pre_tokens import GPT2, LLAMA3, QWEN2
from baton.model.loading.model_source import DEMO_DIR

DEMO = (DEMO_DIR / "tokenizer.json").read_text()
PATTERNS = {"gpt2": GPT2, "llama3": LLAMA3, "qwen2": QWEN2}
SNIPPETS = ["'s", "'RE", "'ll", "don't", " the", " return", "__init__", "12", "345", "6789", "\r\n", "\t", "  ", "--"]
SNIPPETS += ["<|im_start|>", "<|im_end|>", "<|im_start|>!", "<|", "two words", " two", "words ", " ", " ", "\n"]
OTHERS = ["na\u00efve", " \u043c\u0438\u0440,", "\u4e2d\u6587", "e\u0301", " \u0301", "\u00a0", "\u3000", "\u2028"]
OTHERS += ["\x85", "it\u2019s ", "'\u017f", "\u0663", "\U0001f468\u200d\U0001f469", "\u200b"]


def tokenizer(pattern: str = QWEN2, **changes: Any) -> Tokenizer:
    """The demo model's tokenizer with another split pattern.

    Some added tokens are a prefix of others or contain them, and every text gets special tokens around it.
    """
    result = Tokenizer.from_str(json.dumps(json.loads(DEMO) | changes))
    if pattern == GPT2:
        result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        result.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    result.add_special_tokens(["<|im_start|>!", "two words"])
    around = [("<|im_start|>", 1), ("<|im_end|>", 2)]
    result.post_processor = processors.TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=around)
    return result


RUST = {name: tokenizer(pattern) for name, pattern in PATTERNS.items()}
