"""What runs in each worker process; the only launch code that imports torch."""
