"""Measurements, checks and reports for `offspec bench`, `verify`, `plan` and `doctor`."""
