"""The command line. Heavy imports wait until a command needs them."""
