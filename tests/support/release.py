"""Build of a release: sdist and wheel in dist/, with links to a public repository. Nothing is published.

No file of the project names a public address, because none is its own yet, and a stranger could register it.
`make dist REPOSITORY=https://host/owner/name` writes that address into a copy of the last commit, and builds the copy.
"""

from __future__ import annotations

import mimetypes
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Addresses have the form of GitHub's; GitLab redirects them to its own.
URLS = """
[project.urls]
Homepage = "{repository}"
Documentation = "{repository}/blob/{tag}/README.md#documentation"
Changelog = "{repository}/blob/{tag}/CHANGELOG.md"
Issues = "{repository}/issues"
"""

# Code, in which nothing is changed; or the beginning of a link, picture or reference, and its target without a scheme.
_CODE_OR_LINK = re.compile(
    r"^```.*?^```$|`[^`\n]+`|(\]\(|^\[[^\]]+\]: )([^\s():#][^\s():]*)(?=[)\s])", re.MULTILINE | re.DOTALL
)


def tracked_files() -> list[str]:
    """Return the paths that git tracks, those removed from the working tree left out."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def copy_for_release(folder: Path, repository: str) -> str:
    """Copy what git tracks, with project URLs and links of the README that lead to a repository; return their tag."""
    for name in tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    settings, readme = folder / "pyproject.toml", folder / "README.md"
    tag = f"v{tomllib.loads(settings.read_text(encoding='utf-8'))['project']['version']}"
    with settings.open("a", encoding="utf-8") as file:
        file.write(URLS.format(repository=repository, tag=tag))
    readme.write_text(with_absolute_links(readme.read_text(encoding="utf-8"), repository, tag), encoding="utf-8")
    return tag


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """Return Markdown whose relative links and pictures lead to the files of a tag; anchors within the page stay."""

    def replace(match: re.Match[str]) -> str:
        if match[2] is None:
            return match[0]
        is_picture = (mimetypes.guess_type(match[2])[0] or "").startswith("image/")
        return f"{match[1]}{repository}/{'raw' if is_picture else 'blob'}/{tag}/{match[2]}"

    return _CODE_OR_LINK.sub(replace, text)


class _Targets(HTMLParser):
    """Collector of targets of links and pictures that are relative, and so lead nowhere on a package index."""

    def __init__(self) -> None:
        super().__init__()
        self.relative: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        targets = [value or "" for name, value in attrs if name in {"href", "src"}]
        self.relative += [target for target in targets if not target.startswith(("https://", "#"))]


def check_page(text: str) -> None:
    """Exit if the page of the package would have relative links; rendered as a package index does.

    `twine check` renders no Markdown.
    """
    from readme_renderer import markdown  # of the extra `dist`, which the tests lack

    page, targets = markdown.render(text), _Targets()
    if page is None:
        sys.exit("README.md could not be rendered.")
    targets.feed(page)
    if targets.relative:
        sys.exit(f"README.md has links that `with_absolute_links` does not know: {', '.join(targets.relative)}")


def main(repository: str) -> None:
    """Build and check the last commit, then replace dist/."""
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+){2,}", repository):
        sys.exit(f"REPOSITORY must be an address such as https://host/owner/name, not {repository!r}.")
    changes = ["git", "status", "--porcelain", "--untracked-files=no"]
    if subprocess.run(changes, cwd=ROOT, check=True, capture_output=True).stdout:
        sys.exit("The working tree differs from the last commit, which is what a release holds. Commit first.")
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "source"), Path(folder, "dist")
        tag = copy_for_release(source, repository)
        subprocess.run([sys.executable, "-m", "build", "--outdir", built, source], check=True)
        subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *built.iterdir()], check=True)
        check_page((source / "README.md").read_text(encoding="utf-8"))
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        shutil.copytree(built, ROOT / "dist")
    print(f"dist/ holds the release. Links lead to {repository} at {tag}: push that tag first.")  # noqa: T201 - a command


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
