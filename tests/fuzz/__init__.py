"""Seeded fuzzers: damaged files are refused in one line, or read, and never more.

FUZZ_CASES says how many cases a test has.
"""
