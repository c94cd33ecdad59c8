"""Rich renderables as plain text."""

import io

from rich.console import Console, RenderableType


def printed(renderable: RenderableType, width: int = 200) -> str:
    """Return the rendered text without colours and trailing spaces."""
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def row(screen: str, begins: str) -> list[str]:
    """Return the words of the first line that begins with `begins`."""
    (found,) = [line for line in screen.splitlines() if line.strip().startswith(begins)][:1]
    return found.split()
