"""The model, its loss, samples and export: a decoder with the names of Qwen3ForCausalLM, or a Hugging Face causal LM.

RMSNorm before every block and at the end, QK-norm per head, rotary positions, a gated MLP, no biases; z-loss as in the
paper (section 5). The names make the export a plain save.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from diloco.errors import ConfigError, install_command
from diloco.runs.presets import Shape, shape_named
from diloco.train.data.tokenizer import Tokenizer

EPSILON = 1e-6
ROPE_THETA = 10_000.0
Z_LOSS = 1e-4
IGNORE = -100
"""Targets with this value are ignored."""
Cache = list[list[Tensor]]
"""Keys and values of each layer, shaped (batch, heads, tokens, head width); empty before the first token."""
Windows = Sequence[tuple[Tensor, Tensor]]
"""Batches of inputs and targets."""


class Loss(NamedTuple):
    loss: Tensor
    """Cross-entropy plus z-loss, for backward()."""
    cross_entropy: Tensor
    """Nats per token, detached, for the log."""


def build(spec: str, vocabulary: int, context: int, seed: int) -> nn.Module:
    """Make a model on the host: `forward(tokens)` gives logits, `forward(tokens, targets)` a `Loss`.

    Args:
        spec: a preset, or hf:PATH_OR_ID, which comes with its weights.
        vocabulary: that of the tokenizer; overrides a preset's.
        context: tokens in a sequence.
        seed: for the initial weights of a preset.
    """
    if spec.startswith("hf:"):
        with torch.random.fork_rng(devices=()):  # for weights that the checkpoint lacks, such as a new head
            torch.manual_seed(seed)
            return Pretrained(pretrained(spec.removeprefix("hf:"), vocabulary, context).train())
    shape = shape_named(spec)
    with torch.device("meta"):  # skips the default initialization, which draws global random numbers
        model = Decoder(replace(shape, vocabulary=vocabulary), context)
    model.to_empty(device="cpu")
    model.initialize(torch.Generator().manual_seed(seed))
    return model


def loss_of(logits: Tensor, targets: Tensor) -> Loss:
    """Mean of −log p(target) and Z_LOSS · mean of (log Z)², both over the targets that are not ignored.

    One logsumexp serves both terms: a fifth faster than `cross_entropy` and a logsumexp, and one large tensor less.
    """
    logits, targets = logits.float().flatten(0, -2), targets.flatten()
    counts = targets != IGNORE
    n = counts.sum().clamp(min=1)
    log_z = logits.logsumexp(-1)
    log_p = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1) - log_z
    cross_entropy = -(log_p * counts).sum() / n
    z_loss = (log_z.square() * counts).sum() / n
    return Loss(cross_entropy + Z_LOSS * z_loss, cross_entropy.detach())


@torch.no_grad()
def held_out_loss(model: nn.Module, windows: Windows, device: torch.device) -> float:
    """Mean cross-entropy in nats per token. All windows hold the same number of tokens."""
    training = model.training
    model.eval()
    total = sum(float(model(x.to(device), y.to(device)).cross_entropy) for x, y in windows)  # some devices lack float64
    model.train(training)
    return total / len(windows)


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    return loss / math.log(2) / bytes_per_token


@torch.no_grad()
def sample(model: nn.Module, tokenizer: Tokenizer, prompt: str, count: int, context: int, device: torch.device) -> str:
    """Continue a prompt by `count` tokens at temperature 0.8, always with the same random numbers."""
    ids = [int(i) for i in tokenizer.encode(prompt.encode())]
    return tokenizer.decode([*ids, *islice(continuation(model, ids, context, device), count)])


@torch.no_grad()
def continuation(
    model: Any, ids: Sequence[int], context: int, device: torch.device, temperature: float = 0.8, seed: int = 0
) -> Iterator[int]:
    """Generate tokens without end. Temperature 0 takes the likeliest.

    Keys and values are cached until the context is full. Then the window slides, which changes all of them.
    """
    generator = torch.Generator().manual_seed(seed)
    new = window = list(ids)[-context:]
    cache = model.new_cache()
    while True:
        logits = model(torch.tensor([new], device=device), cache=cache)[0, -1].float().cpu()
        probabilities = (logits / temperature).softmax(0) if temperature else None
        token = logits.argmax() if probabilities is None else torch.multinomial(probabilities, 1, generator=generator)
        yield int(token)
        window = [*window, int(token)]
        cache = cache if len(window) <= context else None
        window = window[-context:]
        new = window if cache is None else window[-1:]


class Decoder(nn.Module):
    """A causal language model of the given shape. `context`: the length it is trained for, not a limit."""

    def __init__(self, shape: Shape, context: int, theta: float = ROPE_THETA) -> None:
        super().__init__()
        self.shape, self.context, self.theta = shape, context, theta
        self.model = _Body(shape)
        self.lm_head = None if shape.tied else nn.Linear(shape.width, shape.vocabulary, bias=False)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Norms 1; matrices normal with std 0.02, those that write to the residual stream with 0.02/√(2·layers)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / math.sqrt(2 * self.shape.layers) if residual else 0.02
                parameter.normal_(0.0, std, generator=generator)

    def new_cache(self) -> Cache:
        return [[] for _ in range(self.shape.layers)]

    def forward(self, tokens: Tensor, targets: Tensor | None = None, cache: Cache | None = None) -> Tensor | Loss:
        """With a `cache`, `tokens` continue those it holds: the whole prompt first, then one token per call."""
        start = cache[0][0].shape[2] if cache and cache[0] else 0
        rotary = _rotary(start, start + tokens.shape[1], self.shape.head_width, self.theta, tokens.device)
        hidden = self.model(tokens, *rotary, cache or [None] * self.shape.layers)
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits = F.linear(hidden, head.weight)
        return logits if targets is None else loss_of(logits, targets)


class Pretrained(nn.Module):
    """A Hugging Face causal LM with the `forward` of `Decoder`. The model itself is `network`."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def new_cache(self) -> Any:
        """None if the model stores its past in a form other than keys and values."""
        from transformers import DynamicCache

        supported = "past_key_values" in signature(self.network.forward).parameters
        return DynamicCache(config=self.network.config) if supported else None

    def forward(self, tokens: Tensor, targets: Tensor | None = None, cache: Any = None) -> Tensor | Loss:
        past = {"use_cache": False} if cache is None else {"use_cache": True, "past_key_values": cache}
        logits = self.network(input_ids=tokens, **past).logits
        return logits if targets is None else loss_of(logits, targets)


