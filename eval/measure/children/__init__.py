"""What programs of evidence run inside a child process: no programs themselves."""
