"""Model blocks as torch modules, built one at a time from a ModelSpec."""
