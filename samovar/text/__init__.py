"""Text to tokens and back: tokenizers, chat templates, detokenizing, stop strings, the output pipeline. Torch-free."""
