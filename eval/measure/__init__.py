"""Programs that make evidence on a GPU and are no part of judging one candidate: `kbsub measure NAME`."""
