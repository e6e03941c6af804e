"""Style of files that no formatter checks."""

from __future__ import annotations

from pathlib import Path

MOST_COLUMNS = 120


def test_lines_of_native_kernels_are_short(repository: Path) -> None:
    """The limit of `kernels/native/.clang-format`; run `clang-format -i` in that folder to reformat."""
    files = [file for end in ("*.h", "*.cpp") for file in (repository / "kernels" / "native").glob(end)]
    lines = {file.name: max(map(len, file.read_text(encoding="utf-8").splitlines())) for file in files}
    assert lines and {name for name, longest in lines.items() if longest > MOST_COLUMNS} == set()
