"""Before a run: a first recipe, its settings by trial, its costs, its basis, its digests."""
