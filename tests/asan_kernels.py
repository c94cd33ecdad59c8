"""Builds the C++ kernels with address and undefined-behaviour sanitizers, in place of the usual library.

XDG_CACHE_HOME=DIR python -m tests.asan_kernels

Processes with the same XDG_CACHE_HOME load this library. They need the sanitizer's runtime in LD_PRELOAD.
Then memory of torch and numpy has guards, and an access outside of it ends the process with a report.
"""

import subprocess

from baton.model.kernels.cpu.kernel_build import HERE, OPTIONS, SOURCES, default_cache, find_compiler, library_name

SANITIZE = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    # Loads and stores of vectors at any address are meant. GCC reports them as misaligned pointers.
    "-fno-sanitize=alignment",
    "-fno-omit-frame-pointer",
    "-g",
)


def main() -> None:
    compiler = find_compiler()
    library = default_cache() / library_name(compiler)
    library.parent.mkdir(parents=True, exist_ok=True)
    options = ["-O1" if option == "-O3" else option for option in OPTIONS]
    sources = [str(HERE / name) for name in SOURCES]
    subprocess.run([compiler, *options, *SANITIZE, *sources, "-o", str(library)], check=True)


if __name__ == "__main__":
    main()
