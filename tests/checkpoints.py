"""Small checkpoints the tests write for themselves: a random Llama, and a model that says what it is told.

Both come with a byte-level BPE tokenizer made here: any text can be encoded, and no download is needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2
"""Id of `<|im_end|>` in every tokenizer made here."""

TEXT = (
    "The capital of France is Paris. What is the answer to the question? Once upon a time there was a small engine that "
    "could serve a model to everyone. def add(a, b): return a + b. Please write a short story about the sea and the sun. "
)
MERGES = 200


def byte_alphabet() -> list[str]:
    """Byte -> the printable character that stands for it in byte-level BPE files."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in kept}
    for i, byte in enumerate(b for b in range(256) if b not in table):
        table[byte] = chr(256 + i)
    return [table[byte] for byte in range(256)]


def write_tokenizer(
    folder: Path, pieces: list[bytes] | None = None, *, chat_template: str | None = CHATML
) -> dict[bytes, int]:
    """tokenizer.json and tokenizer_config.json: specials, 256 bytes, merges of `TEXT`, then `pieces` as they are.

    Returns piece -> id. Pieces that are in the vocabulary already keep their id; no text is ever encoded to the others.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    size = len(SPECIALS) + 256 + MERGES
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIALS, initial_alphabet=byte_alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 2, trainer)
    content = json.loads(tokenizer.to_str())
    vocab: dict[str, int] = content["model"]["vocab"]
    alphabet = byte_alphabet()
    ids: dict[bytes, int] = {}
    for piece in pieces or []:
        spelled = "".join(alphabet[byte] for byte in piece)
        ids[piece] = vocab.setdefault(spelled, len(vocab))
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return ids


def vocabulary_size(folder: Path) -> int:
    """Number of ids of the tokenizer in `folder`."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return len(content["model"]["vocab"])


def write_config(folder: Path, **values: Any) -> dict[str, Any]:
    """config.json of a Llama; `values` are laid over small defaults."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "vocab_size": vocabulary_size(folder),
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    } | values
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return config


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of a Llama with this config."""
    hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            found[f"{layer}self_attn.{name}_proj.weight"] = (size, hidden)
        found[f"{layer}self_attn.o_proj.weight"] = (hidden, q)
        for name in ("gate", "up"):
            found[f"{layer}mlp.{name}_proj.weight"] = (inner, hidden)
        found[f"{layer}mlp.down_proj.weight"] = (hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}{name}.weight"] = (hidden,)
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (c["vocab_size"], hidden)}


def write_random_llama(folder: Path, *, seed: int = 0, eos: int | list[int] = EOS, **values: Any) -> Path:
    """A Llama with random float32 weights, decided enough that rounding never changes the likeliest token."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    config = write_config(folder, eos_token_id=eos, **values)
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        if len(shape) == 1:
            tensors[name] = (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
        else:
            # Heads that look at other positions must matter, or the tests of the cache would not notice.
            scale = 1.0 if name == "model.embed_tokens.weight" else 1.7 / np.sqrt(shape[1])
            tensors[name] = (scale * rng.standard_normal(shape)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_generation_config(folder, eos_token_id=eos)
    return folder


def write_generation_config(folder: Path, **values: Any) -> None:
    """generation_config.json."""
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")


def write_script_model(
    folder: Path, pieces: list[str | bytes | int], *, then: int = EOS, eos: int | list[int] = EOS
) -> Path:
    """A Llama that answers every prompt with `pieces`, one token each, and then the token `then`.

    Embeddings are unit vectors, attention and MLP add nothing, and row f(t) of the head is the embedding of t, so that
    t is always followed by f(t). A piece is text, bytes (half a character, say) or a token id; none may appear twice.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    ids = write_tokenizer(folder, [piece for piece in raw if isinstance(piece, bytes)])
    script = [ids[piece] if isinstance(piece, bytes) else piece for piece in raw]
    if len(set(script)) != len(script) or then in script:
        raise ValueError(f"a script cannot say a token twice: {pieces}")
    size = vocabulary_size(folder)
    hidden = -(-size // 64) * 64
    config = write_config(
        folder, hidden_size=hidden, num_hidden_layers=1, intermediate_size=8, num_attention_heads=2, num_key_value_heads=2,
        eos_token_id=eos,
    )  # fmt: skip
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes(config).items()}
    for tensor in tensors.values():
        if tensor.ndim == 1:
            tensor += 1
    np.fill_diagonal(tensors["model.embed_tokens.weight"], 1)
    follows = dict.fromkeys(range(size), script[0] if script else then) | dict(zip(script, [*script[1:], then]))
    head = tensors["lm_head.weight"]
    for token, next_token in follows.items():
        head[next_token, token] = 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_generation_config(folder, eos_token_id=eos)
    return folder
