"""eth: plan and launch training of large models over clusters of mixed GPUs."""

__version__ = "0.1.0"
