"""Every gate catches what it is for, and lets the neighbouring legal form pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import budgets, configuration_doc, habits, size
from tools.source import Source, Violation
from tools.waivers import apply, read_waivers

HEAD = '"""A module."""\n'


def found(tmp_path: Path, path: str, text: str) -> set[str]:
    """Names of the gates that a file at `path` breaks."""
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    source = Source(file, tmp_path)
    own = [*budgets.file_length(source), *budgets.functions(source), *budgets.docstrings(source)]
    return {v.gate for v in (*own, *habits.check([source]))}


LONG = "    x = 1\n" * 61
NINE = ", ".join(f"{name}: int" for name in "abcdefghi")
BROKEN = {
    "file-length": ("samovar/text/a.py", HEAD + "X = 1\n" * 500),
    "model file-length": ("samovar/models/a.py", HEAD + "X = 1\n" * 150),
    "kernel file-length": ("samovar/kernels/a.py", HEAD + "X = 1\n" * 800),
    "function-length": ("samovar/text/a.py", HEAD + f'def f() -> None:\n    """Say."""\n{LONG}'),
    "parameters": (
        "samovar/text/a.py",
        HEAD + "def _f(a: int, b: int, c: int, *d: int, e: int, f: int, g: int, h: int, i: int) -> None: ...",
    ),
    "another decorator's parameters": (
        "samovar/attention/a.py",
        HEAD + f"@functools.cache\n@torch.jit\ndef _f({NINE}) -> None: ...",
    ),
    "annotations of a kernel annotations": ("samovar/attention/a.py", HEAD + "@triton.jit\ndef _f(a) -> None: ..."),
    "annotations": ("samovar/text/a.py", HEAD + "def _f(a) -> None: ..."),
    "result annotations": ("samovar/text/a.py", HEAD + "class _A:\n    def f(self): ..."),
    "docstring": ("samovar/text/a.py", "X = 1\n"),
    "class docstring": ("samovar/text/a.py", HEAD + "class A:\n    x = 1\n"),
    "function docstring": ("samovar/text/a.py", HEAD + "def f() -> None: ..."),
    "method docstring": ("samovar/text/a.py", HEAD + 'class A:\n    """A."""\n    def f(self) -> None:\n' + "        x = 1\n" * 6),
    "sentence docstring": ("samovar/text/a.py", HEAD + 'def f() -> None:\n    """forward"""'),
    "unfinished": ("samovar/text/a.py", HEAD + "X = 1  # TO" "DO later\n"),
    "name": ("samovar/text/utils.py", HEAD),
    "class name": ("samovar/text/a.py", HEAD + "class _CacheManager:\n    x = 1\n"),
    "environment": ("samovar/text/a.py", HEAD + "import os\nX = os.environ['A']\n"),
    "getenv environment": ("samovar/text/a.py", HEAD + "from os import getenv\n"),
    "torch-cuda": ("samovar/worker/a.py", HEAD + "import torch\ntorch.cuda.synchronize()\n"),
    "try-import": ("samovar/text/a.py", HEAD + "try:\n    import x\nexcept ImportError:\n    x = None\n"),
    "broad-except": ("samovar/text/a.py", HEAD + "try:\n    f()\nexcept Exception:\n    pass  # why\n"),
    "bare broad-except": ("samovar/text/a.py", HEAD + "try:\n    f()\nexcept:\n    g()\n"),
    "pickle": ("samovar/text/a.py", HEAD + "import pickle\n"),
    "eval": ("samovar/text/a.py", HEAD + "eval('1')\n"),
    "getattr-config": ("samovar/models/a.py", HEAD + "X = getattr(config, 'a', 1)\n"),
    "hasattr getattr-config": ("samovar/models/a.py", HEAD + "X = hasattr(self.config, 'a')\n"),
}  # fmt: skip

FINE = {
    "a long test": ("tests/text/a.py", HEAD + "X = 1\n" * 700),
    "a long kernel": ("samovar/kernels/a.py", HEAD + f'def f() -> None:\n    """Say."""\n{LONG}' + "X = 1\n" * 500),
    "a Triton kernel outside of kernels": (
        "samovar/attention/a.py",
        HEAD + f'@triton.jit\ndef f({NINE}) -> None:\n    """Say."""\n{LONG}',
    ),
    "a Triton kernel with options": (
        "samovar/attention/a.py",
        HEAD + f'@triton.jit(do_not_specialize=["a"])\ndef f({NINE}) -> None:\n    """Say."""\n{LONG}',
    ),
    "a long schema": ("samovar/server/openai/schema.py", HEAD + "X = 1\n" * 700),
    "a docstring does not count": (
        "samovar/text/a.py",
        HEAD + 'def f() -> None:\n    """Say.\n\n' + "    more\n" * 60 + '    """\n    x = 1\n',
    ),
    "eight parameters and self": (
        "samovar/text/a.py",
        HEAD
        + "class _A:\n    def f(self, a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int) -> None: ...",
    ),
    "a short public method": (
        "samovar/text/a.py",
        HEAD + 'class A:\n    """A."""\n    def f(self) -> int:\n        return 1\n',
    ),
    "a private class": ("samovar/text/a.py", HEAD + "class _A:\n    x = 1\n"),
    "metadata is a word": ("samovar/text/a.py", HEAD + "class _MetadataReader:\n    x = 1\n"),
    "the environment's door": ("samovar/config/field.py", HEAD + "import os\nX = os.environ\n"),
    "torch.cuda at home": ("samovar/hardware/a.py", HEAD + "import torch\ntorch.cuda.synchronize()\n"),
    "toolchains of kernels": ("samovar/kernels/a.py", HEAD + "try:\n    import x\nexcept ImportError:\n    x = None\n"),
    "a broad except that acts": (
        "samovar/text/a.py",
        HEAD + "try:\n    f()\nexcept Exception as e:\n    # The callback is the user's.\n    g(e)\n",
    ),
    "a narrow except": ("samovar/text/a.py", HEAD + "try:\n    f()\nexcept ValueError:\n    pass\n"),
    "getattr elsewhere": ("samovar/text/a.py", HEAD + "X = getattr(config, 'a', 1)\n"),
    "an attribute in models": ("samovar/models/a.py", HEAD + "X = getattr(self, 'a')\n"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_gates_catch(name: str, tmp_path: Path) -> None:
    assert found(tmp_path, *BROKEN[name]) == {name.split()[-1]}


@pytest.mark.parametrize("name", FINE)
def test_gates_let_pass(name: str, tmp_path: Path) -> None:
    assert found(tmp_path, *FINE[name]) == set()


def test_averages(tmp_path: Path) -> None:
    file = tmp_path / "samovar" / "text" / "a.py"
    file.parent.mkdir(parents=True)
    file.write_text(HEAD + "".join(f"def f{i}() -> None:\n" + "    x = 1\n" * 31 for i in range(8)))
    assert {v.gate for v in budgets.averages([Source(file, tmp_path)])} == {"median-file", "p90-function"}
    file.write_text(HEAD)
    assert list(budgets.averages([Source(file, tmp_path)])) == []
    file.write_text(HEAD + "".join(f"@triton.jit\ndef f{i}() -> None:\n" + "    x = 1\n" * 31 for i in range(4)))
    assert list(budgets.averages([Source(file, tmp_path)])) == []


def test_texts_name_no_machine(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "a.md"
    root, host = "".join(("ro", "ot")), ".".join(("py" + "pi", "org"))  # in pieces, so that this file names neither
    page.write_text(f"see /{root}/x\nand https://{host}\nfine: network/{root}, ./{root}/x\n")
    assert [(v.where, v.line) for v in habits.texts(tmp_path)] == [("docs/a.md", 1), ("docs/a.md", 2)]


def test_waivers_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "waivers.txt"
    path.write_text("# comment\n\nparameters a.py:f the signature is a standard's\nname b.py gone\n")
    waivers = read_waivers(path)
    hits = [Violation("parameters", "a.py:f", 3, "9"), Violation("parameters", "a.py:g", 3, "9")]
    left, unused = apply(hits, waivers)
    assert left == hits[1:] and unused == ["name b.py"]
    path.write_text("parameters a.py\n")
    with pytest.raises(ValueError, match=r"waivers\.txt:1"):
        read_waivers(path)


def test_every_waiver_has_a_reason() -> None:
    assert all(len(reason.split()) >= 3 for reason in read_waivers().values())


def test_the_configuration_page_is_current() -> None:
    assert configuration_doc.complaint() is None
    page = configuration_doc.render()
    for group in configuration_doc.GROUPS:
        assert all(setting.flag[2:] in page for setting in group.settings.values())


def test_size_report() -> None:
    text = size.report({"samovar/text/a.py": 10, "samovar/x.py": 1}, {"samovar/text/a.py": 4, "samovar/old/b.py": 2})
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["samovar/text"] == ["1", "10", "+6"] and rows["samovar/old"] == ["0", "0", "-2"]
    assert rows["total"] == ["2", "11", "+5"]
