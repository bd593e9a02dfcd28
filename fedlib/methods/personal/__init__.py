"""Methods whose clients keep a part of the network to themselves."""
