"""Says what this machine offers and what Samovar will use of it, and why; safe to paste into a report."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from samovar.cli.output import size, table
from samovar.config.description import ModelDescription
from samovar.config.engine import EngineConfig
from samovar.config.field import VARIABLES, Group, cache_root, field, kernel_cache, variable
from samovar.config.load import Settings
from samovar.config.resolve import dtype
from samovar.core.device_facts import DeviceFacts
from samovar.hardware.device import may_have_gpu, probe
from samovar.hub.aliases import ALIASES
from samovar.hub.download import alias_path, is_cached
from samovar.native.library import NativeError, find, load

USAGE = "samovar doctor [--json]"
POSITIONAL = None
PACKAGES = {
    "torch": "torch",
    "tokenizers": "tokenizers",
    "gguf": "gguf",
    "huggingface-hub": "huggingface_hub",
    "jinja2": "jinja2",
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "msgspec": "msgspec",
    "pyzmq": "zmq",
    "numpy": "numpy",
}
"""Distribution -> module, of what the engine is built on."""
OPTIONAL = {
    "triton": "triton",
    "flashinfer-python": "flashinfer",
    "flash-attn-4": "flash_attn",
    "mistral-common": "mistral_common",
    "llguidance": "llguidance",
    "xgrammar": "xgrammar",
}
"""The same for what it can do without."""
BFLOAT16_MODEL = ModelDescription(
    path=Path(), format="dummy", architecture="LlamaForCausalLM", config={"dtype": "bfloat16"}
)
"""What most checkpoints are; the model decides with the machine."""
SECRET = ("KEY", "TOKEN")


class DoctorOptions(Group):
    """The form of the answer."""

    json: bool = field(default=False)
    """Print one JSON object instead of tables."""


OPTIONS = (DoctorOptions,)


def run(settings: Settings) -> int:
    """Look at everything and print it; never fails because something is missing."""
    facts = probe("auto")
    sections = {
        "system": system(facts),
        "packages": packages(),
        "gpu": gpu(facts),
        "cpu kernels": cpu_kernels(),
        "caches": caches(),
        "variables": variables(),
        "what will be used": verdicts(facts),
    }
    if settings[DoctorOptions].json:
        print(json.dumps(sections, indent=2))
        return 0
    for title, rows in sections.items():
        print(f"{title}\n{table([[name, text] for name, text in rows.items()])}\n")
    return 0


def system(facts: DeviceFacts) -> dict[str, str]:
    """Machine, device, memory and compiler."""
    compiler = find_compiler()
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": f"{platform.python_version()} at {sys.executable}",
        "device": f"{facts.kind}: {facts.name}",
        "architecture": facts.architecture,
        "threads": f"{facts.num_threads} physical cores may be used",
        "memory": f"{size(facts.available_bytes)} of {size(facts.total_bytes)} available",
        "compiler": compiler or "none found (c++, g++, clang++, or the variable CXX)",
    }


def find_compiler() -> str | None:
    """Path of the C++ compiler, None if there is none."""
    for name in (variable("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def packages() -> dict[str, str]:
    """Versions of what the engine is built on; optional packages are named when present."""
    found = {name: _version(name, module) for name, module in (PACKAGES | OPTIONAL).items()}
    return {name: text or "missing" for name, text in found.items() if text or name in PACKAGES}


def _version(name: str, module: str) -> str | None:
    """The version; None if the module cannot be imported, whatever the metadata says."""
    if find_spec(module) is None:
        return None
    try:
        return version(name)
    except PackageNotFoundError:
        return "present, of unknown version"


def gpu(facts: DeviceFacts) -> dict[str, str]:
    """What the GPU path needs, and what is lost where it is missing."""
    seen = "yes" if facts.kind == "cuda" else "no: models run on the CPU"
    if facts.kind == "cpu" and may_have_gpu():
        seen = "the driver is here, but torch cannot use it: a CPU build of torch, or an older driver than torch needs"
    triton = _version("triton", "triton")
    if triton is None:
        triton = "not installed" + (
            ": plain torch, several times slower (pip install triton)"
            if facts.kind == "cuda"
            else "; only GPUs need it"
        )
    kernels = kernel_cache()
    count = sum(1 for _ in kernels.glob("*/*.cubin")) if kernels.exists() else 0
    return {
        "usable": seen,
        "triton": triton,
        "nvcc": shutil.which("nvcc") or "not found; nothing needs it",
        "kernels": f"{count} compiled in {kernels}" + ("" if count else "; `samovar warmup MODEL` compiles ahead"),
    }


def cpu_kernels() -> dict[str, str]:
    """The library of CPU kernels and its instruction set, or what is lost without it."""
    try:
        library = load()
    except NativeError as error:
        return {"library": f"{error}. Until then CPUs run plain torch, several times slower"}
    isa = f"{library.best_isa}, the best this machine runs of what was built: {', '.join(library.compiled_isas)}"
    return {"library": str(library.path), "instruction set": isa}


def caches() -> dict[str, str]:
    """Where downloads are kept, and which of the embedded models are there."""
    root = cache_root()
    rows = {"folder": f"{root}, {size(shutil.disk_usage(_existing(root)).free)} free"}
    for name, alias in ALIASES.items():
        path = alias_path(alias, root)
        rows[name] = str(path) if is_cached(alias, root) else f"not there ({size(alias.size)}; samovar pull {name})"
    return rows


def _existing(path: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    while not path.exists():
        path = path.parent
    return path


def variables() -> dict[str, str]:
    """The documented variables that are set; keys and tokens are not shown."""
    rows = {}
    for name in VARIABLES:
        if (value := variable(name)) is not None:
            rows[name] = "(set)" if name.endswith(SECRET) else value
    return rows or {"none": "no documented variable is set"}


def verdicts(facts: DeviceFacts) -> dict[str, str]:
    """What follows for a model."""
    decided = dtype(EngineConfig(), BFLOAT16_MODEL, facts)
    return {
        "dtype": f"{decided.value} ({decided.reason})" if decided else EngineConfig().model.dtype,
        "kernels": f"{_kernels(facts)}; `samovar routes MODEL` lists each operation",
        "memory": "`samovar plan MODEL` says what fits",
    }


def _kernels(facts: DeviceFacts) -> str:
    if facts.kind == "cuda":
        return "Triton" if find_spec("triton") is not None else "plain torch"
    return "C++" if find() is not None else "plain torch"
