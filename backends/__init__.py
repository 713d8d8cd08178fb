"""Arithmetic: products of rows with weights, and the kernels that compute them. It knows no files and no models."""
