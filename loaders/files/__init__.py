"""Bytes on disk: containers of tensors, reads, locks, the user's folders."""
