"""The built-in pair: a small target and a smaller draft, trained by scripts/train_builtin.py."""
