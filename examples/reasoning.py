"""Reasoning: prints what a model thinks apart from what it answers, while both are streamed.

    python examples/reasoning.py "Is 391 a prime number?"

This needs a model that reasons, such as Qwen/Qwen3-0.6B. `--no-thinking` asks its chat template to leave the
reasoning out. The demo model does not reason: all of its text is the answer.
"""

import argparse
import os
from collections.abc import Iterator

from openai import OpenAI

MAX_TOKENS = 2000


def stream(client: OpenAI, model: str, question: str, *, thinking: bool) -> Iterator[tuple[str, str]]:
    """Yield (`thinks` or `answers`, new text), and at the end (`tokens`, their numbers)."""
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"chat_template_kwargs": {"enable_thinking": thinking}},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            if text := getattr(choice.delta, "reasoning_content", None):  # not part of OpenAI's own API
                yield "thinks", text
            if text := choice.delta.content:
                yield "answers", text
        if chunk.usage is not None:
            reasoning = chunk.usage.completion_tokens_details.reasoning_tokens
            yield "tokens", f"{chunk.usage.completion_tokens}, {reasoning} of them reasoning"


def main() -> None:
    """Print the stream, with a heading wherever reasoning and answer alternate."""
    parser = argparse.ArgumentParser(description="Show the reasoning of a model apart from its answer.")
    parser.add_argument("question", nargs="?", default="What does os.getcwd do?")
    parser.add_argument("--no-thinking", action="store_true", help="ask for an answer without reasoning")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    last = ""
    for kind, text in stream(client, model, arguments.question, thinking=not arguments.no_thinking):
        heading = "" if kind == last else f"\n[{kind}] " if last else f"[{kind}] "
        print(heading + text, end="", flush=True)
        last = kind
    print()


if __name__ == "__main__":
    main()
