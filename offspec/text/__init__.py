"""Text and tokens: the tokenizer, chat templates, streamed text, and files for n-gram lookup."""