class _Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, EPSILON)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor, cache: Sequence[list[Tensor] | None]) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer, past in zip(self.layers, cache, strict=True):
            x = layer(x, cos, sin, past)
        return self.norm(x)


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, EPSILON)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, EPSILON)
        self.mlp = _MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: list[Tensor] | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_width, EPSILON)
        self.k_norm = nn.RMSNorm(shape.head_width, EPSILON)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: list[Tensor] | None) -> Tensor:
        heads = (*x.shape[:2], self.heads, -1)
        v = self.v_proj(x).view(heads)
        # Under autocast the projections are bf16, and the norms stay fp32.
        q = self.q_norm(self.q_proj(x).view(heads).type_as(self.q_norm.weight))
        k = self.k_norm(self.k_proj(x).view(heads).type_as(self.k_norm.weight))
        q, k = _rotate(q, cos, sin).type_as(v), _rotate(k, cos, sin).type_as(v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        causal = not past  # a single token that follows a past attends to all of it
        if past:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        if past is not None:
            past[:] = k, v
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _rotary(start: int, end: int, head_width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tables of shape (end − start, 1, head_width), the sine with the sign of each half.

    Computed for every batch: that takes 0.1 % of a step, and a buffer would have to grow, be cast and be averaged.
    """
    frequencies = theta ** -(torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angles = torch.arange(start, end, device=device, dtype=torch.float32)[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((second, first), -1) * sin


def pretrained(source: str, vocabulary: int, context: int, *, weights: bool = True) -> Any:
    """Load a Hugging Face causal LM that fits the tokenizer and the context. Without `weights`: on the meta device."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise ConfigError(f"model='hf:{source}' needs transformers: {install_command('hf')}") from error
    disable_progress_bar()  # the commands report progress themselves
    try:
        if weights:
            network: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        else:
            with torch.device("meta"):
                network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model='hf:{source}': {reason}; use the folder or the hub name of a causal LM") from error
    rows = network.get_input_embeddings().weight.shape[0]
    if rows < vocabulary:
        raise ConfigError(
            f"model='hf:{source}' has {rows} embeddings, but the tokenizer has {vocabulary} tokens: pass the model's "
            "own tokenizer.json with --tokenizer"
        )
    limit = getattr(network.config, "max_position_embeddings", None)
    if limit is not None and limit < context:
        raise ConfigError(f"model='hf:{source}' takes at most {limit} tokens: lower --context {context}")
    return network


def export(model: nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model made by `build` so that `AutoModelForCausalLM.from_pretrained(folder)` gives the same logits."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, Pretrained):
        model.network.save_pretrained(folder)
    else:
        assert isinstance(model, Decoder)
        (folder / "config.json").write_text(json.dumps(_qwen3(model, tokenizer), indent=2) + "\n", encoding="utf-8")
        weights, path = model.state_dict(), folder / "model.safetensors"
        save_file({n: t.detach().cpu().contiguous() for n, t in weights.items()}, path, metadata={"format": "pt"})
        path.chmod(folder.stat().st_mode & 0o666)  # as readable as its folder; safetensors makes it private
    tokenizer.save(folder)


def _qwen3(model: Decoder, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json."""
    shape = model.shape
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
        "rope_parameters": {"rope_type": "default", "rope_theta": model.theta},
        "max_position_embeddings": model.context,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": shape.tied,
        "initializer_range": 0.02,
        "eos_token_id": tokenizer.end,
        "use_cache": True,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
