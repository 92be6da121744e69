"""The `wavegate` command: one module per sub-command, each imported only when it runs."""
