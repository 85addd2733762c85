"""`make bench`: kvzip beside its peers, on inputs of its own making, in one run."""
