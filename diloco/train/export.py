"""Export a model: config.json, model.safetensors and the tokenizer, as transformers' Qwen3ForCausalLM reads them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.errors import ConfigError
from diloco.presets import Shape
from diloco.train.data.tokenizer import Tokenizer
from diloco.train.model import EPSILON, ROPE_THETA, Decoder, Pretrained


def export(
    state: dict[str, Tensor],
    shape: Shape,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    context: int = 2048,
    theta: float = ROPE_THETA,
) -> None:
    """Write the weights of a `Decoder` so that `AutoModelForCausalLM.from_pretrained(folder)` gives the same logits.

    Args:
        state: from `Decoder.state_dict()`, on any device; other weights are refused.
        context: tokens of a sequence in training; transformers warns beyond it.
        theta: base of the rotary positions.
    """
    with torch.device("meta"):
        expected = Decoder(shape, context).state_dict()
    wrong = [n for n in state.keys() | expected.keys() if _size(state, n) != _size(expected, n)]
    if wrong:
        raise ConfigError(
            f"{min(wrong)} and {len(wrong) - 1} more do not fit {shape}: export with the model of the run"
        )
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    text = json.dumps(config(shape, tokenizer, context, theta, dtype), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    _save(state, folder / "model.safetensors")
    tokenizer.save(folder)


def export_module(module: nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model made by `build` with its weights; transformers itself writes a Hugging Face model."""
    if isinstance(module, Decoder):
        export(module.state_dict(), module.shape, tokenizer, folder, context=module.context, theta=module.theta)
    elif isinstance(module, Pretrained):
        module.network.save_pretrained(folder)
        tokenizer.save(folder)
    else:
        raise ConfigError(f"cannot export a {type(module).__name__}; give a Decoder or a Pretrained")


def config(shape: Shape, tokenizer: Tokenizer, context: int, theta: float, dtype: str) -> dict[str, Any]:
    """config.json. Transformers before version 5 reads `rope_theta` and `torch_dtype`, later ones their successors."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": context,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": shape.tied,
        "initializer_range": 0.02,
        "eos_token_id": tokenizer.end,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _size(state: dict[str, Tensor], name: str) -> torch.Size | None:
    return state[name].shape if name in state else None


def _save(state: dict[str, Tensor], path: Path) -> None:
    """Write to another name first: an earlier export stays until the new weights are complete."""
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError("export needs safetensors: pip install safetensors") from error
    temporary = path.with_suffix(".tmp")
    save_file({n: t.detach().cpu().contiguous() for n, t in state.items()}, temporary, metadata={"format": "pt"})
    temporary.chmod(path.parent.stat().st_mode & 0o666)  # as readable as its folder; safetensors makes it private
    temporary.replace(path)
