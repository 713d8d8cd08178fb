"""Products of a few rows with a large matrix on x86 CPUs, compiled when they are first needed.

`compiler` turns LLVM's intermediate representation into functions, `encodings` says how weights lie in memory, and
`row_product` writes the product over one. Nothing here decides when a kernel is worth using (`..products`).
"""
