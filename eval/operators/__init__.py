"""What mathematics is known of a task's operator, one package each."""
