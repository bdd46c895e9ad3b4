"""docs/troubleshooting.md has every message that the package raises, warns with or notes, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
CLASSES = {node.name for node in ast.parse((ROOT / "diloco/errors.py").read_text()).body
           if isinstance(node, ast.ClassDef)} | {"Refused"}  # fmt: skip
"""Refused: what a store says, which becomes the text of a ConfigError."""
PASSED_ON = {"str(refused)", "said[0].splitlines()[-1] if said else reason", "busy or usual", "connection.lost",
             "verdict[1]"}  # fmt: skip
"""Arguments that are texts from elsewhere: those of Refused, of a process that failed, or of an assignment below."""
ASSIGNED = {("folder.py", "usual"), ("collective.py", "connection.lost")}


def _texts(node: ast.expr) -> Iterator[str]:
    """What a message may be, with … for each value in it."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
        case ast.IfExp(body=one, orelse=other):
            yield from _texts(one)
            yield from _texts(other)
        case ast.BinOp(left=left, right=right):
            yield from (a + b for a in _texts(left) for b in _texts(right))
        case ast.Call(func=ast.Attribute(value=text, attr="replace")):
            yield from _texts(text)
        case _:
            yield "…"


def _messages() -> dict[str, str]:
    """Each message, and where it is raised, warned with or noted."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "diloco").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id=name), args=[text, *_]) if name in CLASSES:
                    pass
                case ast.Assign(targets=[target], value=text) if (path.name, ast.unparse(target)) in ASSIGNED:
                    pass
                case ast.Call(func=ast.Attribute(value=ast.Name(id="warnings"), attr="warn"), args=[text, *_]):
                    pass
                case ast.Yield(value=ast.expr() as text) if path.name == "preflight.py":  # its notes
                    pass
                case _:
                    continue
            if ast.unparse(text) not in PASSED_ON:
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                found |= {re.sub("…+", "…", each): where for each in _texts(text)}
    return found


def _phrases() -> list[str]:
    """The messages of the page: what stands as code in the first column, below the first table and the symptoms."""
    rows = PAGE.read_text().partition("## PeerLost")[2].splitlines()
    first = [line.split("|")[1] for line in rows if line.startswith("| ")]
    return [code for cell in first for code in re.findall(r"`([^`]+)`", cell) if " " in code or "…" in code]


def _fits(phrase: str, message: str) -> bool:
    """Whether the pieces of the phrase occur in the message, in their order."""
    place = 0
    for piece in (piece.strip() for piece in phrase.split("…")):
        place = message.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True


def test_every_message_is_on_the_page_and_the_page_has_no_other():
    messages, phrases = _messages(), _phrases()
    assert len(messages) > 150 and len(phrases) > 150
    telling = [phrase for phrase in phrases if len(phrase.replace("…", "").strip(" :.,;=")) >= 8]
    missing = {where: message for message, where in messages.items()
               if message not in phrases and not any(_fits(each, message) for each in telling)}  # fmt: skip
    assert not missing
    assert not [phrase for phrase in phrases if not any(_fits(phrase, message) for message in messages)]
