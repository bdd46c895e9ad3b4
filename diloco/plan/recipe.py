"""The recommendation as a recipe for `diloco train`, each setting with its reason."""

from diloco import laws
from diloco.plan.choose import Choice
from diloco.presets import PRESETS
from diloco.report.units import percent


def recipe(choice: Choice, replicas: int, model: str | None = None, extra: dict[str, int] | None = None) -> str:
    """Flat TOML. `model` is left out if it is no preset; `extra` are values that were given."""
    settings, reasons = choice.settings, choice.reasons
    entries: list[tuple[str, object, str]] = [
        ("replicas", replicas, "given"),
        (
            "method",
            "streaming",
            f"{percent(choice.utilization, digits=1)} busy on this link, says `diloco plan`",
        ),
        ("sync_every", settings.sync_every, reasons["sync_every"]),
        ("fragments", settings.fragments, reasons["fragments"]),
        ("overlap", settings.overlap, reasons["overlap"]),
        ("keep_local", 0.0, "the default: the agreed value replaces the local one"),
        ("codec", settings.codec, reasons["codec"]),
    ]
    if model not in PRESETS or PRESETS[model].parameters >= laws.FITTED[0]:  # else the trainer knows better
        entries.append(("outer_lr", choice.outer_lr, reasons["outer_lr"]))
    if model is not None:
        entries.insert(0, ("model", model, "given"))
    entries += [(name, value, "given") for name, value in (extra or {}).items()]
    return "\n".join(f"# {reason}\n{name} = {_toml(value)}" for name, value, reason in entries) + "\n"


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
