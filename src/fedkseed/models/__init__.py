"""Language models: loading and the loss."""
