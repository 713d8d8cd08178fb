"""Where `scripts/fetch_real_pair` puts the real models; Q4_K_M, GGUF."""

from __future__ import annotations

from platformdirs import user_cache_path

CACHE = user_cache_path("offspec", appauthor=False)  # as scripts/wheel_files.py has it
FOLDER = CACHE / "real_pair"
TARGET = FOLDER / "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf"
DRAFT = FOLDER / "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"
PROMPTS = CACHE / "prompts"  # of `scripts/fetch_prompts`
