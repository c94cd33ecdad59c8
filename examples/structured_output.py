"""Structured output: every finished answer is JSON that a pydantic model accepts.

    python examples/structured_output.py "What does os.getcwd do?"

The schema of the pydantic model becomes a grammar that forbids all other tokens. The answer is therefore always
valid, but only a capable model makes it true: the demo model writes words that fit the schema and mean nothing.
"""

import argparse
import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

MAX_TOKENS = 300


class FunctionCard(BaseModel):
    """A function of the standard library. Each bound keeps a small model from writing without end."""

    model_config = ConfigDict(extra="forbid")

    module: Literal["os", "json", "math"]
    summary: str = Field(max_length=60)
    num_arguments: int = Field(ge=0, le=9)
    may_fail: bool


def extract(client: OpenAI, model: str, question: str) -> FunctionCard:
    """Return the answer as an object. Raises LengthFinishReasonError if `MAX_TOKENS` cut it off."""
    completion = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": question}],
        response_format=FunctionCard,
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    card = completion.choices[0].message.parsed
    assert card is not None  # only a refusal has none
    return card


def main() -> None:
    """Print the fields of the answer."""
    parser = argparse.ArgumentParser(description="Answer a question as an object of a pydantic model.")
    parser.add_argument("question", nargs="?", default="What does os.getcwd do?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    for name, value in extract(client, model, arguments.question).model_dump().items():
        print(f"{name:<14} {value!r}")


if __name__ == "__main__":
    main()
