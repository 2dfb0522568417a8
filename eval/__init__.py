"""What this project adds to the official verdict; it never edits what upstream says."""
