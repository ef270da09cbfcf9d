"""The HTTP port and the KV event sockets: metrics, dashboard, events."""
