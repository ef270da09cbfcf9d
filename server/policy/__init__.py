"""Pure decisions: what to keep and whom to evict. No I/O, no clock, no tier."""
