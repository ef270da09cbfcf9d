"""The ground floor: the words that the server and its clients share."""
