"""Tests of Triton kernels: in the interpreter where there is no GPU (see tests/conftest.py)."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
