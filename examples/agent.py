"""An agent loop: the model may call tools before it answers.

    python examples/agent.py "How much is 17 * 23?"

The loop sends the model's calls back together with their results, until a reply has no call. To choose tools
takes a model that was trained for them, such as Qwen/Qwen3-0.6B. The demo model was not: it answers at once.
`--tool python_help` forces a call of this tool first, so that the loop can be seen with the demo model, too.
"""

import argparse
import ast
import json
import operator
import os
import pydoc

from openai import OpenAI

MAX_TURNS = 5
MAX_TOKENS = 500
DOCUMENTED = ("json.dumps", "math.sqrt", "os.getcwd", "shutil.copyfile")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """Compute sums and products of numbers. Nothing else is evaluated, whatever the model writes."""

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
                return OPERATORS[type(sign)](value(left), value(right))
        raise ValueError("only numbers, + - * / and parentheses")

    return f"{value(ast.parse(expression, mode='eval').body):g}"


def python_help(name: str) -> str:
    """Return the beginning of a name's documentation. To look a name up is to import its module."""
    if name not in DOCUMENTED:
        raise ValueError(f"only {', '.join(DOCUMENTED)}")
    return pydoc.plain(pydoc.render_doc(name))[:500]


FUNCTIONS = {"calculate": calculate, "python_help": python_help}


def tool(name: str, description: str, argument: str, schema: dict[str, object]) -> dict[str, object]:
    """Return a tool with one required argument, in the form of the API."""
    properties = {argument: {"type": "string", **schema}}
    parameters = {"type": "object", "properties": properties, "required": [argument], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("calculate", "Computes an arithmetic expression, such as 2 * 21.", "expression", {"maxLength": 100}),
    tool("python_help", "Returns the documentation of a Python name.", "name", {"enum": list(DOCUMENTED)}),
]


def result_of(name: str, arguments: str) -> str:
    """Return a tool's result. The model sees errors, too, and may try again."""
    try:
        return FUNCTIONS[name](**json.loads(arguments))
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"


def run(client: OpenAI, model: str, question: str, first_tool: str | None = None) -> str:
    """Answer a question in at most `MAX_TURNS` turns. The first one calls `first_tool` if it is given."""
    messages = [{"role": "user", "content": question}]
    choice = {"type": "function", "function": {"name": first_tool}} if first_tool else "auto"
    for _ in range(MAX_TURNS):
        response = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=MAX_TOKENS
        )
        message = response.choices[0].message
        if not message.tool_calls:
            return (message.content or "").strip()
        messages.append(message)
        for call in message.tool_calls:
            name, arguments = call.function.name, call.function.arguments
            result = result_of(name, arguments)
            print(f"call    {name}({arguments}) -> {result!r:.80}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        choice = "auto"
    return f"no answer after {MAX_TURNS} turns"


def main() -> None:
    """Answer the question of the command line."""
    parser = argparse.ArgumentParser(description="Answer a question with tools.")
    parser.add_argument("question", nargs="?", default="What does os.getcwd do?")
    parser.add_argument("--tool", choices=sorted(FUNCTIONS), help="the first turn must call this tool")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    print(f"answer  {run(client, model, arguments.question, arguments.tool)}")


if __name__ == "__main__":
    main()
