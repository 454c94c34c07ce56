"""A tiny model with random weights, whose every token is one visible word, so that clients can count tokens."""

from __future__ import annotations

import json
from pathlib import Path

# As many words as a small real model has, so that a step takes about as long as that of an 8B model on a GPU.
VOCABULARY = 49_152
# Each word has this letter once.
MARK = "w"

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def words(seed: int, count: int) -> str:
    """A prompt of `count` tokens that few other seeds give."""
    return " ".join(f"w{(seed * 7919 + index * (seed % 31 + 1)) % VOCABULARY:05d}" for index in range(count))


def write_tiny_model(folder: Path) -> Path:
    """Write the model's configuration and tokenizer; weights are made up by vLLM's `load_format: dummy`.

    There are no special tokens: every token that the model can say is a word.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({f"w{index:05d}": index for index in range(VOCABULARY)}, unk_token="w00000"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Replace(MARK, f" {MARK}"), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=2))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": _CONFIG["max_position_embeddings"],
                "chat_template": _TEMPLATE,
            }
        )
    )
    return folder
