"""Instruction data: reading, wording, sharing out over clients."""
