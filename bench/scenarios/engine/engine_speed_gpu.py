"""How fast is a worker on one GPU? Ours beside transformers' continuous batching on the same GPU, and beside
what it allows.

python -m bench engine_speed_gpu --out DIR [--models qwen3-0.6b,qwen3-8b] [--repeats 5] [--json]

What is measured, and how, is said in `engine.py`, and here for 64 sequences at a time, too. All engines share
the GPU, each with its own weights and KV memory of `--kv-gib`, and compute in turns: what has no room is left
out, and named. `--device cpu` runs the same on a CPU, to try the bench where there is no GPU.
"""

from bench.scenarios.engine.engine_speed import CELLS, DECODED, EngineCell, bench, parser
from bench.systems.engines import ALONE, BATCHED, OURS

KV_GIB = 8
MODELS = ("qwen3-0.6b", "qwen3-8b")
MORE = tuple(EngineCell(what="TPOT", num=64, num_tokens=n, num_outputs=DECODED) for n in (256, 2048))


def main() -> None:
    asked = parser(
        __doc__, engines=(OURS, ALONE, BATCHED), models=MODELS, cells=(*CELLS, *MORE), device="cuda", kv_gib=KV_GIB
    )
    asked.add_argument("--device", choices=("cuda", "cpu"), help="(cuda)")
    bench(asked.parse_args())


if __name__ == "__main__":
    main()
