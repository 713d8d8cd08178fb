"""What a model keeps of a text: KV entries, in formats and places; the caches of several texts."""
