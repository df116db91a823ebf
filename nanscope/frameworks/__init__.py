"""What nanscope knows of each framework: rows, never imports."""
