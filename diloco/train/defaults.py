"""What is not given is derived from model size and number of replicas, each value with its reason.

The fits are those of Scaling Laws for DiLoCo (arXiv 2503.09799), made on 35M to 2.4B parameters: lr and batch as
A·N^a·M^b. Below that range they are stopped at values that were seen to train.
"""

import math
from dataclasses import dataclass, replace

from diloco import laws
from diloco.formats import FORMATS
from diloco.outer import OUTERS, derived
from diloco.runs.config import SYNCED, TrainConfig, outer_rule

LARGEST_LR = 8e-3
"""The law gives more only below 35M parameters, where it was not fitted. At 0.09M and 0.34M the best of a grid of
factor √2 was 1.1e-2, which 8e-3 came close to (docs/parity.md)."""


DESCRIBED = ("tokens", "tokenizer")
"""Derived values that the config does not hold."""


FINE_TUNING_LR, FINE_TUNING_BATCH = 2e-5, 32
"""For a model that comes with its weights: the middle of what recipes for full fine-tuning take."""


@dataclass(frozen=True)
class Rule:
    name: str
    value: float | str
    reason: str
    varies: bool = False
    """Whether the value changes in the course of the run, so that it is not one of the config."""


def resolve(
    config: TrainConfig, parameters: int, replicas: int, corpus_tokens: int = 0
) -> tuple[TrainConfig, list[Rule]]:
    """The config with every value filled in, and the rules that filled it. `corpus_tokens`: those to train on."""
    rules: list[Rule] = []
    config = replace(config, **outer_rule(config))

    def take(name: str, value: float, reason: str) -> None:
        if getattr(config, name) is None and all(rule.name != name for rule in rules):
            rules.append(Rule(name, value, reason))

    pretrained = config.model.startswith("hf:")
    multiple = replicas * config.shards * config.accumulate
    if pretrained and config.tokenizer == config.model:
        rules.append(Rule("tokenizer", config.model, "the model's own: it knows no other tokens"))
    batch, why = _batch(config, parameters, replicas, multiple)
    take("batch", batch, why)
    per_step = (config.batch or batch) * config.context
    total = corpus_tokens if pretrained and corpus_tokens else laws.TOKENS_PER_PARAMETER * parameters
    tokens = config.tokens or (config.steps * per_step if config.steps else total)
    if config.tokens is None and config.steps is None:
        long = "one pass over the data, as in fine-tuning" if total == corpus_tokens else "20 tokens for each parameter"
        rules.append(Rule("tokens", tokens, long))
    steps = config.steps or max(round(tokens / per_step), 1)
    take("steps", steps, "tokens ÷ (batch · context)")
    if config.inner is None:
        better = "lower loss than AdamW at equal tokens (docs/parity.md)"
        rules.append(Rule("inner", *(("adamw", "usual for a pretrained model") if pretrained else ("muon", better))))
    law = laws.inner_lr(parameters, replicas)
    if pretrained:
        take("lr", FINE_TUNING_LR, "usual for a pretrained model; the scaling law is for training from scratch")
    take("lr", float(f"{min(law, LARGEST_LR):.3g}"),
         f"scaling law 22256·N^-0.88·M^0.29{f', stopped at {LARGEST_LR:g}' if law > LARGEST_LR else ''}")  # fmt: skip
    take("warmup", min(max(steps // 10, 1), 1000), "a tenth of the steps, at most 1000")
    take("weight_decay", float(f"{1 / steps:.3g}"), "1 ÷ steps, as in the scaling laws")
    take("eval_every", min(max(steps // 10, 50), 1000), "a tenth of the steps, from 50 to 1000")
    if config.method in SYNCED:
        rules += [rule for rule in _outer(config.outer) if getattr(config, rule.name) is None]
    wanted = FORMATS[config.codec].feedback if config.method == "streaming" else 0.0
    if wanted:
        take("feedback", wanted, f"{config.codec} loses much of a delta: it goes into the next one")
    elif config.feedback is None:
        config = replace(config, feedback=0.0)
    filled = {rule.name: type_of(rule) for rule in rules if rule.name not in DESCRIBED and not rule.varies}
    return replace(config, replicas=replicas, tokens=None, **filled), rules


def _batch(config: TrainConfig, parameters: int, replicas: int, multiple: int) -> tuple[int, str]:
    if config.model.startswith("hf:"):
        return max(round(FINE_TUNING_BATCH / multiple), 1) * multiple, "usual for a pretrained model"
    why = "scaling law 0.00709·N^0.47·M^0.34 sequences of 2048 tokens, as many of this context"
    return laws.batch_of(parameters, replicas, config.context, multiple), why


def _outer(name: str) -> list[Rule]:
    values = derived(OUTERS[name]).items()
    return [Rule(f"outer_{each}", value, why, varies=isinstance(value, str)) for each, (value, why) in values]


def type_of(rule: Rule) -> float | str:
    return int(rule.value) if rule.name in ("batch", "steps", "warmup", "eval_every") else rule.value


def lr_at(config: TrainConfig, step: int) -> float:
    """The inner lr of a step (from 1): linear warm-up, then a cosine to 5 % of the peak."""
    assert config.lr is not None and config.warmup is not None and config.steps is not None
    if step <= config.warmup:
        return config.lr * step / config.warmup
    done = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return config.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


def describe(rules: list[Rule], parameters: int, config: TrainConfig, corpus: str, start: int) -> str:
    """What is about to run, and where each derived value comes from."""
    where = f" from step {start}" if start else ""
    head = f"{config.method}: {parameters / 1e6:.3g}M parameters on {corpus}, {config.steps} steps{where}"
    return "\n".join([head, *(f"  {rule.name} = {_shown(rule.value)}: {rule.reason}" for rule in rules)])


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:g}"
