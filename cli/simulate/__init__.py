"""kvstore simulate: traces replayed on policies, without a server and without bytes."""
