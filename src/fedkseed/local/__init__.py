"""What a client does with its data: local steps."""
