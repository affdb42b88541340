"""Settings: declared once, read from flags, environment and files, then resolved with reasons. Torch-free."""
