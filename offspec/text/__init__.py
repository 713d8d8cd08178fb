"""Text and tokens: the tokenizer, the chat template, text that appears when it is certain, files to look up in."""
