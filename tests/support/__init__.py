"""What several tests share: stand-ins, targets of child processes, stored results. Found through `pythonpath`."""
