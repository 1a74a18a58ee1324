"""Everything that travels between server and clients: records, their bytes, the precision of their numbers."""
