import re
import shlex
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code):
    exec(compile(code, "README.md", "exec"), {})


def test_commands_are_one_line_each_and_install_what_is_pinned():
    commands = blocks("sh")
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command)
        assert command.count("\n") == 1
        assert words[words.index("-c") + 1] == "constraints.txt"
        assert (README.parent / "constraints.txt").exists()
    assert commands[0].strip().endswith("python -m benchmarks.citation")
    assert commands[1].strip().endswith("python -m pytest -n auto")
