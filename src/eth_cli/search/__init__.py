"""The planner: pure. No torch, no files, no printing, no clock, no global random state."""
