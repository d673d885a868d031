"""Documents must not name what is not there: every relative link of a tracked Markdown file, and every `path` in it that
looks like one of ours, must exist; and so must every heading that a link points at."""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "include", "cli", "examples", "tests", "bench", "docs", "python", "scripts", "cmake", ".ci")


def anchors(markdown):
    """Headings as GitHub names them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", markdown, flags=re.M):
        found.add(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-"))
    return found


def expand(path):
    """a.{c,h} and x{1,2} as a shell would."""
    match = re.search(r"\{([^{}]*)\}", path)
    if not match:
        return [path]
    return [name for part in match[1].split(",") for name in expand(path[: match.start()] + part + path[match.end() :])]


def problems_of(document):
    markdown = document.read_text()
    prose = re.sub(r"^```.*?^```", "", markdown, flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (document.parent / path).resolve() if path else document
        if not there.exists():
            yield f"links to {target}, which is not there"
        elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text()):
            yield f"links to {target}, but there is no such heading"
    for code in re.findall(r"`([^`\n]+)`", prose):
        path = code.split(" ")[0].rstrip(",;:").removeprefix("./")
        if not re.match(r"(%s)/[\w./{},*-]+$" % "|".join(map(re.escape, FOLDERS)), path):
            continue
        if "NAME" in path:  # a placeholder
            continue
        for name in expand(path):
            if not list(ROOT.glob(name.rstrip("/"))):
                yield f"names {name}, which is not there"


def main():
    listed = subprocess.run(["git", "-c", "safe.directory=*", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    documents = [ROOT / name for name in listed.stdout.split()] or sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md"))
    problems = [f"{document.relative_to(ROOT)} {problem}" for document in documents for problem in problems_of(document)]
    print("\n".join(problems) or f"{len(documents)} documents, nothing missing")
    return bool(problems)


sys.exit(main())
