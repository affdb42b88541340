"""The command table, start-up cost in a fresh interpreter, help, and errors as one line."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy
import pytest

from samovar.cli import doctor
from samovar.cli.main import ALIASES, COMMANDS, GROUPS, main
from samovar.config.load import all_settings
from samovar.hardware.device import probe

INNER = {f"{group} {name}": entry for group, table in GROUPS.items() for name, entry in table.items()}
RUNNABLE = {name: module for name, (module, _) in (COMMANDS | INNER).items() if name not in GROUPS}


def fresh(code: str) -> Any:
    """The JSON a fresh interpreter prints last."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def loaded_by(statement: str) -> set[str]:
    return set(fresh(f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"))


def test_help_loads_no_torch_and_few_modules() -> None:
    code = "from samovar.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    modules = loaded_by(code)
    assert not modules & {"torch", "transformers", "numpy", "pydantic", "fastapi", "yaml", "msgspec"}
    assert len([name for name in modules if name.split(".")[0] == "samovar"]) <= 40


def test_help_is_quick() -> None:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "samovar", "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    # The budget is 0.3 s on a quiet machine; a busy one may take several times as long.
    assert min(times) < 1.5


@pytest.mark.parametrize("name", RUNNABLE)
def test_no_command_loads_torch_at_import(name: str) -> None:
    modules = loaded_by(f"import {RUNNABLE[name]}")
    assert not modules & {"torch", "transformers"}


def test_front_ends_load_no_torch() -> None:
    modules = loaded_by(
        "import samovar.cli.main, samovar.server.app, samovar.server.run, samovar.engine.process_client"
    )
    assert not modules & {"torch", "transformers"}


def test_the_scheduler_loads_nothing_from_outside() -> None:
    modules = {name.split(".")[0] for name in loaded_by("import samovar.schedule.scheduler")}
    allowed = set(sys.stdlib_module_names) | {"samovar", "__main__", "sitecustomize", "_distutils_hack"}
    editable = {name for name in modules if name.startswith(("_virtualenv", "_editable", "__editable__"))}
    assert modules - allowed - editable == set()


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    command = importlib.import_module(RUNNABLE[name])
    for setting in all_settings(command.OPTIONS).values():
        assert setting.flag[2:] in text or setting.name in getattr(command, "UNUSED", ())
    assert text.startswith(f"usage: samovar {name}")


def test_help_topics(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help=max-num-seqs"]) == 0
    assert "Sequences that may run in one step" in capsys.readouterr().out
    assert main(["serve", "--help=scheduler"]) == 0
    text = capsys.readouterr().out
    assert "--max-num-seqs" in text and "--port" not in text
    assert main(["serve", "--help=max-num-seq"]) == 2
    assert "did you mean max-num-seqs?" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import samovar

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == samovar.__version__


def test_overviews(capsys: pytest.CaptureFixture[str]) -> None:
    tables = [([], COMMANDS), *(([group], table) for group, table in GROUPS.items())]
    for words, table in tables:
        for asked in (words, [*words, "--help"]):
            assert main(asked) == 0
            text = capsys.readouterr().out
            assert all(name in text and summary in text for name, (_, summary) in table.items())


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["serv"], 2, "unknown command 'serv'; did you mean 'serve'?"),
        (["bench", "latncy"], 2, "did you mean 'latency'?"),
        (["zzz"], 2, "unknown command 'zzz'; there are serve"),
        (["serve", "--max-num-sequences", "1"], 2, "did you mean --max-num-seqs?"),
        (["serve", "a", "b"], 2, "unexpected argument 'b'; usage: samovar serve"),
        (["serve", "m", "--trust-remote-code"], 2, "--trust-remote-code"),
        (["serve", "m", "-tp", "2"], 2, "--tensor-parallel-size 2 is not available yet"),
        (["serve", "m", "--api-key", ""], 2, "--api-key must not be empty"),
        (["serve", "m", "--served-model-name", " "], 2, "--served-model-name must not be empty"),
        (["serve", "m", "--threads", "100000"], 2, "--threads must be <= 1024"),
        (["plan", "./nowhere"], 1, "./nowhere"),
        (["plan", "no such alias"], 1, "no such alias"),
        (["generate"], 2, "no input file"),
        (["generate", "./nowhere.txt"], 2, "./nowhere.txt: cannot be read: No such file or directory\n"),
        (["bench", "serve", "--goodput", "x:1"], 2, "--goodput must be"),
        (["chat", "--url", "ftp://x"], 2, "--url ftp://x"),
    ],
)
def test_errors_are_one_line(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    err = capsys.readouterr().err
    assert message in err and err.startswith("samovar: ") and len(err.splitlines()) == 1


def test_debug_shows_where_it_came_from() -> None:
    words = [sys.executable, "-m", "samovar", "serve", "./nowhere", "--log-level", "debug"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" in done.stderr and "CheckpointError" in done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m samovar serve --help | head -1", shell=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("usage:") and done.stderr == ""


def test_doctor_asks_python_and_the_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that can be imported is not missing, whatever its metadata say; the dtype is the resolver's."""
    monkeypatch.setattr(
        doctor, "PACKAGES", {"no-such-distribution": "json", "torch": "no_such_module", "numpy": "numpy"}
    )
    found = doctor.packages()
    assert found["no-such-distribution"] == "present, of unknown version"
    assert found["torch"] == "missing" and found["numpy"] == numpy.__version__
    fast = replace(probe("cpu"), kind="cuda", has_fast_bf16=False, architecture="sm_70")
    assert doctor.verdicts(fast)["dtype"] == "float16 (sm_70 has no bfloat16)"
    assert doctor.verdicts(replace(fast, kind="cpu"))["dtype"] == "float32 (sm_70 has no fast bfloat16)"


def test_collect_env_is_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert ALIASES == {"collect-env": "doctor"}
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    monkeypatch.setenv("SAMOVAR_API_KEY", "sk_very_secret")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["collect-env", "--json"]) == 0
    text = capsys.readouterr().out
    assert "secret" not in text
    sections = json.loads(text)
    assert sections["variables"]["HF_TOKEN"] == "(set)"
    assert {"system", "packages", "gpu", "cpu kernels", "caches", "variables", "what will be used"} == sections.keys()
    assert sections["system"]["device"].startswith(("cpu: ", "cuda: "))
    assert main(["doctor"]) == 0
    assert "what will be used" in capsys.readouterr().out
