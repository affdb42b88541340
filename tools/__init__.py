"""The gates of this repository: budgets and habits, checked in seconds. `python -m tools.check` runs them all."""
