"""What is stored and removed, told to whoever follows."""
