"""Measures one worker on a GPU against transformers' continuous batching and the GPU's roofline.

python -m bench engine_speed_gpu --out DIR [--models qwen3-0.6b,qwen3-8b] [--repeats 5] [--json]

The cells are those of `engine_speed`, plus decode batches of 64 sequences. All engines share the GPU and run
one at a time, each with its own weights and `--kv-gib` of KV memory. Cells that do not fit into KV memory are
skipped with a note. `--device cpu` runs the same cells on a CPU, to try the script without a GPU.
"""

from bench.scenarios.engine.engine_speed import bench, make_parser
from bench.support.engine.engine_cells import CELLS, DECODED, EngineCell
from bench.systems.engines import ALONE, BATCHED, BATON

KV_GIB = 8
MODELS = ("qwen3-0.6b", "qwen3-8b")
MORE = tuple(EngineCell(what="TPOT", num=64, num_tokens=n, num_outputs=DECODED) for n in (256, 2048))


def main() -> None:
    arguments_parser = make_parser(
        __doc__, engines=(BATON, ALONE, BATCHED), models=MODELS, cells=(*CELLS, *MORE), device="cuda", kv_gib=KV_GIB
    )
    arguments_parser.add_argument("--device", choices=("cuda", "cpu"), help="device that computes (cuda)")
    bench(arguments_parser.parse_args())


if __name__ == "__main__":
    main()
