"""Golden transcripts: what models of each family write, and the message that it is."""

from tests.unit.gateway.output.transcripts import json_families, named_families, parameter_families
from tests.unit.gateway.output.transcripts.transcript import Transcript

__all__ = ["TRANSCRIPTS", "Transcript"]

TRANSCRIPTS = [
    *json_families.HERMES,
    *json_families.MISTRAL,
    *json_families.LLAMA,
    *json_families.JSON_LISTS,
    *parameter_families.QWEN3_CODER,
    *parameter_families.GLM,
    *parameter_families.GLM47,
    *parameter_families.MINIMAX,
    *parameter_families.SEED_OSS,
    *parameter_families.DEEPSEEK_V32,
    *parameter_families.DEEPSEEK_V4,
    *named_families.DEEPSEEK_V3,
    *named_families.DEEPSEEK_V31,
    *named_families.KIMI_K2,
    *named_families.GPT_OSS,
    *named_families.GEMMA4,
    *named_families.FUNCTION_GEMMA,
]
