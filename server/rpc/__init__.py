"""Calls as they come in over gRPC: checked, scheduled, answered."""
