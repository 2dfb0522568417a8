"""One module a verb of the `kbsub` command; `kbsub.eval.cli` registers them."""
