"""Twenty prompts of different kinds for real models."""

from __future__ import annotations

CODE = "def fibonacci(n):\n    "
STORY = (
    "The harbour was quiet when the first boats came home. Old Marta counted them from her window, as she had done "
    "every evening for forty years, and wrote the number into a small blue book. "
)

TEXTS = [
    CODE,
    "The capital of France is",
    "import numpy as np\n\n# Return the mean of every column of a matrix.\ndef column_means(",
    "Once upon a time, in a small village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
    '{"name": "Ada", "born": 1815, "fields": [',
    "La capitale de l'Allemagne est",
    "日本の首都は",
    "Привет! Как дела? Расскажи мне о",
    "🙂🙃🚀 naïve café — “quotes” … ½ ",
    "SELECT name, COUNT(*) FROM users WHERE",
    "\n\n\n",
    "a",
    "The quick brown fox jumps over the lazy dog. " * 20,
    STORY * 40,  # about 1,500 tokens
]
"""Prompts given as they are."""

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 2+2?"}],
    [{"role": "user", "content": "Write a Python function that reverses a string."}],
    [{"role": "system", "content": "Answer in French."}, {"role": "user", "content": "How are you today?"}],
    [
        {"role": "user", "content": "Name three colours."},
        {"role": "assistant", "content": "Red, green and blue."},
        {"role": "user", "content": "And two more?"},
    ],
    [{"role": "user", "content": "Erkläre kurz, was ein Hafen ist. 🚢"}],
]
"""Conversations, for models with a chat template."""
