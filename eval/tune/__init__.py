"""Choice of a drafter's fastest setting on this machine."""
