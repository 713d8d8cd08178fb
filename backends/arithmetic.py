"""The user's words for how rows are computed. Imports no torch."""

# In the fastest way, with bits that do not depend on other rows, and so with rows in 8 bits.
ARITHMETIC = FAST, EXACT, INT8 = "fast", "exact", "int8"
# GGUF's types with products of rows in 8 bits (`x86.byte_product`).
BYTE_FORMS = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "IQ4_NL", "MXFP4")
