# ruff: noqa: INP001 - mkdocs loads this file by its path
"""Hooks of mkdocs: pages outside docs/ become part of the site, and links between all pages stay right.

README.md, ARCHITECTURE.md, FORMAT.md and others lie where readers of the repository look for them, and link to each
other and to files by paths of the repository. Every file that is linked from a page is added to the site: pages of
docs/ at the root, README.md as index.md, every other file at its path in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
_README, _INDEX, _DOCS = "README.md", "index.md", "docs/"
# A link or picture, up to its address; the address, without an anchor.
_LINK = re.compile(r"(\]\()([^()\s#:]+)")
# Code within a text, and in it an option or a name with a hyphen, after which browsers begin a new line.
_CODE = re.compile(r"<code>[^<]*</code>")
_HYPHENATED = re.compile(r"(?<![\w&/.-])(?:-{1,2}\w[\w-]{0,21}|\w{1,12}-\w{1,12}(?![\w/.-]))")

# Behind the first paragraph of README on the site's front page.
_FRONT = """![What lies in a bucket](images/bucket.svg)

```sh
make demo    # four to six minutes, on a CPU: it draws these curves
```

![Loss of the demo: killed in mid-save, hung, preempted; resumed at other sizes, and beside it the run that nothing
stopped](images/loss.png)"""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that a page links, and those that they link."""
    pages = [_repository_path(file.src_uri) for file in files.documentation_pages()] + [_README]
    seen = set(pages)
    for page in pages:  # grows
        if not page.startswith(_DOCS):
            files.append(File.generated(config, _site_path(page), abs_src_path=str(ROOT / page)))
        if not page.endswith(".md"):
            continue
        for _, address in _LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), address))
            if target not in seen and (ROOT / target).is_file():
                seen.add(target)
                pages.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page with its links as paths of the site."""
    source = page.file.src_uri
    folder = posixpath.dirname(_repository_path(source))

    def translate(link: re.Match[str]) -> str:
        target = _site_path(posixpath.normpath(posixpath.join(folder, link[2])))
        if files.get_file_from_path(target) is None:
            return link[0]
        return link[1] + posixpath.relpath(target, posixpath.dirname(source) or ".")

    text = _LINK.sub(translate, markdown)
    if source == _INDEX:
        title, paragraph, rest = text.split("\n\n", 2)
        return f"{title}\n\n{paragraph}\n\n{_FRONT}\n\n{rest}"
    return text


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page whose code has no line break within an option or a name with a hyphen."""
    return _CODE.sub(lambda code: _HYPHENATED.sub(r'<span class="whole">\g<0></span>', code[0]), html)


def _site_path(path: str) -> str:
    """Return the path in the site of a file of the repository."""
    return _INDEX if path == _README else path.removeprefix(_DOCS)


def _repository_path(path: str) -> str:
    """Return the path in the repository of a file of the site."""
    if path == _INDEX:
        return _README
    return _DOCS + path if (ROOT / _DOCS / path).is_file() else path
