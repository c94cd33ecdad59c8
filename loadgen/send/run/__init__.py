"""One run: its processes, the open-loop sender in each, the result directory and the live display."""
