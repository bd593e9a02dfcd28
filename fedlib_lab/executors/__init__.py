"""Ways to train a round elsewhere than in this process: forks, Ray."""
