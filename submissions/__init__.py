"""Candidate files, one folder a task. They are data to be judged: nothing here imports the rest of kbsub."""
