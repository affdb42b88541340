"""The `samovar` command. Each subcommand is imported only when named; nothing here loads torch at import."""
