"""Tables, plots and papers, made from result files alone."""
