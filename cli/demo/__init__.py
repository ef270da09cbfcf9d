"""kvstore demo: real processes with a small model of our own."""
