"""Families of models, as data: each family's differences from Llama's layout."""
