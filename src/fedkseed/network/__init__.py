"""Several machines: what is said, and over what."""
