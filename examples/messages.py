"""Anthropic's messages API: counts tokens, streams an answer, and lets the model call a tool.

    python examples/messages.py "What does os.getcwd do?"

The client is the `anthropic` package. Its base URL has no `/v1`.
"""

import argparse
import os
import pydoc

from anthropic import Anthropic

MAX_TOKENS = 300
TOOL = {
    "name": "python_help",
    "description": "Returns the documentation of a Python name.",
    "input_schema": {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": ["json.dumps", "math.sqrt", "os.getcwd"]}},
        "required": ["name"],
        "additionalProperties": False,
    },
}


def call_once(client: Anthropic, model: str, question: str) -> None:
    """Force one call of the tool, send its result back, and stream the answer."""
    messages = [{"role": "user", "content": question}]
    choice = {"type": "tool", "name": TOOL["name"], "disable_parallel_tool_use": True}
    message = client.messages.create(
        model=model, max_tokens=MAX_TOKENS, messages=messages, tools=[TOOL], tool_choice=choice
    )
    (call,) = (block for block in message.content if block.type == "tool_use")
    print(f"call    {call.name}({call.input})")
    result = pydoc.plain(pydoc.render_doc(call.input["name"]))[:500]
    messages.append({"role": "assistant", "content": message.content})
    messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": result}]})
    options = {"model": model, "messages": messages, "tools": [TOOL], "tool_choice": {"type": "none"}}
    print("answer  ", end="")
    with client.messages.stream(max_tokens=MAX_TOKENS, **options) as events:
        for text in events.text_stream:
            print(text, end="", flush=True)
        stop_reason = events.get_final_message().stop_reason
    print(f"\nstop    {stop_reason}")


def main() -> None:
    """Answer the question of the command line."""
    parser = argparse.ArgumentParser(description="Answer a question over Anthropic's messages API.")
    parser.add_argument("question", nargs="?", default="What does os.getcwd do?")
    parser.add_argument("--model", default="demo", help="default: %(default)s")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    arguments = parser.parse_args()
    client = Anthropic(base_url=arguments.base_url, api_key=os.environ.get("ANTHROPIC_API_KEY", "none"))
    question = [{"role": "user", "content": arguments.question}]
    print(f"tokens  {client.messages.count_tokens(model=arguments.model, messages=question).input_tokens}")
    call_once(client, arguments.model, arguments.question)


if __name__ == "__main__":
    main()
