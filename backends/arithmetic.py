"""The user's words for how rows are computed. Imports no torch."""

# In the fastest way, with bits that do not depend on other rows, and so with rows in 8 bits.
ARITHMETIC = FAST, EXACT, INT8 = "fast", "exact", "int8"
