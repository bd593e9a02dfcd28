"""Methods whose clients hold a part of the network, cut in depth or width."""
