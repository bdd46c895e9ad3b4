"""Fine-tune a Hugging Face model with LoRA, several people together, each with a laptop and texts of their own.

    python finetune.py --model MODEL --data mine.jsonl --bucket FOLDER_OR_URL --member anna

MODEL is a folder or an id on the Hub; each line of the data is {"text": …}. Only the adapters are trained and sent.
The texts stay where they are. See README.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from diloco import Balanced, Bucket, DiLoCo


def windows_of(path: Path, tokenizer: Any, context: int) -> Tensor:
    """All texts one behind the other, in windows of `context` tokens."""
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    tokens = [t for text in texts for t in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    if len(tokens) < 2 * context:
        raise SystemExit(f"{path} has {len(tokens)} tokens: give at least {2 * context}, two windows of --context")
    return torch.tensor(tokens[: len(tokens) // context * context]).view(-1, context)


@torch.no_grad()
def loss_of(model: Any, windows: Tensor) -> float:
    return model(input_ids=windows, labels=windows).loss.item()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "bucket", "member"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("adapter"))
    for name, default in (
        ("rounds", 20),
        ("sync-every", 20),
        ("quorum", 1),
        ("batch", 4),
        ("context", 256),
        ("rank", 8),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-4)
    given = parser.parse_args(words)

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=given.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    held_out, *rest = windows_of(given.data, tokenizer, given.context).split(4)
    mine = torch.cat(rest or [held_out])
    print(f"{given.member}: loss {loss_of(model, held_out):.3f} before")

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=given.lr)
    bucket = Bucket(given.bucket, given.member, rounds=given.rounds, quorum=given.quorum)
    # One fragment: adapters are a few megabytes. The base weights are equal everywhere and are not sent.
    with DiLoCo(model, optimizer, sync_every=given.sync_every, fragments=Balanced(1), reducer=bucket) as diloco:
        while not bucket.ended:  # the run ends after --rounds rounds, however much each laptop has contributed
            batch = mine[torch.randint(len(mine), (given.batch,))]
            diloco.count(batch.numel())  # whoever trains on more counts for more
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(given.out)
    size, whole = sum(p.numel() for p in trained), sum(p.numel() for p in model.parameters())
    sent = f"trained and sent {size:,} of {whole:,} parameters, {bucket.traffic['sent'] / 1e6:.2f} MB"
    print(f"{given.member}: loss {loss_of(model, held_out):.3f} after {given.rounds} rounds; {sent}; "
          f"the adapter is in {given.out}")  # fmt: skip


if __name__ == "__main__":
    main()
