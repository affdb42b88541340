"""The exception tree. Every error a user can cause names the thing, the value, and what to do.

SamovarError
├── ValidationError          a request or parameter is wrong          HTTP 400
│   ├── NotFoundError        a named model or object does not exist   HTTP 404
│   ├── TooLargeError        a body or list is over its limit         HTTP 413
│   └── ConflictError        the state of things does not allow it    HTTP 409
├── ConfigError              a flag or config file is wrong           exit code 2
├── CheckpointError          a checkpoint is missing, damaged or does not fit the model
├── MemoryPlanError          the model does not fit; says the smallest change that helps
├── OverloadedError          a queue limit is reached; retry later    HTTP 503
└── EngineDeadError          the engine process died or is stuck      HTTP 503
"""

from __future__ import annotations

from typing import Any


class SamovarError(Exception):
    """Base of every error this package raises on purpose."""


class ValidationError(SamovarError, ValueError):
    """A request is wrong. `parameter` names the field as the caller spelled it."""

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class NotFoundError(ValidationError):
    """The named model, adapter or object does not exist here."""


class TooLargeError(ValidationError):
    """A body, prompt list or string is over its documented limit."""


class ConflictError(ValidationError):
    """What was asked for is right, but not in the state things are in now."""


class ConfigError(SamovarError, ValueError):
    """A flag, environment variable or config file value is wrong."""


class CheckpointError(SamovarError):
    """A checkpoint is missing, damaged, or does not match the model it claims to be."""


class MemoryPlanError(SamovarError):
    """What was asked for does not fit into memory; the message says what would."""


class OverloadedError(SamovarError):
    """A queue limit is reached. `reason` comes from a closed set used as a metric label."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class EngineDeadError(SamovarError):
    """The engine process died, is stuck, or is shutting down."""
