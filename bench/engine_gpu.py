"""How fast is a worker on one GPU? Ours beside transformers' continuous batching on the same GPU, and beside what it allows.

    python bench/engine_gpu.py --out DIR [--models demo,tiny-42m,qwen3-0.6b] [--repeats 5] [--json]

What is measured, and how, is said in `engine.py`; here all engines share the GPU, each with KV memory of `--kv-gib`, and compute in turns.
`--device cpu` runs the same on a CPU, to try the bench where there is no GPU.
"""

from engine import bench, parser
from engine_ways import ALONE, BATCHED, OURS

KV_GIB = 8


def main() -> None:
    asked = parser(__doc__, engines=(OURS, ALONE, BATCHED), device="cuda", kv_gib=KV_GIB)
    asked.add_argument("--device", choices=("cuda", "cpu"), help="(cuda)")
    asked.add_argument("--kv-gib", type=int, help=f"({KV_GIB})")
    bench(asked.parse_args())


if __name__ == "__main__":
    main()
