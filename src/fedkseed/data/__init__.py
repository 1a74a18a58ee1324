"""Instruction data: reading, wording, and division among clients."""
