"""`diloco completion SHELL`: what makes a shell complete verbs, flags and their choices."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Literal

from diloco.cli import VERBS
from diloco.flags import REQUIRED, choices, flag, meaning, spelled, value_type


@dataclass(frozen=True, kw_only=True)
class CompletionConfig:
    """Print a script for your shell, which knows the verbs and flags of this version. Append it to ~/.bashrc or
    ~/.zshrc."""

    shell: Literal["bash", "zsh"] = flag(REQUIRED, "The shell that you use: bash or zsh.", positional=True)


CONFIG = CompletionConfig
EXAMPLES = ("diloco completion bash", "diloco completion zsh")
SCRIPT = """_diloco() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" verb="${{COMP_WORDS[1]}}"
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W "{verbs}" -- "$current"))
        return
    fi
    case "$verb $before" in
{values}
    esac
    if [[ "$current" != -* ]]; then return; fi
    case "$verb" in
{flags}
    esac
}}
complete -o default -F _diloco diloco"""


def main(config: CompletionConfig) -> int:
    script = SCRIPT.format(verbs=" ".join(VERBS), values="\n".join(_values()), flags="\n".join(_flags()))
    print(script if config.shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{script}")
    return 0


def _values() -> Iterator[str]:
    """The values of flags that are a choice."""
    for verb in VERBS:
        for field in fields(import_module(f"diloco.cli.{verb}").CONFIG):
            if names := choices(field):
                answer = f'COMPREPLY=($(compgen -W "{" ".join(names)}" -- "$current"))'
                yield f'        "{verb} {spelled(field.name)}") {answer}; return ;;'


def _flags() -> Iterator[str]:
    for verb in VERBS:
        shown = [field for field in fields(import_module(f"diloco.cli.{verb}").CONFIG) if not meaning(field).positional]
        words = " ".join(["--help", *(spelled(field.name) for field in shown)])
        on = " ".join(spelled(f"no_{field.name}") for field in shown if value_type(field)[0] is bool and field.default)
        yield f'        {verb}) COMPREPLY=($(compgen -W "{words}{" " + on if on else ""}" -- "$current")) ;;'
