"""Child processes: what they may touch (cell), and the checked words they say (frames). Knows nothing else of kbsub."""
