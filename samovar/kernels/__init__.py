"""One folder per op: `__init__.py` declares it (the body is the reference), its sibling files implement it."""
