"""Counts phrases that read as if translated. `make lint` runs it: python tests/phrases.py [--show] [PATH...]

Write subject, verb, object, and the field's terms: "in the queue", not "behind"; "reports", not "tells"; "its own", not
"of its own". MOST is the number of places that are left; lower it whenever you remove some.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("common", "router", "prefill_worker", "decode_worker", "kernels", "docs", "helm")
NONE_IN = ("README.md", "CONTRIBUTING.md", "docs/quickstart.md", "docs/index.md", "common/config", "router/cli")
MOST = 12
KINDS = {".py", ".md", ".h", ".cpp", ".yaml", ".js", ".html"}
PHRASES = re.compile(
    r"\bbehind (?!an? |the (?:proxy|load balancer|ingress|firewall)|NAT)|\bbesides?\b|\b(?:so|as) many\b"
    r"|\bof (?:its|their) own\b|\banew\b|\btold\b|\btells?\b|\bhears?\b|\bas (?:it is|they are|things are)\b"
    r"|\b(?:is|are) to be\b|\bone after the other\b|\bin turns\b|\bby itself\b|\bmeanwhile\b"
    r"|\b(?:gives?|takes?) (?:it |them )?back\b|\bnobody\b|\bwhoever\b|\bat all\b|\bwithout a word\b|\bgo(?:es)? on\b"
    r'|"""Of |"""What [a-z]+ (?:must|may|is|are|was|has|have)\b|\b(?:stands?|lies?) (?:in|at|behind|before)\b'
)


def places(path: Path) -> list[str]:
    """The lines of a file, or of the files in a folder, that contain a phrase."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in KINDS)
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:150]}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if PHRASES.search(line)
    ]


def main(arguments: list[str]) -> int:
    """Exit status 1 if there are more places than allowed."""
    paths = [ROOT / argument for argument in arguments if argument != "--show"]
    if "--show" in arguments:
        print("\n".join(place for path in paths or [ROOT / name for name in FOLDERS] for place in places(path)))
        return 0
    strict = [place for name in NONE_IN for place in places(ROOT / name)]
    found = [place for name in FOLDERS for place in places(ROOT / name)]
    print(f"phrases: {len(found)} places, at most {MOST}")
    if strict:
        print("\n".join(["rewrite these sentences:", *strict]))
    if len(found) > MOST:
        print("rewrite what you added: python tests/phrases.py --show")
    return int(bool(strict) or len(found) > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
