"""Ways to run a job: here, or on the machines of a cluster."""
