"""The source verdict: names of the task that a file redefines, with the verdict in a namespace of its own, and what
upstream's static checker says of the text."""
