"""Engines of these tests are loaded with assumed rates."""

from ..assumed_rates import assumed_rates  # noqa: F401 (for each module)
