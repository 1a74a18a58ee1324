"""Families that need no shapes: what most tests of directions go through."""

from fedkseed.directions import FAMILIES

PLAIN = [name for name, family in FAMILIES.items() if family.factored is None]
FACTORED = [name for name, family in FAMILIES.items() if family.factored is not None]
