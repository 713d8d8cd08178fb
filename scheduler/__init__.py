"""From predictions to tokens: trees, drafting, sampling, verification. Independent of files and architectures."""
