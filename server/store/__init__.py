"""Put, look up, get and delete chunks."""
