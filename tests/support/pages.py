"""The fenced blocks of the Markdown pages."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"(?:^<!-- ([^>]*) -->\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    mark: str
    """The HTML comment directly above: `needs: …`, `processes: N`, `file: NAME`, `output` or nothing."""
    kind: str
    text: str

    @property
    def after(self) -> str:
        """The code once the diff is applied."""
        return "\n".join(line[1:] for line in self.text.splitlines() if not line.startswith("-"))

    @property
    def before(self) -> str:
        """The code that the diff changes."""
        return "\n".join(line[1:] for line in self.text.splitlines() if not line.startswith("+"))

    @property
    def commands(self) -> list[str]:
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.removeprefix("$ ") for line in lines] if self.kind == "console" else lines


def blocks(page: str, section: str = "") -> list[Block]:
    """The blocks of a page, or only those of the section whose title begins with these words."""
    text = (ROOT / page).read_text()
    if section:
        (text,) = re.findall(rf"^## {section}.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return [Block(*parts) for parts in FENCE.findall(text)]
