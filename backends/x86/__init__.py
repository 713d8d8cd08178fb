"""Products of a few rows with a large matrix on x86 CPUs, compiled when they are first needed.

`compiler` turns LLVM's intermediate representation into functions, `encodings` describes memory layouts of
weights, and `row_product` writes the product for one of them. `..products` decides when a kernel is worth using.
"""
