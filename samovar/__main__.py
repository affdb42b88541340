"""`python -m samovar` is the `samovar` command."""

from __future__ import annotations

import sys

from samovar.cli.main import main

sys.exit(main())
