"""What `make docs` adds to the pages of this folder: those in the project's root, with the README as the start."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"index.md": "README.md", **{name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in FROM_ROOT.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=re.sub(r"\]\(docs/", "](", text)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links are written for those who read the sources: those to a page in the root, and to files besides the pages.

    The latter lead to the repository if the build knows its address. In tables, a unit stays with its number.
    """
    markdown = re.sub(r"\]\(\.\./(\w+\.md)", r"](\1", markdown)
    files_at = config.extra["repository"]
    beside = rf"[\1]({files_at}/blob/main/\2)" if files_at else r"\1"
    markdown = re.sub(r"\[([^\]]+)\]\((?:\.\./)?((?<=\.\./)[\w/.#-]+|examples)\)", beside, markdown)
    return re.sub(r"^\|.*", lambda row: re.sub(r"(?<=\d) %|(?<=[≤≥]) ", keep, row[0]), markdown, flags=re.MULTILINE)


def keep(match: re.Match[str]) -> str:
    return match[0].replace(" ", "\N{NO-BREAK SPACE}")
