"""Looking at runs: page, charts, terminal, tables, watching."""
