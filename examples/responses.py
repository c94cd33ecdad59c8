"""OpenAI's responses API without state on the server: each turn sends the items of all earlier ones.

    python examples/responses.py "What does os.getcwd do?" "What does os.chdir do?"

`store` and `previous_response_id` are refused, because the server keeps nothing. Sending the items again costs
little: their KV is in the prefix cache.
"""

import argparse
import os

from openai import OpenAI

QUESTIONS = ("What does os.getcwd do?", "What does os.chdir do?")
MAX_TOKENS = 100


def ask(client: OpenAI, model: str, items: list[object], question: str) -> int:
    """Print the answer as it is streamed, add both to `items`, and return the number of cached prompt tokens."""
    items.append({"role": "user", "content": question})
    with client.responses.stream(model=model, input=items, temperature=0, max_output_tokens=MAX_TOKENS) as events:
        for event in events:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
        response = event.response  # of the last event, also if the answer was cut off
    print()
    items.extend(response.output)
    return response.usage.input_tokens_details.cached_tokens


def main() -> None:
    """Ask the questions of the command line in one conversation."""
    parser = argparse.ArgumentParser(description="Hold a conversation over the responses API.")
    parser.add_argument("questions", nargs="*", help="default: two questions about os")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    items: list[object] = []
    for question in arguments.questions or QUESTIONS:
        print(f"> {question}")
        num_cached = ask(client, model, items, question)
        print(f"  {num_cached} prompt tokens were cached")


if __name__ == "__main__":
    main()
