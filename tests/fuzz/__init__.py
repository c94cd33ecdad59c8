"""Coverage-guided fuzzing of what clients send, with atheris: `make test-fuzz`.

Each target is a module with a function `run_one(data)`, which raises for a bug. Seeds are in `corpus/`.
"""
