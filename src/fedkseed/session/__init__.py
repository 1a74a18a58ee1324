"""A federation of separate machines, whatever carries its bytes: `fedkseed.flower` does, and `fedkseed.https`."""
