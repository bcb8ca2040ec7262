"""Executes plans: jobs, backends and supervision; the torch code is in `launch.runtime`."""
