"""Model blocks as torch modules, in `build`; importing this package alone loads no torch."""
