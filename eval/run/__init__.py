"""Who judges what where, and what follows from it: runner, batch, cluster, gate."""
