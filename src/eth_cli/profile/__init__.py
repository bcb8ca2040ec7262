"""Measured or estimated costs of a model's blocks and a cluster's links."""
