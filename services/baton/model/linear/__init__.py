"""Linear layers: weight formats, their packed form, and products with the processor's kernels."""
