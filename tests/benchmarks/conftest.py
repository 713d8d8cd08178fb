"""Benchmarks load engines as other tests do: with assumed rates."""

from ..assumed_rates import assumed_rates as assumed_rates
